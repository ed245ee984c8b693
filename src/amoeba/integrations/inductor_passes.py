"""Inductor passes that let the experts' kernel write the sums of the residual stream in a compiled training step.

    sum = x + attention(norm(x))        a sum that backward needs is kept: one tensor is read in place of two, which are
                                        as large, and the sum behind the experts reads it, too
    y = sum + experts(norm(sum))        -> experts_onto(norm(sum), sum): what the experts give is not written and read
                                        again only to be added

    module.compile(options={"joint_custom_post_pass": KeptSums(), "post_grad_custom_pre_pass": SumsIntoExperts()})

Results have the same bits. The second pass comes when backward is a graph of its own: of a sum it needs nothing.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import linear
from torch.utils.checkpoint import CheckpointPolicy

from amoeba.core.torch_internals import custom_graph_pass

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class KeptSums(custom_graph_pass()):  # type: ignore[misc]
    """Over the graph of forward and backward together, before the compiler decides what is kept between them."""

    def __call__(self, graph: fx.Graph) -> None:
        of_backward: set[fx.Node] = set()
        for node in graph.nodes:
            is_gradient = node.op == "placeholder" and str(node.target).startswith("tangents")  # of an output
            if is_gradient or any(each in of_backward for each in node.all_input_nodes):
                of_backward.add(node)
            elif _is_sum(node):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # where checkpointing has no say in it

    def uuid(self) -> str:
        """Of this version; compiled code is kept under it."""
        return "amoeba.integrations.inductor_passes.KeptSums 1"


class SumsIntoExperts(custom_graph_pass()):  # type: ignore[misc]
    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if _is_sum(node):
                for residual, added in (node.args, reversed(node.args)):
                    experts, y = _experts_behind(added)
                    if experts is not None and _comes_before(graph, residual, experts):
                        _join(graph, experts, y, residual, node)
                        break

    def uuid(self) -> str:
        return "amoeba.integrations.inductor_passes.SumsIntoExperts 1"


def _is_sum(node: fx.Node) -> bool:
    """Of two tensors that are as large as it is, and of its dtype."""
    if node.op != "call_function" or node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return False
    kinds = [_kind(each) for each in (node, *node.args)]
    return kinds[0] is not None and kinds[0] == kinds[1] == kinds[2]


def _kind(node: Any) -> tuple | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    return value.shape, value.dtype, value.device


def _experts_behind(node: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The call of our operator whose y this is, seen otherwise or as it is, and y, if nothing else reads it."""
    while node.op == "call_function" and node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0 or len(node.users) != 1:
        return None, node
    experts: Any = node.args[0]
    return (experts if _with_addend(experts) is not None else None), node


def _with_addend(experts: fx.Node) -> Any:
    namespace, _, name = str(experts.target).partition(".")  # amoeba.triton.default
    if experts.op != "call_function" or namespace != "amoeba":
        return None
    found = getattr(torch.ops.amoeba, f"{name.removesuffix('.default')}_onto", None)
    return None if found is None else found.default


def _comes_before(graph: fx.Graph, node: fx.Node, other: fx.Node) -> bool:
    return next(each for each in graph.nodes if each is node or each is other) is node


def _join(graph: fx.Graph, experts: fx.Node, y: fx.Node, residual: fx.Node, total: fx.Node) -> None:
    shape, residual_value = y.meta["val"].shape, residual.meta["val"]
    with graph.inserting_before(experts):
        flat = graph.call_function(torch.ops.aten.reshape.default, (residual, list(shape)))
        flat.meta["val"] = residual_value.reshape(shape)
        joined = graph.call_function(_with_addend(experts), (*experts.args, flat), dict(experts.kwargs))
        joined.meta = dict(experts.meta)
        if "eager_input_vals" in joined.meta:  # by which the compiler lays out those arguments that it knows
            arguments, options = joined.meta["eager_input_vals"]
            joined.meta["eager_input_vals"] = (*arguments, flat.meta["val"]), options
    experts.replace_all_uses_with(joined)
    graph.erase_node(experts)
    with graph.inserting_before(total):
        out = graph.call_function(torch.ops.aten.reshape.default, (y, list(total.meta["val"].shape)))
        out.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(out)
    graph.erase_node(total)
    graph.eliminate_dead_code()


# x += y, x[i] = y and their like.
_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("__i")} | {operator.setitem}
_IN_PLACE -= {operator.inv, operator.index}


class JoinedLinears(custom_graph_pass()):  # type: ignore[misc]
    """Linear layers of the same input as one product, where torch.compile traces a training step.

        q, k, v = linear(x, q_proj), linear(x, k_proj), linear(x, v_proj)
        ->  linear(x, cat([q_proj, k_proj, v_proj])).split([...], -1)

    The input is read once, in both passes, and its gradient comes from one product, summed in fp32. Each pass copies
    the weights together, which pays where there are more tokens than rows of weights; others stay as they are. So do
    weights of which some are trained and some not: a joined gradient would be computed for all.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for group in _of_one_input(graph):
            if _pays(group):
                _join_linears(graph, group)

    def uuid(self) -> str:
        """Of this version; compiled code is kept under it."""
        return "amoeba.integrations.joined_linears 1"


def _of_one_input(graph: fx.Graph) -> list[list[fx.Node]]:
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


def _join_linears(graph: fx.Graph, group: list[fx.Node]) -> None:
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
