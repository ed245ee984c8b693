"""Whether a step can be captured, found by trying it, for models whose steps transformers does not promise to be whole.

    raise_if_it_waits(model, decoder)      # decoder: greedy, of one row, nothing captured yet
    raise_if_wrong(model, decoder)         # and captures

A few steps are run with an eye on every operator: one whose result, or its shape, the host waits for cannot be
captured. Then their tokens are compared with those of the model as it is.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor

from amoeba.core.graph_replays import CannotCapture
from amoeba.core.torch_internals import TorchDispatchMode
from amoeba.integrations.text_model import text_config

PROMPT, TOKENS = 9, 12
# Of the spread of the logits: how far below the best a token may be, by the model as it is. In bf16 two orders of the
# same sums differ by less than 1 % of it; another token than the right one is some tens of percent below.
NEAR = 0.1
_SHAPES_BY_NUMBERS = ("nonzero", "masked_select", "unique_consecutive", "unique_dim", "bincount")
_NUMBERS = ("_local_scalar_dense", "is_nonzero", "equal", "item")


def is_promised(model: Any) -> bool:
    return all(getattr(model, name, False) for name in ("_can_compile_fullgraph", "_supports_attention_backend"))


def raise_if_it_waits(model: Any, decoder: Any) -> None:
    if (found := host_decision(decoder.plain_step(_prompt(model)))) is not None:
        raise CannotCapture(f"the host waits for numbers of the device inside a step: {found}")


def raise_if_wrong(model: Any, decoder: Any) -> None:
    prompt = _prompt(model)
    tokens = [token for (token,) in decoder.generate([prompt], TOKENS)]
    if (place := first_wrong(model, prompt, tokens)) is not None:
        kind = type(model).__name__
        raise CannotCapture(f"token {place} of a captured step is not what {kind} computes by itself")


def host_decision(step: Any) -> str | None:
    """What in a call of it the host waits for, if anything."""
    with _Watched() as watched:
        step()
    return watched.found[0] if watched.found else None


@torch.no_grad()
def first_wrong(model: Any, prompt: list[int], tokens: list[int]) -> int | None:
    """The first of these tokens that the model, read them one after another, would not choose."""
    cache, ids = None, prompt
    for place, token in enumerate(tokens):
        out = model(
            input_ids=torch.tensor([ids], dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True
        )
        cache, ids, logits_V = out.past_key_values, [token], out.logits[0, -1].float()
        if logits_V.max() - logits_V[token] > NEAR * logits_V.std():
            return place
    return None


def _prompt(model: Any) -> list[int]:
    generator = torch.Generator("cpu").manual_seed(0)
    most = text_config(model.config).vocab_size
    return torch.randint(most, (PROMPT,), generator=generator, dtype=torch.int64, device="cpu").tolist()


class _Watched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (found := where_the_host_looks(operator, args, kwargs or {})) is not None:
            self.found.append(found)
        return operator(*args, **(kwargs or {}))


def where_the_host_looks(operator: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """None, or which operator waits for numbers of the device, and where the model calls it."""
    name = operator.overloadpacket.__name__.split("::")[-1]
    found = name in (*_SHAPES_BY_NUMBERS, *_NUMBERS) or name.startswith("_unique")
    if name == "repeat_interleave":
        found = isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        one_number = name != "index" and args[2].numel() == 1  # becomes masked_fill
        masks = [each for each in args[1] if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)]
        found = bool(masks) and not one_number
    return _called(name) if found else None


def _called(name: str) -> str | None:
    """None where our experts do it, which say for themselves whether the host waits for them."""
    frames = [frame for frame in traceback.extract_stack() if "/transformers/" in frame.filename or _is_ours(frame)]
    if not frames or _is_ours(frames[-1]):
        return None
    frame = frames[-1]
    return f"{name} in {frame.filename.rpartition('/')[2]}, line {frame.lineno}"


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return "/amoeba/" in frame.filename and not frame.filename.endswith("/trial.py")
