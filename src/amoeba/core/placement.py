"""A place where experts can be kept, as a user names it, and all that others have to know of it.

    tolerances = {torch.float32: Tolerance()}
    MINE = Placement("mine", "kept in my way", make=my_experts, backends=(MyBackend(),), tolerances=tolerances)
    amoeba.register_placement(MINE)
    amoeba.place_experts(model, "mine")

Placing is making one kind of weights out of resident ones. Others ask the placement, and never where the experts are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from amoeba.core.config import Activation
from amoeba.core.weights import AnyExperts, ExpertWeights


class LayerSizes(NamedTuple):
    experts: int
    hidden: int
    intermediate: int
    activation: Activation | None = None
    bias: bool = False


class Load(NamedTuple):
    """What placed experts will be used for, as far as memory goes."""

    tokens: int  # of a pass
    rank: int  # of LoRA factors on all projections
    top_k: int = 8
    recompute: bool = False  # activation checkpointing saves nothing between the passes


class Situation(NamedTuple):
    """What `auto` chooses by."""

    device: torch.device  # where the rest of the model will be
    trains: bool  # LoRA factors on the experts; else the model generates
    dtype: torch.dtype  # of the experts
    expert_bytes: int
    model_bytes: int
    free_bytes: int | None  # on the GPU


class Tolerance(NamedTuple):
    """How far output and gradients may be from the truth, relative in the L2 norm; None: as resident experts.

    inference: the output of a pass without gradients, where that has numbers of its own; None: as output."""

    output: float | None = None
    gradients: float | None = None
    inference: float | None = None


@dataclass(frozen=True, eq=False)
class Placement:
    """
    name:       as `place_experts` and the commands' --experts take it.
    summary:    where experts are then, as the end of "experts ...".
    make:       the placed experts, out of resident ones, which may go afterwards.
    backends:   what computes with them (amoeba.Backend); registered with the placement.
    tolerances: for each dtype that x may have, what `amoeba verify` allows.
    represent:  the same experts as numbers that the placed ones stand for, where those are others: what placed ones
                are compared with. None: the numbers that they were made of.
    why_not:    why not on this machine, or None.
    home:       where resident weights have to be to be placed; None: anywhere.
    x_from:     kinds of devices that x may come from.
    how:        how it computes on this machine, for `amoeba doctor`.
    itemsize:   bytes of a number of the placed weights as they are read; None: as many as one of x has.
    expert_bytes: of one placed expert, as backward needs it, for experts of these sizes.
    check_memory: (sizes of layers, load, bytes that will be freed) -> plans to print; MemoryError where it cannot fit.
    chosen:     for `auto`: whether it is the right one, and why or why not; "" if there is nothing to say.
    trains:     whether placed experts share the tensors that they are made of, and get gradients.
    offered:    whether users may name it; else it is there to be proven.
    """

    name: str
    summary: str
    make: Callable[[ExpertWeights], AnyExperts]
    tolerances: Mapping[torch.dtype, Tolerance]
    backends: Sequence[Any] = ()
    represent: Callable[[ExpertWeights], ExpertWeights] | None = None
    why_not: Callable[[], str | None] = lambda: None
    home: torch.device | None = None
    x_from: Sequence[str] = ("cpu", "cuda")
    how: Callable[[], str] = lambda: ""
    itemsize: float | None = None
    expert_bytes: Callable[[LayerSizes], int] | None = None
    check_memory: Callable[[Mapping[LayerSizes, int], Load, int], tuple[Any, ...]] | None = None
    chosen: Callable[[Situation], tuple[bool, str]] = field(default=lambda situation: (False, ""))
    trains: bool = False
    offered: bool = True

    def __deepcopy__(self, memo: dict) -> Placement:
        return self
