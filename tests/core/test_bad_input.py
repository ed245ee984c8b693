"""Every error that a user can run into says what was expected, what came, and what to do. One line per message.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I or I
"""

import math
import re

import pytest
import torch

from amoeba import Activation, ExpertWeights, MoEConfig, RouterConfig, Routing, experts
from amoeba.backends.registry import backends_of
from amoeba.core.errors import bad_value, counted
from amoeba.core.weights import LoraFactors

T, K, E, H, I = 3, 2, 4, 8, 16
ROUTER = RouterConfig(num_experts=E, top_k=K)


def assert_explained(action, name, expected, got, remedy):
    with pytest.raises(ValueError) as caught:
        action()
    parts = re.fullmatch(r"(.+?): expected (.+); got (.+?)\. ([A-Z`].+)\.", str(caught.value))
    assert parts is not None, f"not of the shape 'name: expected ...; got .... Remedy.': {caught.value}"
    for found, wanted in zip(parts.groups(), (name, expected, got, remedy), strict=True):
        assert wanted in found, f"{wanted!r} not in {found!r}: {caught.value}"


def test_the_shape_of_every_error():
    error = bad_value("top_k", "at most 8", 9, "lower top_k")
    assert isinstance(error, ValueError)
    assert str(error) == "top_k: expected at most 8; got 9. Lower top_k."


ACTIVATION_ERRORS = [
    (
        {"kind": "swish"},
        "activation.kind",
        "one of silu, gelu, gelu_tanh, relu, relu2",
        "'swish'",
        "Set activation.kind",
    ),
    ({"alpha": 0.0}, "activation.alpha", "finite number above 0", "0.0", "1.0 for plain silu"),
    ({"alpha": math.nan}, "activation.alpha", "finite number above 0", "nan", "1.0 for plain silu"),
    ({"alpha": math.inf}, "activation.alpha", "finite number above 0", "inf", "1.0 for plain silu"),
    ({"kind": "gelu", "alpha": 1.7}, "activation.alpha", "1.0 for gelu", "1.7", "Only silu has a slope"),
    ({"limit": 0.0}, "activation.limit", "above 0", "0.0", "math.inf for no clamp"),
    ({"limit": -7.0}, "activation.limit", "above 0", "-7.0", "math.inf for no clamp"),
    ({"limit": math.nan}, "activation.limit", "above 0", "nan", "math.inf for no clamp"),
    ({"up_shift": math.inf}, "activation.up_shift", "finite", "inf", "0.0 for none"),
    ({"gated": False, "up_shift": 1.0}, "activation.gated", "True if", "False", "no up half"),
    ({"gated": False, "interleaved": True}, "activation.gated", "True if", "False", "no up half"),
]


@pytest.mark.parametrize(("fields", "name", "expected", "got", "remedy"), ACTIVATION_ERRORS, ids=str)
def test_activation(fields, name, expected, got, remedy):
    assert_explained(lambda: Activation(**fields), name, expected, got, remedy)


ROUTER_ERRORS = [
    ({"num_experts": 0}, "num_experts", "integer of at least 1", "0", "positive integer"),
    ({"num_experts": 8.0}, "num_experts", "integer of at least 1", "8.0", "positive integer"),
    ({"num_experts": True}, "num_experts", "integer of at least 1", "True", "positive integer"),
    ({"top_k": 0}, "top_k", "integer of at least 1", "0", "positive integer"),
    ({"top_k": 9}, "top_k", "at most num_experts (8)", "9", "Lower top_k or add experts"),
    ({"score": "tanh"}, "score", "one of softmax, sigmoid, topk_softmax", "'tanh'", "Set score"),
    ({"group_score": "mean"}, "group_score", "one of top2_sum, max", "'mean'", "Set group_score"),
    ({"scaling_factor": 0.0}, "scaling_factor", "finite number above 0", "0.0", "1.0 for no scaling"),
    ({"scaling_factor": math.nan}, "scaling_factor", "finite number above 0", "nan", "1.0 for no scaling"),
    ({"n_group": 0}, "n_group", "integer of at least 1", "0", "positive integer"),
    ({"topk_group": 0}, "topk_group", "integer of at least 1", "0", "positive integer"),
    ({"n_group": 3}, "n_group", "divisor of num_experts (8)", "3", "Groups must be of equal size"),
    ({"n_group": 2, "topk_group": 3}, "topk_group", "at most n_group (2)", "3", "Lower topk_group"),
    ({"n_group": 4, "top_k": 3}, "top_k", "at most the 2 experts that topk_group=1", "3", "Raise topk_group"),
    ({"jitter": 1.0}, "jitter", "0 <= jitter < 1", "1.0", "0.0 for no noise"),
    ({"jitter": -0.1}, "jitter", "0 <= jitter < 1", "-0.1", "0.0 for no noise"),
    ({"jitter": math.nan}, "jitter", "0 <= jitter < 1", "nan", "0.0 for no noise"),
    ({"capacity_factor": 0.0}, "capacity_factor", "None or a finite number above 0", "0.0", "None for dropless"),
    ({"capacity_factor": math.inf}, "capacity_factor", "None or a finite number above 0", "inf", "None for dropless"),
]


