"""`amoeba finetune`: LoRA on a frozen mixture-of-experts model, from a Hugging Face folder to a PEFT adapter.

    report = finetune(FinetuneSettings(model="models/base", data="chat.jsonl", out="runs/mine"), console)
    report.adapter       # peft.PeftModel.from_pretrained(base, report.adapter)

The loss is that of the answers alone. A checkpoint holds the adapter and the optimizer, not the frozen model.
"""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from amoeba import lora
from amoeba.core.cost import factor_numbers
from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.core.placement import Load
from amoeba.data.corpus import Corpus, load_corpus
from amoeba.data.documents import Conversation, IllustratedConversation
from amoeba.data.sft_dataset import PLAIN_TEMPLATE, PackedSftDataset, SftDataset, check_answers, pad_rows
from amoeba.data.token_rows import stack
from amoeba.data.tokenizer import check_understands
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.images import ImageReader
from amoeba.integrations.model_folder import ADAPTER_FOLDER, check_model, load_tokenizer_and_config
from amoeba.integrations.place_experts import Placed, check_placement
from amoeba.integrations.precision import set_products
from amoeba.integrations.text_model import check_ids, leave_out_router_loss, positions, text_config
from amoeba.jobs.cpu_dtype import DtypeChoice, dtype_to_load
from amoeba.jobs.placed_model import attach_in, load_placed, streams
from amoeba.jobs.same_on_ranks import check_same_model
from amoeba.jobs.settings import FinetuneSettings
from amoeba.jobs.sharded_model import count_parameters, load_share
from amoeba.jobs.streaming_report import StreamParts
from amoeba.jobs.train.fast_paths import why_not_by_documents
from amoeba.jobs.train.manifest import WholeModel
from amoeba.jobs.train.resume import Earlier, began_with, check_data, data_facts, weights_of
from amoeba.jobs.train.run import Run
from amoeba.jobs.train.run_folder import Console, RunReport
from amoeba.jobs.train.trainer import Rows
from amoeba.jobs.train.training_loop import make_trainer, run_to_end
from amoeba.lora.adapter_folder import adapter_of
from amoeba.lora.peft_files import Adapter, write_adapter
from amoeba.lora.targets import in_one_line
from amoeba.observe.router_watch import check_balance
from amoeba.parallel.mesh import RankMesh
from amoeba.parallel.rank_zero import RankZero
from amoeba.placements import AUTO, RESIDENT
from amoeba.stream.attaching import Streamed, home_of
from amoeba.stream.store import Store

COMMAND = "amoeba finetune"
# On a GPU all batches have one length, and with it one captured pass (`train.trainer`), where the longest row
# of a batch has on average at least this share of it. Not measured yet.
WORTH_PADDING = 0.8
# Rows are packed if an epoch still has this many steps: a small set of short conversations would be over in one or
# two steps, and learn nothing from them. Not measured yet.
LEAST_PACKED_STEPS = 20


@dataclass(frozen=True)
class FinetuneReport(RunReport):
    base_model: str
    adapter: str
    chat: bool  # whether the data were conversations: then generate wants --chat
    trainable_parameters: int
    experts: str  # where they were kept
    streaming: dict[str, Any] | None  # a `StreamReport`, where they are streamed


class AdapterAlone(WholeModel):
    """A checkpoint's part of the model: the adapter."""

    name = ADAPTER_FOLDER
    _adapter: Adapter | None = None

    def gather(self, model: Any) -> None:
        found = adapter_of(model)
        self._adapter = found if self._first else None

    def save(self, model: Any, folder: Path) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            write_adapter(folder, adapter)

    def load(self, model: Any, folder: Path) -> None:
        lora.load(model, folder)


def finetune(settings: FinetuneSettings, console: Console, **asked: Any) -> FinetuneReport:
    """asked: resume, start_from, trust_remote_code and rank_zero of `Run`."""
    run = Run(COMMAND, settings, console, **asked)
    run.check_same()
    if settings.data is None:
        raise bad_value("--data", "a file with messages, prompt and completion, or text", "none", "give one")
    if run.rank_zero.ranks is None or settings.experts != "ranks":
        check_placement(settings.experts)
    name = check_model(settings.model)
    _check_streaming(name, settings, run.rank_zero)
    tokenizer, model_config = load_tokenizer_and_config(name, trust_remote_code=run.trust_remote_code)
    if tokenizer.eos_token_id is None:
        expected = "a tokenizer with an end-of-text token to end answers"
        raise bad_value("MODEL", expected, "one without eos_token", "set eos_token in its tokenizer_config.json")
    with run.in_folder(), ExitStack() as at_end:
        return _finetune(run, settings, name, tokenizer, model_config, at_end)


