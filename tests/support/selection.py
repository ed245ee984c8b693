"""Which cases of a test run every time; the others are `thorough` (make test-thorough).

@quick(lambda backend, rank: backend != "triton" or rank == 0)
@pytest.mark.parametrize("rank", [0, 5])
def test_something(backend, rank): ...

@each_value_once("backend")         # for each backend, each rank and each width in one case at least, not all pairs
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("width", [1, 64])
def test_something(backend, rank, width): ...
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

# Of a test that stands for what a GPU does, in Triton's interpreter, where others of its kind run every time.
without_a_gpu_thorough = pytest.mark.gpu if torch.cuda.is_available() else pytest.mark.thorough


def quick(case: Callable[..., bool]) -> pytest.MarkDecorator:
    """case: whether the parameters that it names make a case for every run."""
    return pytest.mark.quick(case=case)


def each_value_once(*whole: str) -> pytest.MarkDecorator:
    """whole: parameters of which each value, and each of their combinations, gets such a selection of its own."""
    return pytest.mark.each_value_once(whole=whole)


def leave_the_rest_to_thorough(items: list[pytest.Item]) -> None:
    """Where time ends them, whole subjects have had their turn before the great crosses: fewest cases first."""
    for item in items:
        for marker in item.iter_markers("quick"):
            case, parameters = marker.kwargs["case"], item.callspec.params  # type: ignore[attr-defined]
            if not case(**{name: parameters[name] for name in inspect.signature(case).parameters}):
                item.add_marker(pytest.mark.thorough)
    crosses: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("each_value_once")
        if marker is not None and item.get_closest_marker("thorough") is None:
            apart = tuple(id(item.callspec.params[name]) for name in marker.kwargs["whole"])  # type: ignore[attr-defined]
            skipped = any(item.get_closest_marker(name) is not None for name in ("amx", "gpu", "skip"))
            crosses.setdefault((name_of(item), skipped, *apart), []).append(item)
    for cases in crosses.values():
        for item in set(cases) - set(covering(cases)):
            item.add_marker(pytest.mark.thorough)
    thorough = [item for item in items if item.get_closest_marker("thorough") is not None]
    cases = Counter(name_of(item) for item in thorough)
    place = {item: cases[name_of(item)] for item in thorough}
    items.sort(key=lambda item: place.get(item, 0))


def covering(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """A few of them, in which each value of each parameter comes: always the one with most that are still to come."""
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}  # type: ignore[attr-defined]
    to_come, chosen = set().union(*values.values()), []
    while to_come:
        chosen.append(max(cases, key=lambda case: len(values[case] & to_come)))
        to_come -= values[chosen[-1]]
    return chosen


def name_of(item: pytest.Item) -> str:
    """Of the test whose case it is."""
    return item.nodeid.partition("[")[0]


def one_of_each_file(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The first case of every file, and all others."""
    first: dict[str, pytest.Item] = {}
    others = []
    for item in items:
        name = item.nodeid.partition("::")[0]
        if name in first:
            others.append(item)
        else:
            first[name] = item
    return list(first.values()), others


def first_case(mark: pytest.Mark) -> pytest.Mark:
    """Of @pytest.mark.parametrize."""
    names, values, *others = mark.args
    ids = mark.kwargs.get("ids")
    named = mark.kwargs | ({"ids": list(ids)[:1]} if ids is not None and not callable(ids) else {})
    return pytest.mark.parametrize(names, list(values)[:1], *others, **named).mark
