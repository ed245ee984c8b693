"""Which backends are asked, and that asking changes nothing."""

from typing import Any

import pytest
import torch

from amoeba.backends import eager, registry
from amoeba.backends.registry import backends_of, register_backend


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "_backends", list(registry._backends))
    monkeypatch.setattr(registry, "_serving", dict(registry._serving))


class Kind:
    """Of weights that nothing else serves."""


def backend_of(kind: type, name: str, preference: int) -> Any:
    class Planted(type(eager.BACKEND)):  # type: ignore[misc]
        def preference(self, device: torch.device) -> int:
            return preference

    planted: Any = Planted.__new__(Planted)
    planted.name, planted.kinds = name, (kind,)
    return planted


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_second_pass_finds_what_the_first_one_was_compiled_for(device: str) -> None:
    register_backend(backend_of(Kind, "planted", 1))
    counter = pytest.importorskip("torch._dynamo.testing").CompileCounter()

    @torch.compile(backend=counter)
    def asked(x: torch.Tensor) -> torch.Tensor:
        return x + len(backends_of(Kind, x.device))

    x = torch.zeros(2, device=device)
    for _ in range(3):
        asked(x)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("_as_before")
def test_a_backend_that_is_registered_again_replaces_itself() -> None:
    first, second = (backend_of(Kind, "planted", preference) for preference in (9, 1))
    for backend in (first, second):
        register_backend(backend)
    assert backends_of(Kind, torch.device("cpu")) == [second]


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_a_registered_backend_is_found_and_the_preferred_one_comes_first(device: str) -> None:
    for name, preference in (("low", 1), ("high", 9), ("middle", 5)):
        register_backend(backend_of(Kind, name, preference))
    assert [backend.name for backend in backends_of(Kind, torch.device(device))] == ["high", "middle", "low"]
