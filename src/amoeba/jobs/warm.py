"""What a command will launch, found from the model's config before any weight is read, and compiled by all cores.

    found = warm(Work("train", "models/qwen3", batch_size=8, sequence_length=2048), gpu_named(None), print)

The model is built without memory, one decoder layer of each kind, and goes through the passes of the command (see
`amoeba.kernels.launch.ahead`). What is not found here the command compiles itself.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from amoeba.core.errors import one_line
from amoeba.core.log import logger
from amoeba.core.weights import ExpertWeights
from amoeba.jobs.compile_ahead import Work, mark_of
from amoeba.kernels.launch.ahead import DriverModule, Gpu, Workers, end_with_parent, gpu_named, noting, standing_in

Pass = tuple[str, Callable[[], object]]


@dataclass(frozen=True)
class Warmed:
    gpu: str
    kernels: int
    failed: int
    seconds: float
    left_out: tuple[str, ...]  # passes that could not be gone through without numbers, with the reason


def warm(work: Work, gpu: Gpu, say: Callable[[str], object] = lambda text: None, cores: int | None = None) -> Warmed:
    """In a process that has not used its GPU. say: is told after each kernel."""
    began, left_out = time.monotonic(), []

    def tell(launch: Any, ok: bool) -> None:
        told = f"{pool.compiled} kernels compiled in {time.monotonic() - began:.0f} s, last {launch.name}"
        say(told + (f"; {pool.failed} failed" if pool.failed else ""))

    with standing_in(gpu), Workers(cores, tell) as pool, noting(pool.submit), ExitStack() as stack:
        pool.submit(DriverModule)
        for name, run in passes(work, stack):
            try:
                run()
            except Exception as error:  # a model that looks at numbers, an operator of torch without a shape
                logger.info("%s", name, exc_info=error)
                left_out.append(f"{name}: {type(error).__name__}: {one_line(error)}")
    found = Warmed(gpu.name, pool.compiled, pool.failed, time.monotonic() - began, tuple(left_out))
    if not found.failed:
        with suppress(OSError):
            mark_of(work).write_text(json.dumps(asdict(found)) + "\n")
    return found


def passes(work: Work, stack: ExitStack) -> Iterator[Pass]:
    """What the command runs, in its order. What it switches on for a model is undone at the end of the stack."""
    model = _shape(work)
    if work.command == "generate":
        yield from _of_generation(model, work)
    else:
        yield from _of_training(model, work, stack)


def _shape(work: Work) -> Any:
    """The model without its numbers, and of decoder layers that are alike only the first."""
    from torch import nn

    from amoeba.integrations.compiled_layers import name_of_stack
    from amoeba.integrations.experts_module import experts_modules, hand_over, weights_of
    from amoeba.integrations.model_folder import load_config
    from amoeba.integrations.place_experts import AUTO, place_experts
    from amoeba.integrations.quantised_files import format_of, products_for
    from amoeba.integrations.quantised_models import facts_of, unquantised
    from amoeba.integrations.text_model import auto_class, leave_out_router_loss, text_config
    from amoeba.integrations.transformers import register
    from amoeba.jobs.presets import PRESETS
    from amoeba.precision.placements import placement_of
    from amoeba.precision.quantised_experts import quantise_experts

    register()
    if work.model in PRESETS:
        config = PRESETS[work.model].build(work.vocab_size or 4096, work.sequence_length)
    else:
        config = load_config(work.model, trust_remote_code=work.trust_remote_code)
    leave_out_router_loss(config)
    dtype = torch.bfloat16 if work.dtype == "auto" else getattr(torch, work.dtype)
    facts = facts_of(config)
    format = None if facts is None else format_of(facts)
    with torch.device("meta"):
        model = auto_class(config).from_config(
            unquantised(config), experts_implementation="amoeba", dtype=dtype, trust_remote_code=work.trust_remote_code
        )
    name = name_of_stack(model)
    stack = model.get_submodule(name)
    layers = {str(layer): layer for layer in reversed(stack)}
    kept = list(reversed(layers.values()))
    if len(set(getattr(text_config(config), "layer_types", None) or ())) > 1:
        # models ask for the kind of a layer by its place: no layer before the last of these is left out
        kept = list(stack)[: max(list(stack).index(layer) for layer in kept) + 1]
    some: Any = nn.ModuleList(kept)
    some.stands_for = len(stack)
    model.set_submodule(name, some)
    if facts is not None and format is not None:
        for module in experts_modules(model).values():
            weights = weights_of(module)
            if isinstance(weights, ExpertWeights):
                experts = quantise_experts(weights, format, products_for(format, facts))
                hand_over(module, experts, placement_of(format))
    elif work.experts != AUTO:
        place_experts(model, work.experts)
    return model


def _fuse_routers(model: Any, stack: ExitStack) -> None:
    """They are recognised by their results: for that, and no longer, they have numbers."""
    from amoeba.integrations.experts_module import is_experts, routers_in
    from amoeba.integrations.fused_routers import fused_routers, rehearse

    blocks = [block for block in model.modules() if any(is_experts(child) for child in block.children())]
    routers = [router for block in blocks for router in routers_in(block)]
    for router in routers:
        router.to_empty(device="cpu")
        for tensor in (*router.parameters(), *router.buffers()):
            with torch.no_grad():
                tensor.normal_(std=0.02)
    stack.enter_context(fused_routers(model))
    for router in routers:
        router.to("meta")
        rehearse(router)


def _of_training(model: Any, work: Work, stack: ExitStack) -> Iterator[Pass]:
    from amoeba.data.token_rows import document_arguments
    from amoeba.integrations.fused_attention import NAME, fused_attention
    from amoeba.integrations.fused_loss import fused_loss
    from amoeba.integrations.precision import set_precision
    from amoeba.integrations.text_model import text_decoder
    from amoeba.observe.router_watch import RouterWatch
    from amoeba.precision.recipes import UNCHANGED

    if work.rank:
        from amoeba import lora

        lora.attach(model, work.rank, 2 * work.rank, work.targets)
    if work.precision != UNCHANGED:
        set_precision(model, work.precision)
    _fuse_routers(model, stack)
    watch = RouterWatch(model)
    watch.balance(0.01 if work.balance == "aux" else 0.0, 0.0)
    if work.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()

    def run(rows: int, gradients: bool) -> None:
        shape = rows, work.sequence_length
        ids = torch.zeros(shape, dtype=torch.int64, device="cpu")
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
        batch["position_ids"] = torch.arange(shape[1], dtype=torch.int64, device="cpu").expand(shape)
        batch |= document_arguments(batch, work.documents, work.sequence_length)
        batch = {name: each.to("cuda") if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
        with torch.set_grad_enabled(gradients):
            loss = model(**batch, num_items_in_batch=ids.new_empty(()).to("cuda"), use_cache=False).loss
            if gradients:
                loss.backward()

    yield "a first look at the loss", lambda: stack.enter_context(fused_loss(model))
    text = text_decoder(model)
    stack.callback(text.set_attn_implementation, text.config._attn_implementation)
    text.set_attn_implementation(NAME)
    yield "attention by documents", lambda: stack.enter_context(fused_attention(model))
    yield "a row without gradients", lambda: run(1, False)
    yield "a step", lambda: run(work.batch_size, True)
    rows = work.batch_size
    while rows > 1:  # the last rows that are held out fill a part of a batch
        yield f"an evaluation of {rows} rows", functools.partial(run, rows, False)
        rows //= 2
    yield "the optimizer", lambda: _optimizer_step(model, work)


def _optimizer_step(model: Any, work: Work) -> None:
    from amoeba.optim import AdamW

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer = AdamW(trained, states=work.optimizer_states)  # type: ignore[arg-type]
    optimizer.note_clipping(1.0)
    optimizer.step()


def _of_generation(model: Any, work: Work) -> Iterator[Pass]:
    from amoeba.decoding.decoder import Decoder

    model.eval()

    @torch.no_grad()
    def read(tokens: int, batch: int = 1) -> None:
        model(input_ids=torch.zeros(batch, tokens, dtype=torch.int64, device="cuda"), use_cache=False)

    yield "the first token", lambda: read(1)
    for length in work.prompt_lengths:
        with ExitStack() as stack:
            _fuse_routers(model, stack)
            decoder = Decoder(model, batch=work.batch_size, length=length + 1)
            yield "a step", decoder.rehearse
            yield f"a prompt of {length} tokens", functools.partial(decoder.rehearse, length)


def main() -> None:
    """Of the process next to a command: imports what it can, and then reads what to do."""
    end_with_parent()
    os.nice(5)
    import transformers.modeling_utils  # noqa: F401

    line = sys.stdin.readline()
    if line:  # else there is nothing to do, or the command has ended
        found = warm(Work.read(line), gpu_named(None))
        told = f"{found.kernels} kernels compiled ahead in {found.seconds:.1f} s"
        print("; ".join((f"amoeba: {told}", *found.left_out)), file=sys.stderr)


if __name__ == "__main__":
    main()
