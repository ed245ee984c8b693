"""`amoeba train`: a mixture-of-experts language model on the Hugging Face stack, with our experts.

    report = train(TrainSettings(model="demo"), Console())

transformers.Trainer runs the loop; what is added: experts_implementation="amoeba", a watch over the routers, a run
folder for the report page, checkpoints that appear whole, and a resume with the losses of a run that was never
interrupted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amoeba.backends import fp8, fp8_choice, fp8_triton
from amoeba.core import cost
from amoeba.core.errors import bad_value, counted
from amoeba.data.corpus import load_corpus
from amoeba.data.token_rows import NO_LABEL, PackedDataset, stack
from amoeba.data.tokenizer import load_or_train_tokenizer
from amoeba.integrations.experts_module import experts_modules, weights_of
from amoeba.integrations.model_folder import check_json, has_weights, load_config
from amoeba.integrations.own_tensors import sharded_modules
from amoeba.integrations.precision import set_precision
from amoeba.integrations.text_model import (
    auto_class,
    check_ids,
    check_sequence_length,
    leave_out_router_loss,
    text_config,
)
from amoeba.jobs.cpu_dtype import DtypeChoice, faster_dtype
from amoeba.jobs.placed_model import load_placed
from amoeba.jobs.presets import PRESETS, find_preset
from amoeba.jobs.same_on_ranks import check_same_model
from amoeba.jobs.settings import TrainSettings
from amoeba.jobs.train.resume import Earlier, began_with, check_data, data_facts
from amoeba.jobs.train.run import Run
from amoeba.jobs.train.run_folder import Console, RunReport
from amoeba.observe.router_watch import check_balance
from amoeba.parallel.mesh import RankMesh
from amoeba.parallel.rank_zero import RankZero
from amoeba.placements import RESIDENT
from amoeba.precision.recipes import AUTO, UNCHANGED, operand_formats, summary_of
from amoeba.system.files import shell_command, shell_words

COMMAND = "amoeba train"
# Of each kind of held-out text, to see which experts serve it.
KIND_TOKENS = 2048


@dataclass(frozen=True)
class TrainReport(RunReport):
    model: str


def train(settings: TrainSettings, console: Console, **asked: Any) -> TrainReport:
    """asked: resume, start_from, trust_remote_code and rank_zero of `Run`."""
    run = Run(COMMAND, settings, console, **asked)
    run.check_same()
    if settings.model not in PRESETS and not (Path(settings.model) / "config.json").is_file():
        find_preset(settings.model)  # says which there are
    config = None
    if settings.model not in PRESETS:
        check_json(Path(settings.model) / "config.json")
        config = load_config(settings.model, trust_remote_code=run.trust_remote_code)
        check_sequence_length(config, settings.sequence_length)
        _check_unquantised(settings.model, config)
    with run.in_folder():
        return _train(run, settings, config)


def _train(run: Run, settings: TrainSettings, config: Any) -> TrainReport:
    from amoeba.integrations.coverage import check_coverage
    from amoeba.integrations.transformers import register
    from amoeba.jobs.sharded_model import ShardedModel, count_parameters, shard_model
    from amoeba.jobs.train.manifest import Artifact, WholeModel
    from amoeba.jobs.train.trainer import Rows
    from amoeba.jobs.train.training_loop import make_trainer, run_to_end

    console, rank_zero, trust_remote_code = run.console, run.rank_zero, run.trust_remote_code
    register()
    mesh = run.mesh()
    kept: Artifact = WholeModel(rank_zero.here) if mesh is None else ShardedModel(mesh)
    if (ended := run.finished(kept.name, TrainReport, "model")) is not None:
        longer = f"{COMMAND} {shell_words('--model', ended.model)} --data ... --out ANOTHER"
        console.say(f"already finished after {ended.steps} steps; to train longer: {longer}")
        return ended
    earlier = run.earlier(kept.name)
    torch.manual_seed(settings.seed)

    corpus = load_corpus(settings.data, held_out=settings.held_out, seed=settings.seed)
    console.say(f"data: {corpus.description}")
    content = began_with(corpus)
    checkpoint_model = None if settings.model in PRESETS else settings.model
    if earlier:
        check_data(earlier, content)
        checkpoint_model = str(earlier.checkpoint) if earlier.checkpoint else checkpoint_model
    tokenizer = load_or_train_tokenizer(
        checkpoint_model, corpus, settings.vocab_size, trust_remote_code=trust_remote_code
    )
    train_rows = PackedDataset(corpus.train, tokenizer, settings.sequence_length)
    held_out_rows = PackedDataset(corpus.held_out, tokenizer, settings.sequence_length, keep_last=True)
    if config is not None:
        check_ids(config, max(train_rows.largest_id(), held_out_rows.largest_id()))
    digests = {"rows to train on": train_rows.digest(), "rows held out": held_out_rows.digest()}
    rank_zero.check_same(data_facts(content) | digests, "give every rank the same --data, --held-out and tokenizer")
    console.say(
        f"{len(train_rows)} rows of {settings.sequence_length} tokens, {len(held_out_rows)} held out; "
        f"tokenizer with {len(tokenizer)} tokens"
    )

    with run.importing_compiler():
        model = _build_model(settings, tokenizer, config, trust_remote_code, mesh)
    leave_out_router_loss(model.config)
    if config is not None and type(model.config) is not type(config):
        console.say(f"training and saving only {type(model).__name__}, the text part of {settings.model}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = _compute_dtype(settings, earlier, model, train_rows, console, rank_zero)
    if device == "cuda":
        round_to(model, dtype)  # the optimizer keeps what bf16 has no room for
    else:
        content["dtype"] = str(dtype).removeprefix("torch.")
    covered = check_coverage(model, "--model", f"choose another, or a preset: {', '.join(PRESETS)}")
    check_same_model(rank_zero, model, {"dtype of the run": str(dtype)})
    if mesh is not None and not sharded_modules(model):
        shard_model(model, mesh.experts)
    parameters = count_parameters(model, None if mesh is None else mesh.experts)
    console.say(
        f"model: {model.config.model_type}, {parameters / 1e6:.1f}M parameters, on {device} in "
        f"{str(dtype).removeprefix('torch.')}, experts by {covered}{'' if mesh is None else f' {mesh}'}"
    )
    precision = None
    if settings.precision != UNCHANGED:
        set_precision(model, settings.precision)
        precision = run_precision(model, settings.precision, torch.device(device))
        console.say(str(precision))
    check_balance(model, settings.balance, settings.z_loss_coefficient)
    run.describe(model, earlier, content, None if precision is None else asdict(precision))
    documents = max(train_rows.documents_per_row(), held_out_rows.documents_per_row())
    rows = Rows(train_rows, held_out_rows, stack, settings.sequence_length, documents, settings.sequence_length)
    trainer = make_trainer(run, model, tokenizer, rows, settings.steps, dtype, kept, mesh)
    outcome, kept_in = run_to_end(trainer, run.folder, earlier)
    if rank_zero.ranks is None and not outcome.interrupted:
        length, kinds = settings.sequence_length, corpus.held_out_by_kind.items()
        rows_of = {kind: PackedDataset(texts, tokenizer, length, keep_last=True) for kind, texts in kinds}
        _note_text_kinds(trainer, rows_of)
    report = TrainReport(**asdict(outcome), model=kept_in)
    trainer.run_log.finish(report)
    return report


def _note_text_kinds(trainer: Any, rows_of: dict[str, PackedDataset]) -> None:
    watch, model, loads_of = trainer.run_log.watch, trainer.model.eval(), []
    for rows in rows_of.values():
        count = min(len(rows), max(1, KIND_TOKENS // rows.sequence_length))
        batch = {name: part.to(model.device) for name, part in stack([rows[at] for at in range(count)]).items()}
        wanted_T = (batch.pop("labels") != NO_LABEL).flatten()
        with watch.counting(wanted_T) as loads, torch.no_grad(), trainer.compute_loss_context_manager():
            model(**batch, use_cache=False)
        loads_of.append([load_E.tolist() for load_E in loads])
    if rows_of:
        layers = [{"layer": at, "loads": list(of_kinds)} for at, of_kinds in enumerate(zip(*loads_of, strict=True))]
        step = trainer.state.global_step
        trainer.run_log.write({"kind": "text_kinds", "step": step, "kinds": list(rows_of), "layers": layers})


def _check_unquantised(model: str, config: Any) -> None:
    """Experts in codes are frozen and cannot be saved: the run would lose all that it learned."""
    from amoeba.integrations.quantised_models import facts_of

    if (facts := facts_of(config)) is not None and has_weights(Path(model)):
        got = f"one quantised by {facts.get('quant_method')} (config.json of {model})"
        remedy = f"fine-tune it ({shell_command('finetune', model)}), or train its unquantised checkpoint"
        raise bad_value("--model", "a checkpoint whose parameters can all be trained", got, remedy)


def _build_model(
    settings: TrainSettings, tokenizer: Any, config: Any, trust_remote_code: bool, mesh: RankMesh | None
) -> Any:
    """config: of the folder that settings.model is; None for a preset. Weights that are read are this rank's; new ones
    are drawn as one process draws them, and shared out afterwards."""
    from amoeba.jobs.sharded_model import load_share

    if config is None:
        config = find_preset(settings.model).build(len(tokenizer), settings.sequence_length)
    elif has_weights(Path(settings.model)):
        read_in = _gpu_dtype(settings) if torch.cuda.is_available() else torch.float32
        if mesh is None:
            choice = DtypeChoice(read_in, None, "as it is trained")
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            told: dict[str, Any] = {"trains": True, "device": device, "trust_remote_code": trust_remote_code}
            return load_placed(settings.model, choice, RESIDENT, **told)[0]
        return load_share(settings.model, read_in, mesh.experts, trains=True, trust_remote_code=trust_remote_code)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text_config(config), name, getattr(tokenizer, name))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a billion random numbers take a CPU a while
        return auto_class(config).from_config(
            config, experts_implementation="amoeba", dtype=torch.float32, trust_remote_code=trust_remote_code
        )


def round_to(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and saved buffers. What a model computes for itself when it is made, as the frequencies of rotary
    embeddings, keeps its precision, as in a model that is loaded. `model.to` rounds it, too: other angles."""
    modules = model.modules()
    own = {(each, name): each._buffers[name] for each in modules for name in each._non_persistent_buffers_set}
    model.to(dtype)
    for (module, name), buffer in own.items():
        module._buffers[name] = buffer


