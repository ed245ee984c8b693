"""What `amoeba.MoE` promises: transformers' state dicts, every gradient, balance, statistics, and ordinary module life.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

from dataclasses import replace

import pytest
import torch

from amoeba import Activation, MoE, RouterConfig, Routing
from amoeba.core.weights import ExpertWeights
from amoeba.proof.reference.experts import (
    experts_backward,
    experts_forward,
    shared_expert_backward,
    shared_expert_forward,
)
from amoeba.proof.reference.router import router_backward, router_forward
from selection import each_value_once
from small_layers import FULL, HIDDEN, INTERMEDIATE, NUM_EXPERTS, PLAIN, ROUTERS, TOP_K, gradients, make_layer, make_x

torch.set_num_threads(1)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
UNGATED = replace(PLAIN, activation=Activation("relu2", gated=False), bias=True)
CLAMPED = replace(FULL, activation=Activation("silu", alpha=1.702, limit=1.5, up_shift=1.0, interleaved=True))


def relative_error(got, expected):
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_close(got, expected, tolerance):
    assert got.keys() == expected.keys()
    errors = {name: relative_error(got[name], expected[name]) for name in expected}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    assert all(expected[name].norm() > 0 for name in expected), "a gradient of 0 proves nothing"
    assert max(errors.values()) < tolerance, errors


def reference(layer, x_TH, dy_TH):
    """The layer and its backward, written out, in fp64."""
    config, router = layer.config, layer.config.router
    x_TH, dy_TH = x_TH.double(), dy_TH.double()
    state = {name: tensor.detach().double() for name, tensor in layer.state_dict().items()}
    first = "gate_up_proj" if config.activation.gated else "up_proj"
    names = {
        "gate_up": f"experts.{first}",
        "down": "experts.down_proj",
        "gate_up_bias": f"experts.{first}_bias",
        "down_bias": "experts.down_proj_bias",
    }
    weights = ExpertWeights(*(state.get(name) for name in names.values()), activation=config.activation)
    gate_EH, bias_E = state["gate.weight"], state.get("gate.e_score_correction_bias")

    logits_TE = x_TH @ gate_EH.T
    expert_TK, weight_TK = router_forward(logits_TE, router, bias_E)
    chosen_TK, _ = router_forward(logits_TE, replace(router, capacity_factor=None), bias_E)
    found = {"y": experts_forward(x_TH, expert_TK, weight_TK, weights)}
    grads = experts_backward(dy_TH, x_TH, expert_TK, weight_TK, weights)
    dlogits_TE = router_backward(grads.pop("weight"), logits_TE, chosen_TK, router)
    found["x"] = grads.pop("x") + dlogits_TE @ gate_EH
    found["gate.weight"] = dlogits_TE.T @ x_TH
    found |= {names[name]: gradient for name, gradient in grads.items()}
    if config.shared_intermediate_size:
        shared = [state[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
        grads = shared_expert_backward(dy_TH, x_TH, *shared)
        found["y"] = found["y"] + shared_expert_forward(x_TH, *shared)
        found["x"] = found["x"] + grads["x"]
        for name in ("gate", "up", "down"):
            found[f"shared_experts.{name}_proj.weight"] = grads[f"shared_{name}"]
    return found


# ---- against the reference


@each_value_once()
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
def test_every_gradient_is_that_of_the_reference_for_every_router(router, dtype):
    layer = make_layer(replace(FULL, router=router), dtype)
    x, dy = make_x(63, dtype=dtype), make_x(63, dtype=dtype, seed=3)
    assert_close(gradients(layer, x, dy), reference(layer, x, dy), TOLERANCE[dtype])


@pytest.mark.parametrize("config", [PLAIN, UNGATED, CLAMPED], ids=["plain", "ungated", "clamped"])
def test_every_gradient_is_that_of_the_reference_for_every_kind_of_expert(config):
    layer = make_layer(config, torch.float64)
    x, dy = make_x(63, dtype=torch.float64), make_x(63, dtype=torch.float64, seed=3)
    assert_close(gradients(layer, x, dy), reference(layer, x, dy), TOLERANCE[torch.float64])


def test_router_gradient_is_exactly_zero_for_one_renormalised_expert():
    layer = make_layer(replace(PLAIN, router=RouterConfig(NUM_EXPERTS, 1)))
    assert torch.equal(gradients(layer, make_x(17), make_x(17))["gate.weight"], torch.zeros(NUM_EXPERTS, HIDDEN))


# ---- against transformers


def qwen3_moe(renormalize):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    block = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            norm_topk_prob=renormalize,
        )
    )
    return block, replace(PLAIN, router=RouterConfig(NUM_EXPERTS, TOP_K, renormalize=renormalize))


def mixtral():
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    block = MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K
        )
    )
    return block, replace(PLAIN, router=RouterConfig(NUM_EXPERTS, TOP_K))


def deepseek_v3():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    block = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        )
    )
    return block, replace(FULL, bias=False, shared_intermediate_size=2 * INTERMEDIATE)


@pytest.mark.parametrize(
    "make_block",
    [lambda: qwen3_moe(True), lambda: qwen3_moe(False), mixtral, deepseek_v3],
    ids=["qwen3_moe", "qwen3_moe_not_renormalized", "mixtral", "deepseek_v3"],
)
def test_a_block_of_transformers_loads_strictly_and_computes_the_same(make_block):
    pytest.importorskip("transformers")
    block, config = make_block()
    generator = torch.Generator().manual_seed(4)
    for tensor in block.state_dict().values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    layer = MoE(config)
    layer.load_state_dict(block.state_dict(), strict=True)
    x, dy = make_x(3, 21), make_x(3, 21, seed=5)
    assert_close(gradients(layer, x, dy), gradients(block, x, dy), 1e-5)


def test_ungated_experts_have_the_names_that_transformers_gives_them():
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    theirs = modeling.NemotronHExperts(
        modeling.NemotronHConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INTERMEDIATE,
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=TOP_K,
            moe_latent_size=None,
        )
    )
    ours = MoE(replace(UNGATED, bias=False)).experts
    shapes = {name: tensor.shape for name, tensor in ours.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}


def test_state_dict_holds_the_documented_names_and_no_statistics():
    assert set(MoE(FULL).state_dict()) == {
        "gate.weight",
        "gate.e_score_correction_bias",
        "experts.gate_up_proj",
        "experts.gate_up_proj_bias",
        "experts.down_proj",
        "experts.down_proj_bias",
        "shared_experts.gate_proj.weight",
        "shared_experts.up_proj.weight",
        "shared_experts.down_proj.weight",
    }
    assert set(MoE(UNGATED).state_dict()) == {
        "gate.weight",
        "experts.up_proj",
        "experts.up_proj_bias",
        "experts.down_proj",
        "experts.down_proj_bias",
    }


# ---- shapes and errors


@pytest.mark.parametrize("shape", [(), (1,), (63,), (2, 3), (2, 3, 5)], ids=str)
def test_leading_dimensions_come_back_and_change_nothing(shape):
    layer, x = make_layer(), make_x(*shape)
    y, routing = layer(x, return_routing=True)
    assert y.shape == x.shape
    assert isinstance(routing, Routing)
    assert routing.expert_TK.shape == (x.numel() // HIDDEN, TOP_K)
    assert torch.equal(y.reshape(-1, HIDDEN), layer(x.reshape(-1, HIDDEN)))


def test_input_that_is_not_contiguous_gives_the_same():
    layer, x = make_layer(), make_x(5, 4)
    assert torch.equal(layer(x.transpose(0, 1)), layer(x).transpose(0, 1))


@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
def test_no_tokens_give_no_output_and_gradients_of_zero(shape):
    layer = make_layer(replace(FULL, router=replace(FULL.router, capacity_factor=1.0)))
    x = make_x(*shape)
    found = gradients(layer, x, x)
    assert found.pop("y").shape == x.shape
    assert found.pop("x").shape == x.shape
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found.values())
    layer.update_balance(0.1)


@pytest.mark.parametrize("shape", [(3, HIDDEN - 1), ()], ids=str)
def test_wrong_last_dimension_is_refused_with_both_sizes(shape):
    with pytest.raises(ValueError, match=r"x: expected .*hidden_size \(24\); got shape \(.*\)\. Pass hidden states"):
        MoE(PLAIN)(torch.zeros(shape))


def test_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend"):
        MoE(PLAIN, backend="nothing")(make_x(2))


def test_repr_tells_the_sizes():
    text = repr(MoE(FULL))
    for size in ("hidden_size=24", "intermediate_size=20", "num_experts=8", "top_k=3", "shared_intermediate_size=28"):
        assert size in text


# ---- precision and memory


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16().float()])
def test_selection_bias_keeps_its_exact_value_through_casts(cast):
    layer = make_layer()
    before = layer.gate.e_score_correction_bias.clone()
    after = cast(layer).gate.e_score_correction_bias
    assert after.dtype == torch.float32
    assert torch.equal(after, before)


def test_selection_bias_is_fp32_also_after_loading_a_half_checkpoint():
    half = {name: tensor.bfloat16() for name, tensor in make_layer().state_dict().items()}
    layer = MoE(FULL, dtype=torch.bfloat16)
    assert layer.gate.e_score_correction_bias.dtype == torch.float32
    layer.load_state_dict(half, assign=True)
    assert layer.gate.e_score_correction_bias.dtype == torch.float32
    assert layer.double().gate.e_score_correction_bias.dtype == torch.float64
    assert layer.half().gate.e_score_correction_bias.dtype == torch.float32


def test_half_precision_layer_runs_with_logits_in_fp32():
    layer, x = make_layer(dtype=torch.bfloat16), make_x(63, dtype=torch.bfloat16)
    y, routing = layer(x, return_routing=True)
    assert y.dtype == torch.bfloat16
    assert routing.weight_TK.dtype == torch.float32
    torch.testing.assert_close(routing.logits_TE, x.float() @ layer.gate.weight.float().T, rtol=1e-5, atol=1e-6)
    expected = reference(layer, x, x)
    assert relative_error(y, expected["y"]) < 1e-2
    assert relative_error(gradients(layer, x, x)["gate.weight"], expected["gate.weight"]) < 2e-2


def test_autocast_leaves_the_router_in_fp32_in_both_passes():
    layer, x = make_layer(), make_x(63)
    plain = layer.gate(x)
    plain_gradient = torch.autograd.grad(plain.weight_TK.square().sum(), layer.gate.weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = layer(x, return_routing=True)
        gradient = torch.autograd.grad(routing.weight_TK.square().sum(), layer.gate.weight, retain_graph=True)[0]
        y.float().square().mean().backward()
    assert y.dtype == torch.bfloat16
    assert torch.equal(routing.weight_TK, plain.weight_TK)
    assert torch.equal(gradient, plain_gradient)
    assert relative_error(y, layer(x)) < 2e-2
    assert all(parameter.grad is not None for parameter in layer.parameters())


def kept_between_passes(layer, x):
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)  # noqa: F841  (the graph keeps the storages apart)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return [tensor for pointer, tensor in kept.items() if pointer not in parameters]


def test_no_wide_copy_of_the_input_is_kept_for_the_router():
    layer = make_layer(replace(FULL, shared_intermediate_size=0), torch.bfloat16)
    x = make_x(63, dtype=torch.bfloat16).requires_grad_()
    shapes = [(tensor.shape, tensor.dtype) for tensor in kept_between_passes(layer, x)]
    assert [dtype for shape, dtype in shapes if shape == x.shape] == [torch.bfloat16]


def test_recompute_keeps_less_and_gives_the_same_gradients():
    x, dy = make_x(63), make_x(63, seed=3)
    usual, recomputing = make_layer(), make_layer(recompute=True)
    bytes_of = [sum(t.nbytes for t in kept_between_passes(layer, x)) for layer in (usual, recomputing)]
    rows = 63 * TOP_K
    h_and_row_maps = rows * 2 * INTERMEDIATE * 4 + rows * (8 + 8) + NUM_EXPERTS * 4
    assert bytes_of[0] - bytes_of[1] == h_and_row_maps
    assert_close(gradients(recomputing, x, dy), gradients(usual, x, dy), 1e-6)
