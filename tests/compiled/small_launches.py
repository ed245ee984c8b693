"""Launches of the kernels around the products, for test_other_gpus.py: routing, LoRA factors, attention's heads, the
optimizer, streamed experts, rows between ranks; and `of_recipes`, the products of quantised operands in plain Triton.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

E, K, H, I = 128, 8, 2048, 768
Launches = dict[str, Callable[[], Any]]


def launches(dtype: torch.dtype) -> Launches:
    found = _of_routing(dtype) | _of_factors(dtype) | _of_streaming(dtype) | _of_ranks(dtype) | _of_the_optimizer(dtype)
    found |= _of_exact_mode(dtype)
    return found | (_of_heads(dtype) if dtype != torch.float32 else {})


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


ids = partial(empty, dtype=torch.int64)
words = partial(empty, dtype=torch.int32)
numbers = partial(empty, dtype=torch.float32)


def _of_exact_mode(dtype: torch.dtype) -> Launches:
    from amoeba.kernels import exact, exact_linear, rotate
    from amoeba.kernels.exact_attention import attention, seen_bounds
    from amoeba.kernels.exact_attention_backward import attention_backward

    found: Launches = {"exact product": lambda: exact.product(empty(1, 7, H, dtype=dtype), empty(1, H, I, dtype=dtype))}
    found["exact sum"] = lambda: exact.row_sum(numbers(7, 151936))
    found["exact softmax"] = lambda: exact.softmax(numbers(7, 151936))
    found["exact top_k"] = lambda: exact.top_k(numbers(7, E), K)
    heads, angles = (empty(1, count, 7, 128, dtype=dtype) for count in (32, 4)), empty(1, 7, 128, dtype=dtype)
    found["rotate"] = partial(rotate.rotate, *heads, angles, angles, backward=False)
    if dtype != torch.float32:
        weights, b = [empty(width, H, dtype=dtype) for width in (4096, 512, 512)], numbers(4096, 8)
        for rows in (1, 4096):
            x, low = empty(rows, H, dtype=dtype), numbers(rows, 8)
            found[f"exact linears {rows}"] = partial(exact_linear.linears, x, weights)
            found[f"exact linear {rows} with factors"] = partial(
                exact_linear.linear_with_factors, x, weights[0], low, b, 2.0
            )

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, softcap: float) -> None:
        seen = empty(2, 1, 600, 600, dtype=torch.bool)
        bounds = seen_bounds(seen)
        y, logsumexp = attention(q, k, v, sink, seen, bounds, 0.1, softcap)
        attention_backward(y, q, k, v, y, logsumexp, seen, bounds, 0.1, softcap)

    for count, size, width in ((32, 64, 64), (32, 128, 128), (4, 192, 128)):
        q, k, v = (empty(2, n, 600, each, dtype=dtype) for n, each in ((count, size), (4, size), (4, width)))
        found[f"exact attention {size}"] = partial(attend, q, k, v, empty(count, dtype=dtype), 0.0)
        found[f"exact attention {size} with a cap"] = partial(attend, q, k, v, None, 50.0)
    return found


def _of_routing(dtype: torch.dtype) -> Launches:
    from amoeba.core.config import RouterConfig
    from amoeba.kernels import combine, cross_entropy, router, router_balance

    found: Launches = {}
    configs = {"softmax of 128": RouterConfig(128, K), "of 512": RouterConfig(512, 10, renormalize=False)}
    configs["in groups"] = RouterConfig(256, K, score="sigmoid", n_group=8, topk_group=4, group_score="top2_sum")
    for name, config in configs.items():
        logits, scores = empty(4096, config.num_experts, dtype=dtype), numbers(4096, config.num_experts)
        chosen, weight, bias = ids(4096, config.top_k), numbers(4096, config.top_k), numbers(config.num_experts)
        found[f"router {name}"] = partial(router.router_forward, logits, config, bias)
        found[f"router's gradient {name}"] = partial(
            router.router_backward, chosen, weight, scores, weight, scores, logits, config, dtype
        )
    found["count of experts"] = lambda: router_balance.count_experts(ids(4096 * K), ids(513))
    found["entropy"] = lambda: router_balance.add_entropy(empty(4096, 512, dtype=dtype), ids(2), 1e-6)
    found["cross_entropy of a long row"] = lambda: cross_entropy.cross_entropy_(
        empty(64, 151936, dtype=dtype), ids(64), numbers(64), gradient=True
    )
    slots = words(4096, K)
    found["slot_gradient"] = lambda: combine.slot_gradient(numbers(4096 * K), slots, None, numbers(4096, K))
    found["combine 22"] = lambda: combine.combine(
        empty(4096 * 22, 7168, dtype=dtype), words(4096, 22), numbers(4096, 22), empty(4096, 7168, dtype=dtype),
        empty(4096, 7168, dtype=dtype),
    )  # fmt: skip
    return found


def _of_factors(dtype: torch.dtype) -> Launches:
    from amoeba.core.config import Activation
    from amoeba.core.weights import LoraFactors
    from amoeba.kernels.lora.join_factors import join_factors
    from amoeba.kernels.lora.lora_backward import lora_backward, widest_rank

    def pair(per_expert: int, rank: int) -> None:
        N, offs = E * per_expert, words(E)
        rows, order, weight = empty(N // K, H, dtype=dtype), words(N), numbers(N // K, K)
        _, sums = lora_backward(
            rows, empty(E, H, rank, dtype=dtype), empty(N, rank, dtype=dtype), offs, rank=rank, scaling=2.0,
            order_N=order, weight_TK=weight, top_k=K,
        )  # fmt: skip
        sums.write(numbers(E, H, rank))

    found: Launches = {}
    for rank in (16, 32, 128):
        if rank <= widest_rank(dtype):
            for per_expert in (24, 1024):
                found[f"thin pair {rank}, {per_expert}"] = partial(pair, per_expert, rank)
    a, b, down_a, down_b = numbers(E, 16, H), numbers(E, I, 16), numbers(E, 16, I), numbers(E, H, 16)
    factors = LoraFactors(a, b, a, b, down_a, down_b, scaling=2.0)
    found["joined factors"] = lambda: join_factors(factors, Activation(), dtype)
    return found


def _of_heads(dtype: torch.dtype) -> Launches:
    from amoeba.kernels.decode.linear import linear
    from amoeba.kernels.norm_rotate import norm_rotate, norm_rotate_backward_, norm_rotate_cached
    from amoeba.kernels.rms_norm import add_rms_norm

    x, table, head, cache = (empty(*shape, dtype=dtype) for shape in ((4, H), (4, 128), (128,), (4, 4, 512, 128)))
    found: Launches = {
        "linear": lambda: linear(x, empty(40 * 128, H, dtype=dtype), empty(40 * 128, dtype=dtype)),
        "add_rms_norm": lambda: add_rms_norm(x, x, empty(H, dtype=dtype), 1e-6),
        "norm_rotate_cached": lambda: norm_rotate_cached(
            empty(4, 40 * 128, dtype=dtype), head, head, table, table, cache, cache, ids(1), query_heads=32, eps=1e-6
        ),
    }
    for size in (64, 128, 256):
        qkv, weight = empty(4096, 40 * size, dtype=dtype), empty(size, dtype=dtype)
        given = qkv, weight, weight, *[empty(512, size, dtype=dtype)] * 2
        found[f"norm_rotate {size}"] = partial(norm_rotate, *given, query_heads=32, eps=1e-6)
        found[f"norm_rotate's gradient {size}"] = partial(norm_rotate_backward_, qkv, *given, query_heads=32, eps=1e-6)
    return found


def _of_streaming(dtype: torch.dtype) -> Launches:
    from amoeba.core.config import RouterConfig
    from amoeba.kernels.expert_request import add_computed, request_experts, route_and_request
    from amoeba.kernels.index_export import export_indices, to_slots
    from amoeba.kernels.mailbox import HostComputeBuffer, MailboxWords

    box = MailboxWords(words(3), words(64, 3 + E), words(64, 3 + 2 * E), words(1), words(64, 2))
    tokens = 8
    x, weight, shown = empty(tokens, H, dtype=dtype), numbers(tokens, K), words(2 * E)
    chosen, slots = ids(tokens, K), ids(tokens, K)
    sizes = numbers(tokens * H), ids(tokens * K), numbers(tokens * K), words(1), numbers(tokens * H), words(1)
    buffer = HostComputeBuffer(*sizes)
    return {
        "request": lambda: request_experts(chosen, slots, shown, E, box, words(1), 1.0),
        "request for the host": lambda: request_experts(chosen, slots, shown, E, box, words(1), 1.0, buffer, x, weight),
        "route and request": lambda: route_and_request(
            numbers(tokens, E), RouterConfig(E, K), None, chosen, weight, slots, shown, box, words(1), 1.0
        ),
        "add what was computed": lambda: add_computed(x, box, buffer, 1.0),
        "export": lambda: export_indices(chosen, words(E), slots, words(3 + E), 1),
        "to slots": lambda: to_slots(ids(4096, K), words(E), ids(4096, K)),
    }


def _of_ranks(dtype: torch.dtype) -> Launches:
    from amoeba.kernels import peer_copies, peer_rows, peer_sums
    from amoeba.kernels.peer_context import ROWS, SUMS, PeerContext, Plan, heap_layout
    from amoeba.tasks.triton.arrivals import Arrival, raise_flags

    tokens, ranks = 4096, 2
    at, sizes, _ = heap_layout(ranks, tokens, K, H * dtype.itemsize)
    peers = PeerContext(*(ids(4) for _ in range(4)), at, sizes, tokens=tokens, rank=0, count=ranks, seconds=600.0)
    places = slice(0, tokens), slice(tokens, 2 * tokens)
    plan = Plan(ids(3, ranks), ids(3, ranks), tokens, ranks * tokens, places)
    rows, comes = empty(ranks * tokens, H, dtype=dtype), empty(ranks * tokens, dtype=torch.uint8)
    own, goes = empty(tokens, H, dtype=dtype), empty(ranks, tokens, dtype=torch.uint8)
    sorted_rows, slot_row = empty(ranks * tokens * K, H, dtype=dtype), words(ranks * tokens, K)
    weight = numbers(ranks * tokens, K)
    return {
        "push ids": lambda: peer_rows.push_slots(
            peers, plan, ids(tokens, K), (ids(E + 1), ids(E + 1)), numbers(tokens, K), goes
        ),
        "take ids": lambda: peer_rows.take_slots(peers, plan, numbers(tokens, K), comes, most_rows=100),
        "push rows": lambda: peer_rows.push_rows(peers, plan.there, ROWS, own, goes),
        "take rows": lambda: peer_rows.take_rows(peers, plan, rows, comes),
        "add rows": lambda: peer_rows.add_rows(peers, plan, SUMS, rows, goes),
        "send sums": lambda: peer_sums.send_sums(peers, plan, sorted_rows, slot_row, weight, comes),
        "add sums": lambda: peer_sums.add_sums(peers, plan, sorted_rows, slot_row, weight, goes),
        "own sums": lambda: peer_sums.own_sums(peers, plan, sorted_rows, slot_row, own),
        "add to own sums": lambda: peer_sums.add_kept(peers, own, goes),
        "wait for room": lambda: peer_copies.wait_for_room(peers, ROWS),
        "raise flags": lambda: raise_flags(peers, 1, 4),
        "close": lambda: Arrival.close(SimpleNamespace(peers=peers, sender=None)),
    }


def _of_the_optimizer(dtype: torch.dtype) -> Launches:
    from amoeba.kernels import adamw
    from amoeba.kernels.adamw import sum_of_squares
    from amoeba.optim.torch_step import Coefficients

    if dtype == torch.float16:  # which nothing here trains in
        return {}
    coefficients = [0.5] * (len(Coefficients._fields) - 1) + [7]
    bf16, tables = dtype == torch.bfloat16, (ids(8, adamw.COLUMNS), words(8, 2))
    kinds = {"split": bf16, "gradient_bf16": bf16, "states_bf16": bf16}
    return {
        "adamw": lambda: adamw.update(*tables, numbers(1), coefficients, **kinds),
        "sum of squares": lambda: sum_of_squares(ids(8, 2), words(8, 2), bf16=bf16),
    }


def of_recipes() -> Launches:
    """By the format of weights: products with many and few rows, and what quantises their operands."""
    from amoeba.core.config import Activation
    from amoeba.kernels import quantise_blocks, quantised_gemm
    from amoeba.precision import formats
    from amoeba.precision.quantised import empty_quantised

    bf16, meta = partial(empty, dtype=torch.bfloat16), torch.device("meta")
    found: Launches = {}
    for row_format, format in (
        (formats.FP8_TRAINING_ROWS, formats.FP8_TRAINING),
        (formats.MXFP8_TRAINING_ROWS, formats.MXFP8_TRAINING),
        (formats.NVFP4_TRAINING_ROWS, formats.NVFP4_TRAINING),
    ):
        matrix, turned = (empty_quantised((E, *sizes), format, device=meta) for sizes in ((2 * I, H), (H, 2 * I)))
        for name, rows in (("many", E * 2000), ("few", E * 24)):
            x, out = empty_quantised((rows // K, H), row_format, device=meta), bf16(rows, 2 * I)
            found[f"{format.name} {name}"] = partial(
                quantised_gemm.multiply, x, matrix, words(E), out, order_N=words(rows), top_k=K
            )
        a = empty_quantised((4096, I), row_format, device=meta)
        found[f"{format.name} activated"] = partial(
            quantise_blocks.activate_and_quantise, bf16(4096, 2 * I), Activation(), a, words(E)
        )
        if format.scale != "fp32":
            found[f"{format.name} rows"] = partial(quantise_blocks.quantise_rows, bf16(4096, H), row_format)
            found[f"{format.name} weights"] = partial(
                quantise_blocks.quantise_weights, bf16(E, 2 * I, H), matrix, turned
            )
    return found