def _gpu_dtype(settings: TrainSettings) -> torch.dtype:
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32


def _compute_dtype(
    settings: TrainSettings,
    earlier: Earlier | None,
    model: Any,
    rows: PackedDataset,
    console: Console,
    rank_zero: RankZero,
) -> torch.dtype:
    """As it is asked for; else bf16 on a GPU that has it, and on a CPU what the run began with, or what is faster, for
    one process. Ranks would have to measure in step."""
    if settings.exact and not torch.cuda.is_available():
        if settings.dtype == "bfloat16":
            remedy = "leave it out for float32"
            raise bad_value("--dtype with --exact", "float32: parameters are fp32 on a CPU", "bfloat16", remedy)
        return torch.float32
    if torch.cuda.is_available():
        return _gpu_dtype(settings)
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    if earlier is not None:
        return getattr(torch, earlier.began_with.get("dtype", "float32"))
    if rank_zero.ranks is not None:
        return torch.float32
    passes = settings.steps * settings.accumulation
    return faster_dtype(model, rows, batch_size=settings.batch_size, passes=passes, say=console.say)


@dataclass(frozen=True)
class RunPrecision:
    """backend: of all layers, with the reason where it is not that of the kernels; code_bytes: of the weights' codes
    and scales, which are kept with the weights; over_ranks: of the experts that the first rank has."""

    precision: str
    summary: str
    backend: str
    code_bytes: int
    over_ranks: bool = False

    def __str__(self) -> str:
        said = f"experts in {self.precision}: {self.summary}; backend {self.backend}"
        if not self.code_bytes:
            return said
        at_most = "at most " if self.precision == AUTO else ""
        where = " on the first rank" if self.over_ranks else ""
        return f"{said}; the quantised weights take {at_most}{self.code_bytes / 2**20:,.1f} MiB{where}"


