"""A backend planted among ours for the length of a test."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amoeba.backends import registry
from amoeba.backends.backend import Backend, Request
from amoeba.core.weights import ExpertWeights


class Planted(Backend):
    summary, kinds = "planted by a test", (ExpertWeights,)

    def __init__(
        self,
        name: str,
        run: Callable[[Request], Tensor],
        why_not: Callable[[Request], str | None] = lambda request: None,
        preference: int = -1,
    ) -> None:
        self.name, self._run, self._why_not, self._preference = name, run, why_not, preference  # type: ignore[misc]

    def preference(self, device: torch.device) -> int:
        return self._preference

    def why_not(self, request: Request) -> str | None:
        return self._why_not(request)

    def run(self, request: Request) -> Tensor:
        return self._run(request)


def plant(monkeypatch: pytest.MonkeyPatch, *backends: Backend, alone: bool = False) -> None:
    """alone: as if there were no others."""
    others = [] if alone else registry._backends
    monkeypatch.setattr(registry, "_backends", [*others, *backends])
    monkeypatch.setattr(registry, "_serving", {})