@pytest.mark.parametrize(("fields", "name", "expected", "got", "remedy"), ROUTER_ERRORS, ids=str)
def test_router(fields, name, expected, got, remedy):
    assert_explained(lambda: RouterConfig(**{"num_experts": 8, "top_k": 2} | fields), name, expected, got, remedy)


LAYER_ERRORS = [
    ({"hidden_size": 0}, "hidden_size", "integer of at least 1", "0", "positive integer"),
    ({"intermediate_size": -4}, "intermediate_size", "integer of at least 1", "-4", "positive integer"),
    ({"shared_intermediate_size": -1}, "shared_intermediate_size", "integer of at least 0", "-1", "no shared experts"),
    ({"shared_intermediate_size": 0.5}, "shared_intermediate_size", "at least 0", "0.5", "no shared experts"),
    ({"router": {"top_k": 2}}, "router", "a RouterConfig", "{'top_k': 2}", "Pass router=RouterConfig(...)"),
    ({"activation": "silu"}, "activation", "a Activation", "'silu'", "Pass activation=Activation(...)"),
]


@pytest.mark.parametrize(("fields", "name", "expected", "got", "remedy"), LAYER_ERRORS, ids=str)
def test_layer(fields, name, expected, got, remedy):
    whole = {"hidden_size": 8, "intermediate_size": 16, "router": ROUTER}
    assert_explained(lambda: MoEConfig(**whole | fields), name, expected, got, remedy)


def weights(dtype=torch.float32, device="cpu", **changed):
    named = {"gate_up_EJH": (E, 2 * I, H), "down_EHI": (E, H, I)}
    tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in named.items()}
    return ExpertWeights(**tensors | changed)


HALF, META = torch.bfloat16, {"device": "meta"}
WEIGHT_ERRORS = [
    ({"gate_up_EJH": torch.zeros(2 * I, H)}, "expert weights", "gate_up (E, J, H)", "(32, 8)", "Stack the experts"),
    ({"down_EHI": torch.zeros(H, I)}, "expert weights", "down (E, H, I)", "(8, 16)", "Stack the experts"),
    (
        {"gate_up_EJH": torch.zeros(E, H, 2 * I)},
        "gate_up_EJH",
        "shape (4, 32, 8) to go with down (4, 8, 16) (gated: J = 2I)",
        "(4, 8, 32)",
        "weight.transpose(1, 2)",
    ),
    (
        {"activation": Activation("relu", gated=False)},
        "gate_up_EJH",
        "shape (4, 16, 8) to go with down (4, 8, 16) (ungated: J = I)",
        "(4, 32, 8)",
        "check activation.gated",
    ),
    ({"down_EHI": torch.zeros(E + 1, H, I)}, "gate_up_EJH", "shape (5, 32, 8)", "(4, 32, 8)", "Pass weights"),
    ({"gate_up_bias_EJ": torch.zeros(E, I)}, "gate_up_bias_EJ", "shape (4, 32)", "(4, 16)", "One bias row per expert"),
    ({"down_bias_EH": torch.zeros(H)}, "down_bias_EH", "shape (4, 8)", "(8,)", "One bias row per expert"),
    ({"down_EHI": torch.zeros(E, H, I, dtype=HALF)}, "down_EHI", "float32 on cpu", "bfloat16 on cpu", "Move and cast"),
    ({"down_EHI": torch.zeros(E, H, I, **META)}, "down_EHI", "float32 on cpu", "float32 on meta", "Move and cast"),
    (
        {"gate_up_bias_EJ": torch.zeros(E, 2 * I, dtype=torch.float64)},
        "gate_up_bias_EJ",
        "float32 on cpu, as gate_up_EJH",
        "float64 on cpu",
        "Move and cast all weights of a layer together",
    ),
    ({"down_bias_EH": torch.zeros(E, H, **META)}, "down_bias_EH", "on cpu", "on meta", "Move and cast"),
]


@pytest.mark.parametrize(("changed", "name", "expected", "got", "remedy"), WEIGHT_ERRORS, ids=range(len(WEIGHT_ERRORS)))
def test_weights(changed, name, expected, got, remedy):
    assert_explained(lambda: weights(**changed), name, expected, got, remedy)


