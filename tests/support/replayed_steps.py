"""A CUDA graph without a GPU: the operators of one step are recorded, and later run again without any Python.

    with Recorded() as recorded:
        step()
    recorded.replay()               # the same operators on the same memory
    recorded.decisions              # where the host looked at a number: what no graph can hold

What Python decided while the step was recorded stays decided: a counter in a cache, a length, a tensor that is replaced
instead of written to. A model whose tokens are right under `replay` depends on none of these.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amoeba.decoding.trial import where_the_host_looks


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[str] = []
        self._operators: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (decision := where_the_host_looks(operator, args, kwargs)) is not None:
            self.decisions.append(decision)
        out = operator(*args, **kwargs)
        self._operators.append((operator, args, kwargs, out))  # which also keeps every id in use
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Into the memory of the recorded results: backward reads some of them through tensors of its own."""
        for operator, args, kwargs, out in self._operators:
            new = operator(*args, **kwargs)
            for before, now in zip(out, new, strict=True) if isinstance(out, list | tuple) else [(out, new)]:
                if isinstance(before, Tensor) and not _share_memory(before, now):
                    before.detach().copy_(now)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def replayed(step: Any) -> Recorded:
    """Records the next call of a `Step`, whose later calls replay it."""
    recorded = Recorded()
    own = step._run

    def run() -> None:
        if recorded._operators:
            recorded.replay()
            return
        with recorded:
            own()

    step._run = run
    return recorded
