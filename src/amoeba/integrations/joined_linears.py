"""Linear layers of the same input as one product, where torch.compile traces a training step.

    q, k, v = linear(x, q_proj), linear(x, k_proj), linear(x, v_proj)
    ->  linear(x, cat([q_proj, k_proj, v_proj])).split([...], -1)

    module.compile(options={"pre_grad_custom_pass": JoinedLinears()})

The input is read once instead of once per weight, in both passes, and its gradient comes from one product, summed in
fp32, instead of being added up from rounded ones. Each pass copies the weights together, which pays where there are
more tokens than rows of weights; others are left as they are. So are weights of which some are trained and some not:
a joined gradient would be computed for all.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import linear

from amoeba.core.torch_internals import custom_graph_pass

# x += y, x[i] = y and their like.
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")} - {
    operator.inv,
    operator.index,
}
_IN_PLACE.add(operator.setitem)


class JoinedLinears(custom_graph_pass()):  # type: ignore[misc]
    def __call__(self, graph: fx.Graph) -> None:
        for group in _of_one_input(graph):
            if _pays(group):
                _join(graph, group)

    def uuid(self) -> str:
        """Of this version; compiled code is kept under it."""
        return "amoeba.integrations.joined_linears 1"


def _of_one_input(graph: fx.Graph) -> list[list[fx.Node]]:
    """Linear layers that may be joined, in the order of the graph."""
    groups = defaultdict(list)
    stretch = 0
    for node in graph.nodes:
        if _changes_something(node):
            stretch += 1  # an input, autocast's dtype, ...: what comes before is not joined with what comes after
        elif node.op == "call_function" and node.target is linear:
            x, weight, bias = _arguments(node)
            if weight.op == "placeholder" and (bias is None or bias.op == "placeholder"):
                of = _value(weight)
                groups[stretch, x, bias is None, of.dtype, of.requires_grad].append(node)
    return list(groups.values())


def _changes_something(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or node.target in _IN_PLACE or node.kwargs.get("inplace", False)
    return bool(in_place) or name in ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


def _arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """input, weight and bias, whether given by place or by name."""
    values = {**dict(zip(("input", "weight", "bias"), node.args, strict=False)), **node.kwargs}
    return values["input"], values["weight"], values.get("bias")


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _pays(group: list[fx.Node]) -> bool:
    if len(group) < 2:
        return False
    tokens = _value(group[0]).shape[:-1]
    rows = sum(_value(node).shape[-1] for node in group)
    # A length that is not known yet comes from batches of several shapes, which are the exception.
    return all(isinstance(size, int) for size in tokens) and prod(tokens) >= rows


def _join(graph: fx.Graph, group: list[fx.Node]) -> None:
    x, _, no_bias = _arguments(group[0])
    _, weights, biases = zip(*(_arguments(node) for node in group), strict=True)
    sizes = [_value(node).shape[-1] for node in group]

    def call(function: Any, *arguments: Any) -> fx.Node:
        node = graph.call_function(function, arguments)
        values = fx.map_arg(arguments, _value)
        node.meta["example_value"] = function(*values)
        return node

    with graph.inserting_before(group[0]):
        bias = None if no_bias is None else call(torch.cat, biases)
        parts = call(torch.split, call(linear, x, call(torch.cat, weights), bias), sizes, -1)
        joined = [call(operator.getitem, parts, index) for index in range(len(group))]
    for node, part in zip(group, joined, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)
