"""Which cases stand for all of them."""

from dataclasses import fields

import torch

from amoeba.placements import all_placements
from amoeba.proof.cases import Case, most_telling_first

CPU = torch.device("cpu")
PLACED = [placement.name for placement in all_placements()]
# Each has a truth of its own, which takes longer than all else: tests/precision has a selection of cases for every run.
ROUNDED = [placement.name for placement in all_placements() if placement.represent is not None]


PROPERTIES = tuple(field.name for field in fields(Case))


def one_of_each(found, properties=PROPERTIES):
    """As few of them as have every value of every property that one of them has, most telling first."""
    seen, chosen = set(), []
    for case in most_telling_first(found):
        new = {(name, getattr(case, name)) for name in properties} - seen
        if new:
            seen |= new
            chosen.append(case)
    return chosen
