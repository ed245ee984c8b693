"""A CUDA graph without a GPU: the operators of one step are recorded, and later run again without any Python.

    with Recorded() as recorded:
        step()
    recorded.replay()               # the same operators on the same memory
    recorded.decisions              # where the host looked at a number: what no graph can hold

What Python decided while the step was recorded stays decided: a counter in a cache, a length, a tensor that is replaced
instead of written to. A model whose tokens are right under `replay` depends on none of these.
"""

from typing import Any

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

    def replay(self) -> None:
        made: dict[int, Tensor] = {}

        def current(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [current(each) for each in value]
            return made.get(id(value), value) if isinstance(value, Tensor) else value

        for operator, args, kwargs, out in self._operators:
            new = operator(*current(args), **{name: current(value) for name, value in kwargs.items()})
            pairs = zip(out, new, strict=True) if isinstance(out, list | tuple) else [(out, new)]
            made.update((id(before), after) for before, after in pairs if isinstance(before, Tensor))


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
