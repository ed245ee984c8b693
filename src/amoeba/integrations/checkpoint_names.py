"""The tensors of a checkpoint by the parameters that they become, by transformers' own table of names and conversions.

names = sort_names(model_on_meta, tensors_of_the_checkpoint)
names.sources("model.layers.0.mlp.experts.down_proj")   # {pattern: [...experts.0.down_proj.weight, ...]}
names.rest                                              # of the rest of the model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amoeba.core.errors import bad_value
from amoeba.integrations.experts_module import experts_modules

Sources = dict[str | None, list[str]]  # by the pattern of a conversion, None without one; experts in their order


SPLITS_LISTS = "ErnieFuseAndSplitTextVisionExperts"  # a conversion of transformers


@dataclass(frozen=True)
class CheckpointNames:
    of_experts: dict[str, Sources]  # by parameter
    of_rest: dict[str, Sources]
    rest: list[str]  # names, in their natural order
    converters: dict[str, Any]  # WeightConverter of transformers, by each of its patterns

    def sources(self, parameter: str) -> Sources:
        """Empty where the checkpoint has nothing for this parameter."""
        return self.of_experts.get(parameter) or self.of_rest.get(parameter, {})

    def own_sources(self, parameter: str) -> Sources:
        """As `sources`; of tensors that several parameters are made of, those that are this one's alone: Ernie's lists
        of experts have those for text first, as many as there are for images."""
        group = self.made_together(parameter)
        found = self.sources(group[0])
        kinds = [type(each).__name__ for each in getattr(self.converter(parameter), "operations", ())]
        if len(group) == 1 or kinds != [SPLITS_LISTS]:
            return self.sources(parameter)
        sizes = {pattern: -(-len(names) // len(group)) for pattern, names in found.items()}
        place = group.index(parameter)
        return {pattern: names[place * sizes[pattern] :][: sizes[pattern]] for pattern, names in found.items()}

    def made_together(self, parameter: str) -> list[str]:
        """The parameters that one conversion makes of the same tensors, the one with these as its sources first:
        Ernie's experts for text and for images are in one list on disk."""
        for converter in {id(each): each for each in self.converters.values()}.values():
            for target in converter.target_patterns:
                found = [parameter.replace(target, each) for each in converter.target_patterns]
                # the text model may have a q_proj of its own next to a fused one of the vision part
                converted = set(self.sources(found[0])) & set(converter.source_patterns)
                if len(found) > 1 and target in parameter and converted:
                    return found
        return [parameter]

    def converter(self, parameter: str) -> Any | None:
        """What makes the parameter of its sources; None where there is one tensor that is already it."""
        sources = self.sources(self.made_together(parameter)[0])
        return next((self.converters[each] for each in sources if each in self.converters), None)


def sort_names(model: Any, names: Iterable[str]) -> CheckpointNames:
    """model: without weights, on the meta device."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    parameters, prefix = model.state_dict(), model.base_model_prefix
    inside = tuple(f"{name}." for name in experts_modules(model))
    found = CheckpointNames({}, {}, [], {pattern: each for each in converters for pattern in each.source_patterns})
    for name in sorted(names, key=_natural):
        target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name in parameters:  # an already converted name, as transformers has it
            target, pattern = rename_source_key(name, [], [], prefix, parameters)
        if target in parameters and target.startswith(inside):
            found.of_experts.setdefault(target, {}).setdefault(pattern, []).append(name)
        elif target in parameters:
            found.of_rest.setdefault(target, {}).setdefault(pattern, []).append(name)
            found.rest.append(name)
    return found


def as_stored(model: Any, names: CheckpointNames, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as the checkpoint that the model was loaded from has them: by its names, in its layout.

    names: of that checkpoint. parameters: those that are `made_together` are all there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = {}
    whole = {name for name in parameters if names.converter(names.made_together(name)[0]) is None}
    converted = {name: tensor for name, tensor in parameters.items() if name not in whole}
    reverted = revert_weight_conversion(model, converted) if converted else {}
    back = sort_names(model, reverted)
    for name, tensor in parameters.items():
        sources = names.sources(name)
        if name not in converted:
            found |= {source: tensor for each in sources.values() for source in each}
            continue
        for pattern, stored in sources.items():
            again = back.sources(name).get(pattern, [])
            if len(again) != len(stored):
                got = f"one with {len(stored)} tensors for it, where transformers would write {len(again)}"
                remedy = "save the model with save_pretrained first, and merge into that folder"
                raise bad_value("MODEL", f"a checkpoint whose layout of {name} transformers can reproduce", got, remedy)
            found |= {source: reverted[each] for source, each in zip(stored, again, strict=True)}
    return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Numbers by their value, as transformers sorts them: expert 10 comes after expert 9."""
    return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in name.split(".")]
