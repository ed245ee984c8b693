"""The fused router against `amoeba.routing.route` in fp64: choice, weights, scores, and the gradient of the logits.

T tokens · K experts per token · E experts
"""

import math

import pytest
import torch

pytest.importorskip("triton")

from amoeba.core.config import RouterConfig
from amoeba.kernels import router as kernels
from amoeba.proof.reference.router import router_backward as reference_backward
from amoeba.routing import fused_router, load_balance_loss, route, z_loss
from amoeba.routing import router as routing_module
from amoeba.routing.fused_router import fused_route, why_not, why_not_shape
from selection import each_value_once, quick

# relative L2 error of fp32 against fp64; a GPU's exp rounds its argument once more
TOLERANCE = 3e-6 if torch.cuda.is_available() else 1e-6
ROUNDING = {torch.float32: TOLERANCE, torch.bfloat16: 4e-3, torch.float16: 5e-4}  # of gradients in the logits' dtype

CONFIGS = {
    "softmax": RouterConfig(128, 8),
    "softmax_not_renormalised": RouterConfig(12, 3, renormalize=False, scaling_factor=2.5),
    "softmax_biased": RouterConfig(63, 4, selection_bias=True),
    "softmax_biased_not_renormalised": RouterConfig(63, 4, renormalize=False, selection_bias=True),
    "sigmoid": RouterConfig(12, 3, score="sigmoid"),
    "sigmoid_not_renormalised": RouterConfig(199, 2, score="sigmoid", renormalize=False),
    "sigmoid_biased": RouterConfig(12, 3, score="sigmoid", selection_bias=True, scaling_factor=2.5),
    "topk_softmax": RouterConfig(32, 4, score="topk_softmax"),
    "topk_softmax_not_renormalised": RouterConfig(12, 3, score="topk_softmax", renormalize=False),
    "topk_softmax_biased": RouterConfig(32, 4, score="topk_softmax", selection_bias=True, scaling_factor=0.5),
    "every_expert": RouterConfig(8, 8),
    "every_expert_sigmoid": RouterConfig(5, 5, score="sigmoid"),
    "one_expert": RouterConfig(1, 1, renormalize=False),
    "first_choice_only": RouterConfig(16, 1, renormalize=False),
    "wide": RouterConfig(512, 16),
    "groups_top2": RouterConfig(
        256, 8, score="sigmoid", n_group=8, topk_group=4, selection_bias=True, scaling_factor=2.5
    ),
    "groups_max": RouterConfig(20, 4, renormalize=False, n_group=5, topk_group=2, group_score="max"),
    "groups_of_three": RouterConfig(12, 5, n_group=4, topk_group=3),
    "groups_of_one": RouterConfig(7, 2, n_group=7, topk_group=3),
    "three_groups_top2": RouterConfig(12, 4, score="sigmoid", n_group=3, topk_group=2),
    "groups_by_logits": RouterConfig(20, 4, score="topk_softmax", n_group=4, topk_group=2),
}
SIZES = (0, 1, 63)
# numpy, in the interpreter, is not used to infinities
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """What the kernels forget to write is seen."""
    empty = torch.empty

    def poisoned(*size, **kwargs):
        tensor = empty(*size, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


def inputs(config, num_tokens, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_TE = (2 * torch.randn(num_tokens, config.num_experts, generator=generator)).to(device, dtype)
    bias_E = torch.randn(config.num_experts, generator=generator).to(device) - 10 if config.selection_bias else None
    gradients = (
        torch.randn(num_tokens, config.top_k, generator=generator).to(device),
        torch.randn(num_tokens, config.num_experts, generator=generator).to(device),
    )
    return logits_TE, bias_E, *gradients


def relative_error(found, expected):
    assert found.shape == expected.shape
    assert found.isfinite().all()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def expected_of(logits_TE, config, bias_E):
    """The torch path, in fp64; bias in fp32 or not makes no difference to what is chosen here."""
    logits_TE = logits_TE.detach().double().requires_grad_()
    routing = route(logits_TE, config, bias_E=bias_E)
    return logits_TE, (routing.weight_TK, routing.scores_TE), routing.expert_TK


@by_config
def test_choice_weights_scores_and_gradients_equal_the_torch_path_in_fp64(config, device):
    for num_tokens in SIZES if config.num_experts < 200 or device.type == "cuda" else (0, 7):
        logits_TE, bias_E, *gradients = inputs(config, num_tokens, device)
        logits_TE.requires_grad_()
        expert_TK, *found = fused_route(logits_TE, config, bias_E)
        exact_TE, expected, expected_expert_TK = expected_of(logits_TE, config, bias_E)
        assert expert_TK.dtype == torch.int64
        assert torch.equal(expert_TK, expected_expert_TK)
        for name, ours, theirs in zip(("weight_TK", "scores_TE"), found, expected, strict=True):
            assert ours.dtype == torch.float32
            error = relative_error(ours, theirs)
            assert error < TOLERANCE, f"{name}: {error}"
        for names, used in (("weight", [0]), ("scores", [1]), ("weight and scores", [0, 1])):
            ours, theirs = (
                torch.autograd.grad([out[i] for i in used], leaf, [gradients[i].to(out[i]) for i in used], True)[0]
                for out, leaf in ((found, logits_TE), (expected, exact_TE))
            )
            if theirs.norm() > 1e-12:
                error = relative_error(ours, theirs)
                assert error < TOLERANCE, f"gradient through {names}: {error}"
            else:  # as with a single expert
                assert ours.abs().max() < 1e-6 if num_tokens else True


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["softmax", "sigmoid_biased", "topk_softmax", "softmax_not_renormalised"])
def test_half_precision_logits_are_routed_in_fp32(name, dtype, device):
    config = CONFIGS[name]
    logits_TE, bias_E, *gradients = inputs(config, 63, device, dtype)
    logits_TE.requires_grad_()
    expert_TK, *found = fused_route(logits_TE, config, bias_E)
    # equal logits are frequent here: the weights of another choice among equals are the same
    exact_TE, expected, _ = expected_of(logits_TE, config, bias_E)
    assert all(len(set(line)) == config.top_k for line in expert_TK.tolist())
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < TOLERANCE
    (found_TE,) = torch.autograd.grad(found[1], logits_TE, gradients[1], retain_graph=True)
    assert found_TE.dtype == dtype
    (expected_TE,) = torch.autograd.grad(expected[1], exact_TE, gradients[1].double())
    assert relative_error(found_TE, expected_TE) < ROUNDING[dtype]
    (found_TE,) = torch.autograd.grad(found[0], logits_TE, gradients[0])
    expected_TE = reference_backward(gradients[0].double(), logits_TE.detach().double(), expert_TK, config)
    assert relative_error(found_TE, expected_TE) < ROUNDING[dtype]


@each_value_once()
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("scaling_factor", [1.0, 2.5, 0.3])
def test_one_renormalised_choice_gives_the_router_a_gradient_of_exactly_zero(score, scaling_factor, device):
    config = RouterConfig(12, 1, score=score, scaling_factor=scaling_factor)
    logits_TE, _, dweight_TK, _ = inputs(config, 63, device)
    _, weight_TK, _ = fused_route(logits_TE.requires_grad_(), config, None)
    assert (weight_TK == torch.tensor(scaling_factor, device=device)).all()
    (found_TE,) = torch.autograd.grad(weight_TK, logits_TE, dweight_TK)
    assert (found_TE == 0).all()


def test_among_equals_the_lowest_id_comes_first(device):
    config = RouterConfig(12, 4)
    logits_TE = torch.zeros(3, 12, device=device)
    logits_TE[1, 7] = 1.0
    logits_TE[2, :6] = -0.0
    expert_TK, _, _ = fused_route(logits_TE, config, None)
    assert expert_TK.tolist() == [[0, 1, 2, 3], [7, 0, 1, 2], [0, 1, 2, 3]]
    grouped = RouterConfig(12, 4, n_group=4, topk_group=2)
    expert_TK, _, _ = fused_route(logits_TE, grouped, None)
    assert expert_TK.tolist() == [[0, 1, 2, 3], [7, 0, 1, 2], [0, 1, 2, 3]]


@each_value_once()
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
@pytest.mark.parametrize("n_group", [1, 4])
def test_different_experts_are_chosen_whatever_comes_in(score, n_group, device):
    config = RouterConfig(12, 6, score=score, n_group=n_group, topk_group=min(n_group, 2))
    strange = [math.nan, -math.nan, math.inf, -math.inf, 0.0, 1e38, -1e38]
    generator = torch.Generator().manual_seed(0)
    logits_TE = torch.tensor(strange)[torch.randint(0, len(strange), (63, 12), generator=generator)]
    logits_TE[0], logits_TE[1] = math.nan, -math.inf
    expert_TK, _, _ = fused_route(logits_TE.to(device), config, None)
    assert ((expert_TK >= 0) & (expert_TK < 12)).all()
    assert all(len(set(line)) == 6 for line in expert_TK.tolist())


def test_nan_counts_as_the_largest_number_whatever_its_sign(device):
    logits_TE = torch.tensor([[3.0, math.nan, math.inf, 0.0, -math.nan]], device=device)
    expert_TK, _, _ = fused_route(logits_TE, RouterConfig(5, 4, score="topk_softmax"), None)
    assert expert_TK.tolist() == [[1, 4, 2, 0]]


def test_scores_at_their_limits_are_weighted_as_by_torch(device):
    cases = (
        (RouterConfig(4, 2, selection_bias=True), [[300.0, 0.0, 0.0, 1.0]], [0.0, 0.0, 9.0, 9.5]),
        (RouterConfig(4, 2, score="sigmoid"), [[-45.0, -46.0, -60.0, -70.0]], None),
        (RouterConfig(4, 2, score="sigmoid"), [[-100.0, -101.0, -150.0, -170.0]], None),
        (RouterConfig(4, 2, score="sigmoid"), [[25.0, 24.0, 23.0, -70.0]], None),
    )
    for config, logits, bias in cases:
        logits_TE = torch.tensor(logits, device=device, requires_grad=True)
        bias_E = None if bias is None else torch.tensor(bias, device=device)
        expert_TK, weight_TK, _ = fused_route(logits_TE, config, bias_E)
        exact_TE, (expected_TK, _), expected_expert_TK = expected_of(logits_TE, config, bias_E)
        assert torch.equal(expert_TK, expected_expert_TK)
        assert relative_error(weight_TK, expected_TK) < 2e-5
        (found_TE,) = torch.autograd.grad(weight_TK[:, 0].sum(), logits_TE)
        (expected_TE,) = torch.autograd.grad(expected_TK[:, 0].sum(), exact_TE)
        assert relative_error(found_TE, expected_TE) < 2e-5


def test_logits_gradients_and_bias_may_have_any_strides(device):
    config = CONFIGS["sigmoid_biased"]
    logits_TE, bias_E, *gradients = inputs(config, 63, device)
    strided_TE = logits_TE.t().contiguous().t().requires_grad_()
    plain_TE = logits_TE.clone().requires_grad_()
    strided = fused_route(strided_TE, config, bias_E.double().repeat_interleave(2)[::2])
    plain = fused_route(plain_TE, config, bias_E)
    assert all(torch.equal(a, b) for a, b in zip(strided, plain, strict=True))
    turned = [gradient.t().contiguous().t() for gradient in gradients]
    found = [
        torch.autograd.grad(out[1:], leaf, grads)[0]
        for out, leaf, grads in ((strided, strided_TE, turned), (plain, plain_TE, gradients))
    ]
    assert torch.equal(*found)
    (found_TE,) = torch.autograd.grad(
        fused_route(plain_TE, config, bias_E)[1].sum(), plain_TE
    )  # a gradient of stride 0
    assert found_TE.isfinite().all()


# ---- the operator


OPERATOR_CONFIGS = [CONFIGS[name] for name in ("softmax_not_renormalised", "sigmoid_biased", "groups_of_three")]


@quick(lambda config: config == OPERATOR_CONFIGS[1])  # with a bias; groups are the kernel's affair
@pytest.mark.parametrize("config", OPERATOR_CONFIGS)
def test_the_operator_passes_opcheck(config, device):
    logits_TE, bias_E, *gradients = inputs(config, 9, device)
    operators, flat = torch.ops.amoeba, [getattr(config, name) for name in fused_router._FIELDS]
    torch.library.opcheck(operators.fused_router.default, (logits_TE.clone().requires_grad_(), bias_E, True, *flat))
    expert_TK, weight_TK, scores_TE = fused_route(logits_TE, config, bias_E)
    for given in (gradients, (gradients[0], None), (None, gradients[1])):
        saved = (*fused_router._keep((logits_TE, bias_E, True, *flat)), weight_TK, scores_TE, expert_TK)
        arguments = (*saved, *given, [True])
        torch.library.opcheck(operators.fused_router_backward.default, arguments)


@pytest.mark.parametrize("name", ["softmax", "softmax_not_renormalised", "sigmoid_biased"])
def test_scores_that_nobody_reads_are_neither_written_nor_kept(name, device):
    config = CONFIGS[name]
    logits_TE, bias_E, dweight_TK, _ = inputs(config, 9, device)
    found = []
    for scores in (True, False):
        leaf_TE = logits_TE.clone().requires_grad_()
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.shape) or x, lambda x: x):
            expert_TK, weight_TK, scores_TE = fused_route(leaf_TE, config, bias_E, scores=scores)
        found.append((expert_TK, weight_TK.detach(), *torch.autograd.grad(weight_TK, leaf_TE, dweight_TK)))
        without = not scores and config.renormalize
        assert (scores_TE.numel() == 0) == without
        rows = [shape for shape in kept if shape == logits_TE.shape]
        assert len(rows) == (not without) + (config.score == "sigmoid")
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@quick(lambda config: config == OPERATOR_CONFIGS[1])
@pytest.mark.parametrize("config", OPERATOR_CONFIGS)
def test_compiles_without_graph_breaks_and_gives_the_same_numbers(config, device):
    def step(logits_TE, bias_E):
        _, weight_TK, scores_TE = fused_route(logits_TE, config, bias_E)
        return weight_TK.square().sum() + scores_TE.sin().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_tokens in (63, 21):
        logits_TE, bias_E, *_ = inputs(config, num_tokens, device)
        logits_TE.requires_grad_()
        loss, expected = compiled(logits_TE, bias_E), step(logits_TE, bias_E)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, logits_TE), torch.autograd.grad(expected, logits_TE))


