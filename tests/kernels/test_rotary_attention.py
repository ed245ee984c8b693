"""Attention from a joined projection, one operator: against dense attention in fp64, and on a GPU beside transformers'
own layer.

T tokens · Q query heads · G key and value heads · D of a head
"""

import copy
from typing import Any

import pytest
import torch
from row_checks import error, random
from test_attention import dense, ends_of, visible
from test_norm_rotate import rotated
from torch import Tensor

from amoeba.ops import rotary_attention as module
from amoeba.ops.rotary_attention import rotary_attention
from selection import each_value_once

EPS = 1e-6
# the interpreter multiplies no bf16; in fp16 numbers are rounded twice more than in attention alone
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CASES = {  # lengths of documents, Q, G, D, window
    "groups of heads": ((37, 1, 30), 4, 2, 64, None),
    "one key head, a window": ((21, 20), 3, 1, 64, 7),
    "size 128": ((33,), 2, 2, 128, None),
}
NAMES = "dqkv", "dq_weight", "dk_weight"


def problem(device: torch.device, dtype: torch.dtype, name: str) -> tuple[list[Tensor], Tensor, Tensor, dict[str, Any]]:
    lengths, heads, key_heads, size, window = CASES[name]
    tokens = sum(lengths)
    qkv = random(device, dtype, tokens, (heads + 2 * key_heads) * size)
    weights = [1 + 0.3 * random(device, dtype, size), 1 + 0.3 * random(device, dtype, size, 1)[:, 0]]
    angle = torch.arange(tokens)[:, None] * 10000 ** (-torch.arange(size // 2) / (size // 2))
    tables = [torch.cat([wave, wave], 1).to(device, dtype) for wave in (angle.cos(), angle.sin())]
    dy = random(device, dtype, tokens, heads, size)
    options = {"query_heads": heads, "eps": EPS, "scale": size**-0.5, "window": window}
    return [qkv, *weights, *tables], ends_of(lengths).to(device), dy, options


def results(given: list[Tensor], ends: Tensor, dy: Tensor, options: dict[str, Any], call: Any = rotary_attention):
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    y = call(*leaves, *given[3:], ends, **options)
    return {"y": y.detach()} | dict(zip(NAMES, torch.autograd.grad(y, leaves, dy), strict=True))


def truth(given: list[Tensor], name: str, dy: Tensor) -> dict[str, Tensor]:
    lengths, heads, _, size, window = CASES[name]
    wide = [each.double().cpu() for each in given]
    leaves = [each.requires_grad_() for each in wide[:3]]
    tokens = leaves[0].shape[0]
    qk = rotated(leaves[0], (leaves[1], leaves[2]), *wide[3:], heads, EPS)
    v = leaves[0][:, qk.shape[1] * size :].reshape(tokens, -1, size)
    seen = visible(lengths, tokens, -1 if window is None else window)
    y = dense(qk[:, :heads], qk[:, heads:], v, seen, size**-0.5)
    gradients = torch.autograd.grad(y, leaves, dy.double().cpu())
    return {"y": y.detach()} | dict(zip(NAMES, gradients, strict=True))


def check(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: error(got[name].cpu(), expected[name]) for name in expected}
    print(errors)
    assert max(errors.values()) < tolerance, errors


@each_value_once()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_dense_attention(device, name, dtype):
    if device.type == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16  # fp32 of the attention's products is TF32 there
    given, ends, dy, options = problem(device, dtype, name)
    got = results(given, ends, dy, options)
    check(got, truth(given, name, dy), TOLERANCE[dtype])
    again = results(given, ends, dy, options)
    assert all(torch.equal(got[name], again[name]) for name in got)


def test_the_operator_passes_opcheck_and_compiles_in_one_piece(device):
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    given, ends, dy, options = problem(device, dtype, "groups of heads")
    leaves = [each.clone().requires_grad_() for each in given[:3]]
    flat = options["query_heads"], EPS, options["scale"], -1
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.amoeba.rotary_attention.default, (*leaves, *given[3:], ends, *flat), test_utils=checks
    )
    torch._dynamo.reset()
    compiled = torch.compile(rotary_attention, backend="aot_eager", fullgraph=True)
    expected = results(given, ends, dy, options)
    got = results(given, ends, dy, options, compiled)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_only_what_needs_a_gradient_gets_one(device):
    given, ends, dy, options = problem(device, torch.float16, "groups of heads")
    expected = results(given, ends, dy, options)
    qkv = given[0].clone().requires_grad_()
    y = rotary_attention(qkv, *given[1:], ends, **options)
    assert torch.equal(torch.autograd.grad(y, qkv, dy)[0], expected["dqkv"])
    weight = given[2].clone().requires_grad_()
    y = rotary_attention(*given[:2], weight, *given[3:], ends, **options)
    assert torch.equal(torch.autograd.grad(y, weight, dy)[0], expected["dk_weight"])


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "scale", "reason"),
    [
        (4, 2, 64, 0.1, None),
        (4, 2, 80, 0.1, "supports heads of size 64 and 128"),
        (4, 3, 64, 0.1, "cannot be divided"),
        (4, 2, 64, 0.0, "scale"),
    ],
)
def test_what_the_kernels_do_not_serve(heads, key_heads, size, scale, reason):
    found = module.why_not_shape(torch.empty(3, 8), heads, key_heads, size, scale)
    assert found is None if reason is None else reason in found
    assert "at least one token" in module.why_not_shape(torch.empty(0, 8), 4, 2, 64, 0.1)
    assert "CUDA" in module.why_not(torch.empty(3, 8), 4, 2, 64, 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_of_transformers_on_a_gpu(size, shared):
    """Against the layer in fp64: errors as small as its own in bf16, and no bit from one run to the next."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeRotaryEmbedding

    from amoeba.integrations.fused_attention import NAME, fused_attention

    config = transformers.Qwen3MoeConfig(
        hidden_size=256, head_dim=size, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512
    )
    rows, length = 3, 200
    torch.manual_seed(0)
    layer: Any = Qwen3MoeAttention(config, 0).cuda().train()
    with torch.no_grad():
        layer.q_norm.weight.normal_(1.0, 0.3)
        layer.k_norm.weight.normal_(1.0, 0.3)
    layer = layer.bfloat16()
    x = random(torch.device("cuda"), torch.bfloat16, rows, length, 256)
    dy = random(torch.device("cuda"), torch.bfloat16, rows, length, 256, 1)[..., 0]
    positions = torch.arange(length, device="cuda")[None].expand(1 if shared else rows, -1)
    ends = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
    documents = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}

    def run(layer: Any, attention: str, **options: Any) -> dict[str, Tensor]:
        config._attn_implementation = layer.config._attn_implementation = attention
        layer.zero_grad()
        dtype = layer.q_proj.weight.dtype
        hidden = x.to(dtype, copy=True).requires_grad_()
        tables = Qwen3MoeRotaryEmbedding(config).cuda()(hidden, positions)
        y, _ = layer(hidden_states=hidden, position_embeddings=tables, attention_mask=None, **options)
        y.backward(dy.to(dtype))
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        return {"y": y.detach(), "hidden": hidden.grad} | gradients

    expected = {name: found.double().cpu() for name, found in run(copy.deepcopy(layer).double(), "sdpa").items()}
    own = {name: error(found.cpu(), expected[name]) for name, found in run(layer, NAME, **documents).items()}
    with fused_attention(layer) as found:
        assert found.layers == 1
        assert module.why_not(x, 8, 2, size, 0.1) is None
        got, again = run(layer, NAME, **documents), run(layer, NAME, **documents)
    errors = {name: error(each.cpu(), expected[name]) for name, each in got.items()}
    print(errors, own)
    assert all(errors[name] < 1.5 * own[name] + 1e-3 for name in errors)
    assert all(torch.equal(got[name], again[name]) for name in got)