def _finetune(
    run: Run, settings: FinetuneSettings, name: str, tokenizer: Any, model_config: Any, at_end: ExitStack
) -> FinetuneReport:
    console, rank_zero = run.console, run.rank_zero
    mesh = run.mesh()
    kept = AdapterAlone(rank_zero.here)
    if (ended := run.finished(kept.name, FinetuneReport, "adapter")) is not None:
        console.say(f"already finished after {ended.steps} steps; to train longer, start a new run with another --out")
        return ended
    earlier = run.earlier(kept.name)
    if earlier and earlier.checkpoint:
        tokenizer, _ = load_tokenizer_and_config(name, earlier.checkpoint, trust_remote_code=run.trust_remote_code)
    torch.manual_seed(settings.seed)

    has_template = bool(tokenizer.chat_template)
    if not has_template:
        tokenizer.chat_template = PLAIN_TEMPLATE  # goes with the adapter's tokenizer, so that generate --chat has it
    corpus = load_corpus(settings.data, held_out=settings.held_out, seed=settings.seed, check=check_answers(tokenizer))
    console.say(f"data: {corpus.description}")
    content = began_with(corpus, weights_of(name))
    rank_zero.check_same(data_facts(content), "give every rank the same --data, --held-out and model")
    if earlier:
        check_data(earlier, content)
    chat = any(isinstance(document, Conversation) for document in corpus.train)
    reader = _image_reader(corpus, name, model_config, tokenizer, has_template, run)
    if chat and tokenizer.chat_template == PLAIN_TEMPLATE:
        console.say('the tokenizer has no chat template: writing turns as "role: content", one per line')
    check_understands(tokenizer, corpus.train)
    rows = _rows(corpus, tokenizer, model_config, settings, console, reader)

    with run.importing_compiler():
        base = _load_base(run, settings, name, model_config, mesh, at_end)
    model, placed = base.model, base.placed
    covered = check_coverage(model, "MODEL", "use PEFT itself for it, or choose another")
    if covered.others:
        console.say(f"experts by {covered}; only experts run by amoeba get LoRA factors")
    attached = lora.attach(model, settings.r, settings.alpha, settings.targets, train_router=settings.train_router)
    if attached.left_out:
        console.say(f"no LoRA factors on: {in_one_line(attached.left_out)}")
    text_config(model.config).use_cache = False
    leave_out_router_loss(model.config)
    check_same_model(rank_zero, model, {"where the experts are": placed.placement})
    if rows.has_images:
        rows = rows._replace(collate=functools.partial(rows.collate, images_in=model.dtype))
    rows, content["packed"] = _packed(rows, model, settings, tokenizer, earlier, console)
    if settings.exact and settings.train_router and model.dtype != torch.float32:
        got, remedy = f"one in {model.dtype}", "add --dtype float32, or leave out --train-router"
        raise bad_value("--exact with --train-router", "a model in float32", got, remedy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:  # a router's: Adam's steps are below the rounding of bf16, and autocast allows fp32
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    steps_of_epoch = math.ceil(len(rows.train) / (settings.batch_size * settings.accumulation))
    steps = settings.steps or math.ceil(settings.epochs * steps_of_epoch)
    trainable = count_parameters(model, None if mesh is None else mesh.experts, trained=True)
    faster = f" ({base.dtype.reason})" if base.dtype.stored is not None else ""
    console.say(
        f"model: {model.config.model_type} on {base.device} in {str(model.dtype).removeprefix('torch.')}{faster}; "
        f"experts {placed.placement} ({placed.reason})"
    )
    for memory in placed.plans:
        logger.info("%s", memory)
    console.say(
        f"training {trainable / 1e6:.2f}M parameters: LoRA rank {settings.r} on {', '.join(settings.targets)}"
        f"{' and the routers' if settings.train_router else ''}; {steps} steps"
    )
    check_balance(model, settings.balance, settings.z_loss_coefficient)
    run.describe(model, earlier, content)

    trainer = make_trainer(run, model, tokenizer, rows, steps, model.dtype, kept, mesh)
    parts = StreamParts(base.streamed)
    parts.begin("training")
    outcome, kept_in = run_to_end(trainer, run.folder, earlier)
    streaming = parts.report()
    for line in [] if streaming is None else streaming.lines():
        console.say(line)
    report = FinetuneReport(
        **asdict(outcome),
        base_model=settings.model,
        adapter=kept_in,
        chat=chat,
        trainable_parameters=trainable,
        experts=placed.placement,
        streaming=None if streaming is None else asdict(streaming),
    )
    trainer.run_log.finish(report)
    return report


@dataclass(frozen=True)
class _Base:
    model: Any
    placed: Placed
    dtype: DtypeChoice
    device: torch.device
    streamed: Streamed | None = None


def _load_base(
    run: Run, settings: FinetuneSettings, name: str, model_config: Any, mesh: RankMesh | None, at_end: ExitStack
) -> _Base:
    trust_remote_code = run.trust_remote_code
    asked = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_streamed = streams(name, settings)
    choice = dtype_to_load(asked, name, model_config, home_of(settings.vram) if is_streamed else device)
    if is_streamed:
        told = {"ram": settings.ram or "auto", "vram": settings.vram, "trust_remote_code": trust_remote_code}
        streamed, choice = attach_in(choice, name, **told, reserved=lambda store: factor_bytes(store, settings))
        at_end.enter_context(streamed)
        placed = Placed(streamed.memory.layers[0].placement, str(streamed.memory))
        return _Base(streamed.model, placed, choice, device, streamed)
    if mesh is not None:
        model = load_share(name, choice.dtype, mesh.experts, trust_remote_code=trust_remote_code)
        placed = Placed("ranks", "one has all" if mesh.every.count == 1 else str(mesh))
        return _Base(model, placed, choice, device)
    tokens = -(-settings.batch_size // run.rank_zero.count) * settings.sequence_length
    where = RESIDENT if settings.exact and settings.experts == AUTO else settings.experts
    size = Load(tokens, settings.r, recompute=settings.gradient_checkpointing)
    asked_for: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
    model, placed = load_placed(name, choice, where, size, trains=True, **asked_for)
    set_products(model, "bf16")  # in evaluation as in training
    return _Base(model, placed, choice, device)


def _check_streaming(name: str, settings: FinetuneSettings, rank_zero: RankZero) -> None:
    if not streams(name, settings):
        return
    if settings.experts != "auto":
        raise bad_value("experts", "none for streamed experts", repr(settings.experts), "leave it out")
    home_of(settings.vram)
    if settings.vram is None and torch.cuda.is_available():
        remedy = "add it, for example --vram auto, or hide the GPU: CUDA_VISIBLE_DEVICES= amoeba finetune ..."
        raise bad_value("vram", "a budget on the GPU, where the model trains", "none", remedy)
    if rank_zero.count > 1:
        remedy = "start it without torchrun, or distribute the experts of an ordinary checkpoint with --experts ranks"
        raise bad_value("streamed experts", "one process", rank_zero.count, remedy)


def factor_bytes(store: Store, settings: FinetuneSettings) -> int:
    """Of the experts' factors in fp32, their gradients and AdamW's two moments. What else is trained is small."""
    if "experts" not in settings.targets:
        return 0
    numbers = 0
    for entry in store.layers:
        sizes: Any = {"hidden": entry.hidden, "intermediate": entry.intermediate, "gated": entry.activation.gated}
        numbers += entry.experts * factor_numbers(**sizes, rank=settings.r)
    return numbers * (4 + 4 + 2 * (4 if settings.optimizer_states == "float32" else 2))


def _image_reader(
    corpus: Corpus, name: str, model_config: Any, tokenizer: Any, has_template: bool, run: Run
) -> ImageReader | None:
    if not any(isinstance(document, IllustratedConversation) for document in (*corpus.train, *corpus.held_out)):
        return None
    if run.rank_zero.count > 1:
        remedy = "start it without torchrun"
        raise bad_value("--data", "rows without images over several processes", "rows with images", remedy)
    if not has_template:
        tokenizer.chat_template = None
    return ImageReader(name, model_config, tokenizer, trust_remote_code=run.trust_remote_code)


def _rows(
    corpus: Corpus,
    tokenizer: Any,
    model_config: Any,
    settings: FinetuneSettings,
    console: Console,
    reader: ImageReader | None,
) -> Rows:
    most = min(settings.sequence_length, positions(model_config) or settings.sequence_length)
    if most < settings.sequence_length:
        limits = f"rows are limited to {most} tokens instead of {settings.sequence_length}"
        console.say(f"{limits}: the model has no more positions")
    train, held_out = (SftDataset(documents, tokenizer, most, reader) for documents in (corpus.train, corpus.held_out))
    check_ids(model_config, max(train.largest_id(), held_out.largest_id()))
    console.say(f"training data: {train.description}; held out: {held_out.description}")
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    least = 0
    if torch.cuda.is_available() and train.expected_longest(settings.batch_size) >= WORTH_PADDING * train.longest:
        least = train.longest
    collate = functools.partial(pad_rows, padding=padding, least=least)
    has_images = train.has_images or held_out.has_images
    return Rows(train, held_out, collate, train.tokens_per_row, 2, most, has_images)


def _packed(
    rows: Rows, model: Any, settings: FinetuneSettings, tokenizer: Any, earlier: Earlier | None, console: Console
) -> tuple[Rows, bool]:
    """The rows packed, and whether they are: on a GPU whose attention keeps them apart, unless too few steps would be
    left. A resumed run does as it began."""
    began = earlier.began_with.get("packed", False) if earlier else None
    if began is False or rows.has_images:
        return rows, False
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    train, held_out = (PackedSftDataset(each, rows.longest, padding) for each in (rows.train, rows.held_out))
    if began is None and len(train) < LEAST_PACKED_STEPS * settings.batch_size * settings.accumulation:
        return rows, False
    reason = why_not_by_documents(model)
    if reason is not None and began:
        expected = f"a machine that packs rows, as in the run in {earlier.folder if earlier else ''}"
        remedy = "resume it where it began, or start a new run with another --out"
        raise bad_value("--resume", expected, f"one that does not: {reason}", remedy)
    if reason is not None:
        logger.info("rows are not packed: %s", reason)
        return rows, False
    console.say(f"packed into {train.description}; --batch-size counts packed rows")
    documents = max(train.documents_per_row, held_out.documents_per_row)
    return Rows(train, held_out, stack, train.tokens_per_row, documents, rows.longest), True
