"""Which experts of a Hugging Face model aMoEba computes, and which keep to their own code.

    covered = coverage(model)
    covered.ours                 # names of the modules that go through transformers' experts interface
    covered.others               # {"model.layers.0.feed_forward.experts": "Llama4TextExperts", ...}
    print(f"experts by {covered}")

transformers hands experts over where their class is decorated with `use_experts_implementation`. Where it is not,
experts_implementation="amoeba" changes nothing there, and transformers does not say so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import is_experts


class Coverage(NamedTuple):
    ours: tuple[str, ...]
    others: dict[str, str]  # name -> class

    def __str__(self) -> str:
        if not self.others:
            return "amoeba"
        whose = f"{self.other_classes} of transformers, which accepts no other implementation"
        if not self.ours:
            return whose
        return f"amoeba in {len(self.ours)} of {len(self.ours) + len(self.others)} layers; the others by {whose}"

    @property
    def other_classes(self) -> str:
        return " and ".join(dict.fromkeys(self.others.values()))


def coverage(model: nn.Module) -> Coverage:
    """Which experts of a model aMoEba computes, by the names of their modules, and which keep to their own code."""
    ours: list[str] = []
    others: dict[str, str] = {}
    inside = ""  # the experts that were found last; what is in them is part of them
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if is_experts(module):
            ours.append(name)
        elif _holds_experts(module):
            others[name] = type(module).__name__
        else:
            continue
        inside = name + "."
    return Coverage(tuple(ours), others)


def check_coverage(model: Any, argument: str, remedy: str) -> Coverage:
    """ValueError where there are no experts, or none that aMoEba computes."""
    found = coverage(model)
    if found.ours:
        return found
    got, expected = "which has no experts", "a mixture-of-experts model of transformers"
    if found.others:
        got, expected = f"whose experts are computed by {found}", expected + " whose experts can be replaced"
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise bad_value(argument, expected, f"{kind}, {got}", remedy)


def _holds_experts(module: nn.Module) -> bool:
    """By the names that transformers gives such classes: ...Experts, or a whole layer such as DogeCDMoE."""
    name = type(module).__name__
    if name.endswith("SharedExperts") or next(module.parameters(), None) is None:
        return False
    whole = name.endswith("MoE") and isinstance(getattr(module, "num_experts", None), int)
    return name.endswith("Experts") or (whole and not any(_holds_or_hands_over(child) for child in module.modules()))


def _holds_or_hands_over(module: nn.Module) -> bool:
    return is_experts(module) or type(module).__name__.endswith("Experts")