def test_a_second_derivative_is_refused(device):
    logits_TE = torch.randn(3, 12, device=device, requires_grad=True)
    _, weight_TK, _ = fused_route(logits_TE, RouterConfig(12, 3), None)
    (gradient,) = torch.autograd.grad(weight_TK.square().sum(), logits_TE, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def test_no_gradient_reaches_the_bias_and_an_unused_result_costs_no_gradient(device):
    config = CONFIGS["sigmoid_biased"]
    logits_TE, bias_E, *_ = inputs(config, 3, device)
    bias_E.requires_grad_()
    assert not fused_route(logits_TE, config, bias_E)[1].requires_grad
    expert_TK, weight_TK, scores_TE = fused_route(logits_TE.requires_grad_(), config, bias_E)
    assert not expert_TK.requires_grad
    (weight_TK.sum() + scores_TE.sum()).backward()
    assert bias_E.grad is None
    assert logits_TE.grad is not None


# ---- what it is not for, and its place in `route`


@pytest.mark.parametrize(
    ("dtype", "config", "reason"),
    [
        (torch.float64, RouterConfig(8, 2), "takes fp32, bf16 and fp16; these logits are torch.float64"),
        (torch.float32, RouterConfig(513, 2), "512 columns at most; these experts fill 1024"),
        (torch.float32, RouterConfig(288, 2, n_group=9, topk_group=2), None),
        (torch.float32, RouterConfig(297, 2, n_group=9, topk_group=2), "512 columns at most; these experts fill 1024"),
        (torch.float32, RouterConfig(297, 2, n_group=9, topk_group=9), None),
        (torch.float32, RouterConfig(32, 17), "16 at most; top_k is 17"),
        (torch.bfloat16, RouterConfig(512, 16), None),
    ],
)
def test_the_reason_for_a_refusal_is_said(dtype, config, reason):
    found = why_not_shape(dtype, config)
    assert found is None if reason is None else reason in found
    assert (fused_router.MAX_COLUMNS, fused_router.MAX_TOP_K) == (kernels.MAX_COLUMNS, kernels.MAX_TOP_K)
    assert fused_router.DTYPES == kernels.DTYPES
    if reason is None:
        assert kernels.columns(config) <= kernels.MAX_COLUMNS


def test_logits_elsewhere_than_on_a_gpu_are_left_to_torch():
    assert "these logits are on cpu" in why_not(torch.zeros(1, 8), RouterConfig(8, 2))


def test_route_takes_the_kernels_where_nothing_speaks_against_them(device, monkeypatch):
    config = RouterConfig(
        12, 4, score="sigmoid", n_group=4, topk_group=2, selection_bias=True, jitter=0.1, capacity_factor=0.7
    )
    logits_TE, bias_E, dweight_TK, _ = inputs(config, 63, device)
    calls = []

    def counted(*args):
        calls.append(args)
        return fused_route(*args)

    def step(refusal):
        monkeypatch.setattr(routing_module.fused_router, "why_not", lambda *_: refusal)
        leaf_TE = logits_TE.clone().requires_grad_()
        torch.manual_seed(5)
        routing = route(leaf_TE, config, bias_E=bias_E, training=True)
        loss = load_balance_loss(routing, 12) + z_loss(routing.logits_TE) + (routing.weight_TK * dweight_TK).sum()
        return routing, torch.autograd.grad(loss, leaf_TE)[0]

    monkeypatch.setattr(routing_module.fused_router, "fused_route", counted)
    expected, expected_gradient_TE = step("refused")
    assert not calls
    found, gradient_TE = step(None)
    assert len(calls) == 1
    assert (found.expert_TK == 12).any()
    for name in ("expert_TK", "chosen_TK", "logits_TE"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert relative_error(found.weight_TK, expected.weight_TK.double()) < TOLERANCE
    assert relative_error(found.scores_TE, expected.scores_TE.double()) < TOLERANCE
    assert relative_error(gradient_TE, expected_gradient_TE.double()) < TOLERANCE
