"""Which cases of a test run every time; the others are `thorough` (make test-thorough).

@quick(lambda backend, rank: backend != "triton" or rank == 0)
@pytest.mark.parametrize("rank", [0, 5])
def test_something(backend, rank): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest


def quick(case: Callable[..., bool]) -> pytest.MarkDecorator:
    """case: whether the parameters that it names make a case for every run."""
    return pytest.mark.quick(case=case)


def leave_the_rest_to_thorough(items: Sequence[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("quick"):
            case, parameters = marker.kwargs["case"], item.callspec.params  # type: ignore[attr-defined]
            if not case(**{name: parameters[name] for name in inspect.signature(case).parameters}):
                item.add_marker(pytest.mark.thorough)


def one_of_each_test(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The first case of every test, and all others."""
    first: dict[str, pytest.Item] = {}
    others = []
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in first:
            others.append(item)
        else:
            first[name] = item
    return list(first.values()), others
