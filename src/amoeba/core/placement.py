"""What a placement is: where experts live, as a user names it, and what the rest of the code needs to know about it.

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
    """Where experts live, and in what form.

    name:       for `place_experts` and the commands' --experts.
    summary:    where the experts are, as the end of a sentence "experts ...".
    make:       turns resident experts into placed ones; the resident ones can be freed afterwards.
    backends:   what computes with them (amoeba.Backend); registered with the placement.
    tolerances: for each dtype that x may have, what `amoeba verify` allows.
    represent:  the experts with the values that the placed ones represent, if these differ (after rounding, for
                example); placed experts are compared with them. None: the original values.
    why_not:    why it does not work on this machine, or None.
    home:       the device on which resident weights must be when they are placed; None: any.
    x_from:     kinds of devices that x may be on.
    how:        how it computes on this machine, for `amoeba doctor`.
    itemsize:   bytes read per number of the placed weights; None: as many as for x.
    expert_bytes: of one placed expert of these sizes, including what backward needs.
    check_memory: (sizes of layers, load, bytes that will be freed) -> plans to print; MemoryError if it cannot fit.
    chosen:     for `auto`: whether to choose it, and why or why not; "" if there is nothing to say.
    trains:     whether placed experts share the tensors they are made from, and get gradients.
    offered:    whether users can select it; otherwise it is only verified.
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
