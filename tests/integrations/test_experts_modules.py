"""Experts modules of transformers as they can look: transposed, without a gate, with biases, called by all-to-all."""

from typing import Any

import pytest
import torch
from experts_modules import LAYOUTS, assert_close, make_experts
from torch import Tensor, nn

from amoeba.integrations.experts_module import ATTRIBUTE
from selection import each_value_once
from tiny_models import EXPERTS, HIDDEN, TOLERANCE, experts_inputs, experts_parity, relative, run_experts

pytestmark = pytest.mark.filterwarnings("ignore")


@each_value_once()
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (1, 1), (63, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, tokens: int, top_k: int) -> None:
    module = make_experts(**LAYOUTS[layout])
    found = experts_parity(module, experts_inputs(tokens, top_k))
    print(layout, found)
    assert found.holds, found
    assert (vars(module)[ATTRIBUTE].fused is None) == ("norm" in layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decoding_without_gradient(layout: str) -> None:
    module = make_experts(**LAYOUTS[layout])
    inputs = experts_inputs(tokens=1, top_k=2)
    expected = run_experts(module, "eager", inputs).output
    module.config._experts_implementation = "amoeba"
    with torch.inference_mode():
        assert relative(module(*inputs), expected) < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens(layout: str) -> None:
    module = make_experts(**LAYOUTS[layout])
    outcome = run_experts(module, "amoeba", experts_inputs(tokens=0, top_k=2))
    assert outcome.output.shape == (0, HIDDEN)
    assert all(gradient is not None and not gradient.any() for gradient in outcome.gradients.values())


@each_value_once()
@pytest.mark.parametrize("gate", [None, lambda self, h: torch.tanh(h.chunk(2, -1)[0]) + h.chunk(2, -1)[1]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sentinels_cost_nothing_and_get_no_gradient(layout: str, gate: Any) -> None:
    """What router-masking expert parallelism sends: id num_experts, weight 0, for slots of other ranks."""
    module = make_experts(gate, **LAYOUTS[layout])
    hidden_states, index, weights = experts_inputs(tokens=19, top_k=3)
    elsewhere = torch.rand(index.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    elsewhere[4] = True
    sent = (hidden_states, index.masked_fill(elsewhere, EXPERTS), weights.masked_fill(elsewhere, 0.0))
    ours, eager = run_experts(module, "amoeba", sent), run_experts(module, "eager", sent)
    assert_close(ours, eager, TOLERANCE)
    assert not ours.output[4].any()
    assert not ours.gradients["hidden_states"][4].any()
    assert not ours.gradients["top_k_weights"][elsewhere].any()


@each_value_once()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 17])
def test_all_to_all_calls(layout: str, rows: int) -> None:
    """What token-dispatch expert parallelism sends: one expert per row, unit weights; one dummy row for no rows."""
    module = make_experts(**LAYOUTS[layout])
    hidden_states, index, weights = experts_inputs(rows, top_k=1)
    if rows == 1:
        hidden_states, index = hidden_states[:0].sum(dim=0, keepdim=True), torch.zeros_like(index)
    found = experts_parity(module, (hidden_states, index, torch.ones_like(weights)))
    assert found.holds, found


def test_hidden_states_of_another_dtype_come_back_in_it() -> None:
    module = make_experts().bfloat16()
    hidden_states, index, weights = experts_inputs(tokens=5, top_k=2)
    with torch.no_grad():
        y = module(hidden_states, index, weights)
        assert y.dtype == torch.float32
        assert torch.equal(y, module(hidden_states.bfloat16(), index, weights).float())


def test_parametrised_weights_are_read_through_their_parametrisation() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module = make_experts()
    inputs = experts_inputs(tokens=5, top_k=2)
    module(*inputs)
    nn.utils.parametrize.register_parametrization(module, "gate_up_proj", Double())
    found = experts_parity(module, inputs)
    assert found.holds, found
    assert "parametrizations.gate_up_proj.original" in dict(module.named_parameters())


def test_quantised_weights_are_refused_by_name() -> None:
    module = make_experts()
    for name in ("gate_up_proj", "down_proj"):
        setattr(module, name, nn.Parameter(torch.zeros(getattr(module, name).shape, dtype=torch.uint8), False))
    with pytest.raises(ValueError, match=r"expert weights: expected fp64.*got torch.uint8.*dequantised"):
        module(*experts_inputs(tokens=5, top_k=2))


def test_what_a_module_holds_is_checked_in_its_first_call() -> None:
    module = make_experts(has_bias=True)
    module.down_proj_bias.data = module.down_proj_bias.data.double()
    with pytest.raises(ValueError, match=r"down_bias_EH: expected torch.float32.*got torch.float64"):
        module(*experts_inputs(tokens=5, top_k=2))
