"""The placements there are, by name.

register_placement(MINE)
packed = placement_named("cpu-int8").make(weights)
"""

from __future__ import annotations

from amoeba.backends.registry import register_backend
from amoeba.core.errors import bad_value
from amoeba.core.placement import Placement
from amoeba.cpu.placements import CPU_PLACEMENTS
from amoeba.precision.placements import PRECISION_PLACEMENTS

RESIDENT, AUTO = "resident", "auto"
_placements: dict[str, Placement] = {
    placement.name: placement for placement in (*CPU_PLACEMENTS, *PRECISION_PLACEMENTS)
}


def register_placement(placement: Placement) -> None:
    """Makes a placement and its backends known to `place_experts`, the commands' --experts and `amoeba verify`.

    Registering it again replaces it.
    """
    if placement.name in (RESIDENT, AUTO):
        raise bad_value("placement", f"a name other than {RESIDENT} and {AUTO}", placement.name, "choose another name")
    for backend in placement.backends:
        register_backend(backend)
    _placements[placement.name] = placement


def all_placements() -> tuple[Placement, ...]:
    """Those other than resident, also those that are there to be proven; by name, whichever was registered first."""
    return tuple(_placements[name] for name in sorted(_placements))


def placement_names() -> tuple[str, ...]:
    """What a user may name."""
    offered = (placement.name for placement in _placements.values() if placement.offered)
    return (RESIDENT, *offered, AUTO)


def placement_named(name: str) -> Placement:
    """One other than resident; ValueError where this machine does not have it."""
    placement = _placements.get(name)
    if placement is None:
        raise bad_value("experts", f"one of {', '.join(placement_names())}", repr(name), "leave it out for auto")
    reason = placement.why_not()
    if reason is not None:
        raise bad_value("experts", f"a machine that supports {name}", reason, "use resident")
    return placement
