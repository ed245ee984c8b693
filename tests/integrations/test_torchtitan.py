"""Our experts in torchtitan's MoE layer against its own: output and all gradients, by its own config and overrides."""

import functools

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install torchtitan")
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from amoeba.integrations.torchtitan import AmoebaGroupedExperts

DIM, HIDDEN, EXPERTS, TOP_K = 32, 24, 6, 2
NORMAL = functools.partial(nn.init.normal_, std=0.1)


def layer(*overrides: str) -> MoE:
    config = MoE.Config(
        num_experts=EXPERTS,
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS,
            top_k=TOP_K,
            gate=Linear.Config(in_features=DIM, out_features=EXPERTS, param_init={"weight": NORMAL}),
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=DIM,
                hidden_dim=HIDDEN,
                num_experts=EXPERTS,
                param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL),
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
        ),
    )
    apply_overrides(OverrideConfig(imports=list(overrides)), config)
    return config.build()


def outcome(moe: MoE, x_BLD: Tensor) -> dict[str, Tensor]:
    x_BLD = x_BLD.clone().requires_grad_()
    y_BLD = moe(x_BLD)
    y_BLD.square().sum().backward()
    found = {"y": y_BLD.detach(), "dx": x_BLD.grad, "dgate": moe.router.gate.weight.grad}
    inner = moe.routed_experts.inner_experts
    if isinstance(inner, AmoebaGroupedExperts):
        gradients = dict(zip(("w1_EFD", "w3_EFD"), inner.w13.grad.unbind(2), strict=True))
    else:
        gradients = {"w1_EFD": inner.w1_EFD.grad, "w3_EFD": inner.w3_EFD.grad}
    return found | gradients | {"w2_EDF": inner.w2_EDF.grad}


def test_the_layer_and_its_gradients_are_those_of_torchtitan() -> None:
    torch.manual_seed(0)
    stock, ours = layer(), layer("amoeba.integrations.torchtitan.amoeba_experts")
    assert isinstance(ours.routed_experts.inner_experts, AmoebaGroupedExperts)
    stock.init_states()
    ours.load_state_dict(stock.state_dict())  # in the stock layout
    assert ours.state_dict().keys() == stock.state_dict().keys()
    x_BLD = torch.randn(2, 19, DIM)
    found, expected = outcome(ours, x_BLD), outcome(stock, x_BLD)
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm() / tensor.norm()
        assert error < 2e-2, (name, error)  # both in bf16


def test_rows_of_padding_cost_nothing_and_get_no_gradient() -> None:
    torch.manual_seed(0)
    ours = layer("amoeba.integrations.torchtitan.amoeba_experts")
    ours.init_states()
    inner = ours.routed_experts.inner_experts
    count_E = torch.tensor([3, 0, 5, 1, 0, 2])
    x_RD = torch.randn(16, DIM)
    padded = x_RD.clone().requires_grad_()
    with torch.no_grad():
        padded[11:] = torch.nan
    y_RD = inner(padded, count_E)
    y_RD[:11].sum().backward()
    assert torch.equal(y_RD[:11], inner(x_RD[:11], count_E))
    assert padded.grad[:11].isfinite().all() and inner.w13.grad.isfinite().all()
    assert not padded.grad[11:].any()


def test_experts_of_another_form_keep_torchtitans_computation() -> None:
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    config = RoutedExperts.Config(
        inner_experts=GptOssGroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K),
    )
    apply_overrides(OverrideConfig(imports=["amoeba.integrations.torchtitan.amoeba_experts"]), config)
    assert type(config.inner_experts) is GptOssGroupedExperts.Config