def routing(tokens=T, values=0.5, device="cpu"):
    expert_TK = torch.zeros(tokens, K, dtype=torch.int64, device=device)
    return Routing(expert_TK, torch.full((tokens, K), values, device=device))


ROUTING_ERRORS = [
    (lambda: Routing(torch.zeros(6).long(), torch.zeros(6)), "expert_TK", "two dimensions", "shape (6,)", "Flatten"),
    (
        lambda: Routing(torch.zeros(6, 0).long(), torch.zeros(6, 0)),
        "expert_TK",
        "at least one",
        "shape (6, 0)",
        "an id",
    ),
    (
        lambda: Routing(torch.zeros(3, 2).long(), torch.zeros(3, 1)),
        "weight_TK",
        "the shape of expert_TK, (3, 2)",
        "shape (3, 1)",
        "Pass one weight for each chosen expert",
    ),
    (lambda: Routing(torch.zeros(3, 2), torch.zeros(3, 2)), "expert_TK", "int32 or int64", "float32", ".long()"),
    (lambda: Routing(torch.zeros(1, 1).short(), torch.zeros(1, 1)), "expert_TK", "int32 or int64", "int16", ".long()"),
    (lambda: Routing(torch.zeros(1, 1).long(), torch.zeros(1, 1).long()), "weight_TK", "floating", "int64", ".float()"),
    (
        lambda: Routing(torch.zeros(1, 1).long(), torch.zeros(1, 1, device="meta")),
        "weight_TK",
        "the device of expert_TK, cpu",
        "meta",
        "Move one of them",
    ),
]


@pytest.mark.parametrize(("make", "name", "expected", "got", "remedy"), ROUTING_ERRORS, ids=range(len(ROUTING_ERRORS)))
def test_routing(make, name, expected, got, remedy):
    assert_explained(make, name, expected, got, remedy)


X = torch.zeros(T, H)


class Elsewhere(ExpertWeights):
    placement = "elsewhere"


def down_factors(experts=E, rank=2, scaling=1.0, dtype=torch.float32):
    a, b = torch.zeros(experts, rank, I, dtype=dtype), torch.zeros(experts, H, rank, dtype=dtype)
    return LoraFactors(down_lora_a=a, down_lora_b=b, scaling=scaling)


