"""Loads a model for generation: places its experts, attaches its adapter, and runs one token through it.

names = find_model("models/tiny", adapter=None, options)       # tokenizer and config alone, quickly
loaded = load(names, options, say=print)
loaded.model, loaded.backend, loaded.reason
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from amoeba import lora
from amoeba.backends.registry import explain
from amoeba.core.errors import bad_value
from amoeba.core.log import logger
from amoeba.cpu.core import why_no_core
from amoeba.integrations import norms
from amoeba.integrations.exact_mode import exact
from amoeba.integrations.experts_module import BACKEND
from amoeba.integrations.model_folder import check_model, find_adapter, load_tokenizer_and_config
from amoeba.integrations.place_experts import Placed, check_placement
from amoeba.integrations.precision import ProductsOfModel, products_of, set_products
from amoeba.jobs.convert.merge import check_not_merged
from amoeba.jobs.cpu_dtype import DtypeChoice, dtype_to_load
from amoeba.jobs.generate.options import GenerationOptions, in_words, sampling_of, seed_for, set_generation_config
from amoeba.jobs.generate.token_steps import Kind
from amoeba.jobs.placed_model import attach_in, load_placed, streams
from amoeba.jobs.same_on_ranks import check_same_model
from amoeba.jobs.sharded_model import load_share
from amoeba.parallel.rank_zero import ALONE, RankZero
from amoeba.stream.attaching import Streamed, home_of
from amoeba.stream.report import StreamReport
from amoeba.stream.store import is_store
from amoeba.system.machine import peak_memory


@dataclass(frozen=True)
class FoundModel:
    name: str
    adapter: Any
    tokenizer: Any
    config: Any


@dataclass(frozen=True)
class LoadedModel:
    model: Any
    tokenizer: Any
    device: torch.device
    placement: str  # of the experts
    backend: str | None  # None: transformers computes the experts, if there are any
    reason: str
    load_seconds: float
    warm_up_seconds: float
    products: ProductsOfModel | None = None  # with experts of an fp8 checkpoint
    streamed: Streamed | None = None

    def close(self) -> None:
        """Streamed experts can no longer be read after this."""
        if self.streamed is not None:
            self.streamed.close()

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def begin(self, options: GenerationOptions, most: int, rank_zero: RankZero) -> tuple[int, dict[str, Any]]:
        """The seed and the sampling of texts of at most that many tokens; the model has them in its configuration."""
        seed, sampling = seed_for(options, rank_zero), sampling_of(options, self.model.generation_config)
        set_generation_config(self.model, self.tokenizer, sampling, most)
        logger.info("sampling: %s, at most %d tokens, seed %d", in_words(sampling), most, seed)
        return seed, sampling

    def facts(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("dtype", "placement", "backend", "load_seconds", "products")}
        facts |= {"device": str(self.device), "backend_reason": self.reason}
        return facts | {"peak_memory_bytes": peak_memory(self.device)}


@dataclass(frozen=True, kw_only=True)
class ModelReport:
    """What computed, and how. Of the model None where there was nothing to do."""

    prompt_tokens: int
    generated_tokens: int
    load_seconds: float = 0.0  # the model's weights, placed and on the device
    prepare_seconds: float  # a first token, and what is compiled and captured
    peak_memory_bytes: int | None = None  # allocated on the GPU, or resident in this process; None if unknown
    device: str | None = None
    dtype: str | None = None
    placement: str | None = None  # of the experts
    backend: str | None = None
    backend_reason: str = ""
    products: ProductsOfModel | None = None  # with experts of an fp8 checkpoint: rows quantised (w8a8) or as they are
    steps: Kind | None
    steps_reason: str
    sampling: dict[str, Any]
    seed: int | None
    streaming: StreamReport | None  # what reading experts cost, where they are streamed


def find_model(
    model_folder: str | Path, adapter: str | Path | None, options: GenerationOptions, rank_zero: RankZero = ALONE
) -> FoundModel:
    """model_folder: as save_pretrained writes it, or the name of a model on the hub.
    adapter: a PEFT folder or a run of `amoeba finetune`; its tokenizer, if it has one, is used.
    rank_zero: the ranks over which the experts will be."""
    if rank_zero.ranks is None:
        check_placement(options.experts)
    name = check_model(str(model_folder))
    _check_streaming(name, options)
    adapter = None if adapter is None else find_adapter(adapter)
    if adapter is not None:
        check_not_merged(name, adapter)
    tokenizer, config = load_tokenizer_and_config(name, adapter, trust_remote_code=options.trust_remote_code)
    return FoundModel(name, adapter, tokenizer, config)


def load(
    found: FoundModel,
    options: GenerationOptions,
    token: int,
    say: Callable[[str], object],
    rank_zero: RankZero = ALONE,
    adapters_follow: bool = False,
) -> LoadedModel:
    """token: one of the prompt's, to warm up with. say: is told in one line what computes; the log has the reasons.
    rank_zero: the ranks over which the experts are. All of them have the same tokens.
    adapters_follow: the caller attaches adapters to the model that it gets."""
    is_streamed = streams(found.name, options)
    device = _choose_device(home_of(options.vram) if is_streamed else options.device)
    started = time.perf_counter()
    streamed = None
    choice = dtype_to_load(options.dtype, found.name, found.config, device)
    try:
        # The caller's random numbers go on where they were: transformers may draw some when it makes a model
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if is_streamed:
                streamed, choice = _stream(found, options, choice)
                model = streamed.model
                placed = Placed(streamed.memory.layers[0].placement, str(streamed.memory))
            elif rank_zero.ranks is not None:
                told = {"trust_remote_code": options.trust_remote_code}
                model = load_share(found.name, choice.dtype, rank_zero.ranks, tokens="same", **told)
                placed = Placed("ranks", f"over {rank_zero.count}")
            else:
                where = "resident" if options.exact and options.experts == "auto" else options.experts
                in_blocks = found.adapter is None and not adapters_follow and not options.exact
                asked: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "rest_in_blocks": in_blocks}
                model, placed = load_placed(found.name, choice, where, trains=False, device=device, **asked)
            logger.info("experts %s: %s", placed.placement, placed.reason)
            if found.adapter is not None:
                lora.load(model, found.adapter)
                logger.info("adapter %s", found.adapter)
            check_same_model(rank_zero, model)
            if options.products != "auto":
                set_products(model, options.products)
            model.to(device)
            if options.exact:
                exact(model)
            elif device.type == "cpu" and why_no_core() is None:
                norms.by_core(model)
            loaded = time.perf_counter()
            backend, reason = _warm_up(model, token)
    except BaseException:
        if streamed is not None:
            streamed.close()
        raise
    logger.info("backend %s: %s", backend or "of transformers", reason)
    done = LoadedModel(
        model=model,
        tokenizer=found.tokenizer,
        device=device,
        placement=placed.placement,
        backend=backend,
        reason=reason,
        load_seconds=loaded - started,
        warm_up_seconds=time.perf_counter() - loaded,
        products=products_of(model),
        streamed=streamed,
    )
    faster = f" ({choice.reason})" if choice.stored is not None else ""
    # Resident experts are where everybody expects them
    chosen = options.experts == "auto" and streamed is None and placed.placement != "resident"
    why = f" ({placed.reason})" if rank_zero.ranks is not None or chosen else ""
    experts = f"experts {placed.placement}{why}, backend {backend}" if backend else reason
    if done.products is not None:
        experts += f", {done.products}"
    within = "" if streamed is None else f", {streamed.memory}"
    say(f"{model.config.model_type} on {device} in {done.dtype}{faster}; {experts}{within}")
    return done


def _check_streaming(name: str, options: GenerationOptions) -> None:
    where = home_of(options.vram).type
    if not streams(name, options):
        remedy = "add --ram or --vram, for example --ram auto"
        if options.record is not None:
            raise bad_value("record", "streamed experts", "resident ones", remedy)
        if options.trace is not None:
            raise bad_value("trace", "streamed experts", "resident ones", remedy)
        return
    if options.exact:
        packed = is_store(name)
        remedy = "give the folder that it was packed from" if packed else "leave out --exact, or --ram and --vram"
        raise bad_value("--exact", "experts that stay in memory", "streamed ones", remedy)
    if options.experts != "auto":
        got = repr(options.experts)
        raise bad_value("experts", "no --experts with a store, which streams its experts", got, "leave it out")
    if options.device is not None and options.device.type != where:
        remedy = "leave --device out: --vram streams to the GPU, --ram alone to the CPU"
        raise bad_value("device", f"{where}, where the experts are streamed", options.device, remedy)


def _stream(found: FoundModel, options: GenerationOptions, choice: DtypeChoice) -> tuple[Streamed, DtypeChoice]:
    told = {"ram": options.ram or "auto", "vram": options.vram, "miss": options.miss}
    streamed, choice = attach_in(choice, found.name, **told, trust_remote_code=options.trust_remote_code)
    try:
        if options.record is not None:
            streamed.record(options.record)
        if options.trace is not None:
            streamed.trace(options.trace)
    except BaseException:
        streamed.close()
        raise
    return streamed, choice


def _choose_device(asked: torch.device | None) -> torch.device:
    if asked is not None:
        device, reason = asked, "as requested"
    elif torch.cuda.is_available():
        device, reason = torch.device("cuda"), torch.cuda.get_device_name()
    else:
        device, reason = torch.device("cpu"), f"torch {torch.__version__} finds no GPU"
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    logger.info("device %s: %s", device, reason)
    return device


def _warm_up(model: Any, token: int) -> tuple[str | None, str]:
    from amoeba.integrations.coverage import coverage
    from amoeba.integrations.experts_module import experts_modules, is_described

    with torch.no_grad():
        ids = torch.tensor([[token]], dtype=torch.int64, device=model.device)
        model(input_ids=ids, use_cache=False)
    served = [module for module in experts_modules(model).values() if is_described(module)]
    if not served:
        others = coverage(model).others
        how = f"has its experts computed by {coverage(model)}" if others else "has no experts"
        return None, f"{type(model).__name__} {how}"
    found = list(dict.fromkeys(_backend_of(module) for module in served))
    reasons = dict.fromkeys(reason for _, reason in found)
    if (covered := coverage(model)).others:
        reasons[f"experts by {covered}"] = None
    return " and ".join(dict.fromkeys(name for name, _ in found)), "; ".join(reasons)


def _backend_of(module: Any) -> tuple[str, str]:
    from amoeba.integrations.coverage import one_token

    if module.__dict__.get(BACKEND) == "exact":
        return "exact", "each token by itself, as in training"
    request = one_token(module)
    if request is None:
        return "composed", f"the activation or norm of {type(module).__name__} runs unchanged"
    explanation = explain(request)
    backend = explanation.backend
    assert backend is not None  # the warm-up ran
    device = request.weights.device.type
    return backend.name, explanation.reasons or f"{backend.summary}, the first choice on {device}"