def run_precision(model: Any, precision: str, device: torch.device) -> RunPrecision:
    """precision: another than the run's own dtype. device: where the model will be."""
    sharded = {name: placed for name, (_, placed) in sharded_modules(model).items()}
    others = (weights_of(module) for name, module in experts_modules(model).items() if name not in sharded)
    layers = [*(placed.local for placed in sharded.values()), *filter(None, others)]
    refused = [_why_not(device, weights, precision) for weights in layers]
    code_bytes = sum(
        cost.code_bytes(
            experts=weights.num_experts,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            gated=weights.activation.gated,
            format=operand_formats(precision)[1],
        )
        for weights, reason in zip(layers, refused, strict=True)
        if reason is None or precision != AUTO
    )
    return RunPrecision(precision, summary_of(precision), _backends(refused, precision), code_bytes, bool(sharded))


def _why_not(device: torch.device, weights: Any, precision: str) -> str | None:
    if (reason := fp8_triton.why_not_on(device, weights, precision)) is not None:
        return f"{fp8_triton.BACKEND.name} {reason}"
    return (fp8_choice.too_small(weights) or fp8_choice.not_measured(device)) if precision == AUTO else None


def _backends(refused: list[str | None], precision: str) -> str:
    kernels, torch_alone = (f"{each.BACKEND.name}, {each.BACKEND.summary}" for each in (fp8_triton, fp8))
    other = "that of the run's dtype, without fp8" if precision == AUTO else torch_alone
    reasons = list(dict.fromkeys(reason for reason in refused if reason is not None))
    if not reasons:
        return kernels
    because = f"{other} ({', '.join(reasons)})"
    left = len(refused) - refused.count(None)
    return because if left == len(refused) else f"{kernels}; for {counted(left, 'layer')} {because}"