EXPERTS_ERRORS = {
    "one dimension": (lambda: experts(X[0], routing(), weights()), "x_TH", "shape (T, 8)", "(8,)", "x.reshape(-1, H)"),
    "batch": (lambda: experts(X[None], routing(), weights()), "x_TH", "shape (T, 8)", "(1, 3, 8)", "x.reshape(-1, H)"),
    "hidden": (lambda: experts(X[:, :4], routing(), weights()), "x_TH", "shape (T, 8)", "(3, 4)", "Flatten batch"),
    "tokens": (lambda: experts(X, routing(5), weights()), "routing", "T = 3", "(5, 2)", "Route the same tokens"),
    "dtype": (
        lambda: experts(X.bfloat16(), routing(), weights()),
        "x_TH",
        "torch.float32, as the weights",
        "torch.bfloat16",
        "Cast x or the weights, or use torch.autocast",
    ),
    "device of the weights": (
        lambda: experts(X, routing(), weights(device="meta")),
        "device",
        "x, routing and weights on meta",
        "x on cpu, routing on cpu",
        "Move them to one device",
    ),
    "device of x": (
        lambda: experts(X.to("meta"), routing(), weights()),
        "device",
        "on cpu",
        "x on meta, routing on cpu",
        "Move them to one device",
    ),
    "device of the routing": (
        lambda: experts(X, routing(device="meta"), weights()),
        "device",
        "on cpu",
        "x on cpu, routing on meta",
        "Move them to one device",
    ),
    "negative weight": (
        lambda: experts(X, routing(values=-0.5), weights()),
        "weight_TK",
        "no NaN and no negative weight",
        "6 bad of 6, the first at token 0, slot 0: -0.5",
        "amoeba.routing.router.route",
    ),
    "weight of NaN": (
        lambda: experts(X, routing(values=math.nan), weights()),
        "weight_TK",
        "no NaN and no negative weight",
        "the first at token 0, slot 0: nan",
        "Look for NaN or inf in the router's input",
    ),
    "unknown backend": (
        lambda: experts(X, routing(), weights(), backend="cuda"),
        "backend",
        "one of auto, ",
        "'cuda'",
        "`amoeba doctor` shows which ones run here",
    ),
    "backend that cannot": (
        lambda: experts(X.double(), routing(), weights(torch.float64), backend="grouped"),
        "backend",
        "one that supports this request; grouped does not",
        "takes fp32 and bf16; these weights are torch.float64",
        'Use backend="auto"',
    ),
    "unaligned": (
        lambda: experts(
            torch.zeros(T, 7),
            routing(),
            weights(gate_up_EJH=torch.zeros(E, 2 * I, 7), down_EHI=torch.zeros(E, 7, I)),
            backend="grouped",
        ),
        "backend",
        "grouped does not",
        "multiple of 16 bytes, H = 7 is 28",
        'Use backend="auto"',
    ),
    "LoRA that is something else": (
        lambda: experts(X, routing(), weights(), lora=object()),
        "lora",
        "LoraFactors",
        "object",
        "Put the factors into amoeba.core.weights.LoraFactors",
    ),
    "half a pair": (
        lambda: experts(X, routing(), weights(), lora=LoraFactors(up_lora_b=torch.zeros(E, I, 2))),
        "up_lora_a and up_lora_b",
        f"shapes ({E}, R, {H}) and ({E}, {I}, R) with R >= 1",
        f"None and ({E}, {I}, 2)",
        "Pass both factors of a projection or neither",
    ),
    "rank 0": (
        lambda: experts(X, routing(), weights(), lora=down_factors(rank=0)),
        "down_lora_a and down_lora_b",
        "with R >= 1",
        f"({E}, 0, {I}) and ({E}, {H}, 0)",
        "Pass both factors",
    ),
    "factors of other experts": (
        lambda: experts(X, routing(), weights(), lora=down_factors(experts=E + 1)),
        "down_lora_a and down_lora_b",
        f"({E}, R, {I}) and ({E}, {H}, R)",
        f"({E + 1}, 2, {I}) and ({E + 1}, {H}, 2)",
        "stacked along the experts",
    ),
    "scaling": (
        lambda: experts(X, routing(), weights(), lora=down_factors(scaling=math.inf)),
        "scaling",
        "a finite number",
        "inf",
        "PEFT calls it lora_alpha / rank",
    ),
    "factors of another dtype": (
        lambda: experts(X, routing(), weights(), lora=down_factors(dtype=torch.bfloat16)),
        "down_lora_a",
        "torch.float32 on cpu",
        "torch.bfloat16 on cpu",
        "Move and cast the factors",
    ),
    "factors of a gate that is not there": (
        lambda: experts(
            X,
            routing(),
            weights(gate_up_EJH=torch.zeros(E, I, H), activation=Activation("relu2", gated=False)),
            lora=LoraFactors(torch.zeros(E, 2, H), torch.zeros(E, I, 2)),
        ),
        "gate_lora_a",
        "no gate factors",
        "a pair of them",
        "Name the factors of the up projection",
    ),
    "no backend at all": (
        lambda: experts(X.to(torch.float8_e4m3fn), routing(), weights(torch.float8_e4m3fn)),
        "backend",
        "at least one that supports this request",
        "eager supports fp64, fp32, bf16 and fp16; these weights are torch.float8_e4m3fn",
        "Change the weights' dtype or placement",
    ),
}


@pytest.mark.parametrize("what", EXPERTS_ERRORS)
def test_experts(what):
    assert_explained(*EXPERTS_ERRORS[what])


def test_auto_names_every_backend_that_refused():
    with pytest.raises(ValueError) as caught:
        experts(X.to(torch.float8_e4m3fn), routing(), weights(torch.float8_e4m3fn))
    for backend in backends_of(ExpertWeights, torch.device("cpu")):
        assert f"{backend.name} " in str(caught.value)
    assert "these weights are torch.float8_e4m3fn" in str(caught.value)


def test_a_kind_of_weights_that_nobody_serves_is_named():
    with pytest.raises(ValueError, match=r"no backend for elsewhere weights \(Elsewhere\).*amoeba.register_backend"):
        experts(X, routing(), Elsewhere(weights().gate_up_EJH, weights().down_EHI))


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError) as caught:
        experts(X, routing(), weights(), backend="Eager")
    for backend in backends_of(ExpertWeights, torch.device("cpu")):
        assert backend.name in str(caught.value)


def test_trusted_weights_are_not_read():
    bad = routing(values=-1.0)
    trusted = Routing(bad.expert_TK, bad.weight_TK, trusted=True)
    assert experts(X, trusted, weights()).shape == (T, H)


def test_one_bad_weight_among_good_ones_is_found_and_placed():
    good = routing()
    good.weight_TK[2, 1] = math.nan
    with pytest.raises(ValueError, match="1 bad of 6, the first at token 2, slot 1: nan"):
        experts(X, good, weights())


@pytest.mark.parametrize(("number", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_one_thing_is_not_told_in_the_plural(number, words):
    assert counted(number, "row") == words
