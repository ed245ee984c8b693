"""The router and the question behind it in one launch: the ids, weights, slots and words of the two launches.

E experts · K experts per token · S slots · H hidden

With a GPU all of this runs on it. What it compiles to for Hopper is seen without one, in a process of its own (this
file as a program), since Triton's interpreter cannot compile.
"""

import json
import re

import pytest
import torch
from compiling import compile_as, compiled_by, figures
from test_expert_request import RING, mailbox_of
from torch import Tensor

from amoeba.core.config import RouterConfig
from amoeba.kernels.expert_request import empty_routed, request_experts, route_and_request, why_not
from amoeba.kernels.mailbox import (
    COMPUTED,
    COMPUTES,
    LATER,
    MOVED,
    PROMOTED,
    HostComputeBuffer,
    answer_length,
)
from amoeba.kernels.router import router_forward
from selection import each_value_once

E, S, H = 16, 5, 6

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

CONFIGS = {
    "renormalised": RouterConfig(E, 3),
    "sigmoid": RouterConfig(E, 4, score="sigmoid", renormalize=False),
    "groups and a bias": RouterConfig(E, 4, score="sigmoid", n_group=4, topk_group=2, selection_bias=True),
    "top-k first": RouterConfig(E, 2, score="topk_softmax"),
}


def buffer_of(device: torch.device, tokens: int, ids: int) -> HostComputeBuffer:
    def mapped(count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda")

    words = [mapped(1, torch.int32) for _ in range(2)]
    numbers = [mapped(tokens * H, torch.float32) for _ in range(2)]
    return HostComputeBuffer(
        numbers[0], mapped(ids, torch.int64), mapped(ids, torch.float32), words[0], numbers[1], words[1]
    )


@each_value_once()
@pytest.mark.parametrize("hands", [False, True], ids=["moved", "handed over"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_router_and_then_the_question(name: str, tokens: int, hands: bool, device) -> None:
    config, generator = CONFIGS[name], torch.Generator().manual_seed(tokens)
    ids = tokens * config.top_k
    logits_TE = torch.randn(tokens, E, generator=generator).to(device)
    bias_E = torch.randn(E, generator=generator).to(device) if config.selection_bias else None
    x_TH = torch.randn(tokens, H, generator=generator).to(device)
    chosen_TK, expected_TK, _ = router_forward(logits_TE, config, bias_E, scores=False)
    wanted = sorted({*chosen_TK.flatten().tolist()})
    here = {expert: slot for slot, expert in enumerate(wanted[1 : 1 + S])}  # the others miss
    missing = [expert for expert in wanted if expert not in here]
    slot_of = {expert: 2 * S + at for at, expert in enumerate(missing)}
    about = MOVED
    if hands:  # one is computed and stays where it is, another one is promoted
        slot_of[missing[0]] = COMPUTED
        slot_of |= {expert: LATER + slot for expert, slot in slot_of.items() if expert in missing[1:2]}
        about = MOVED | COMPUTES | (PROMOTED if len(missing) > 1 else 0)

    def outcome(fused: bool) -> list:
        mailbox, buffer = mailbox_of(device, 5, ids, E), buffer_of(device, tokens, ids) if hands else None
        shown = torch.full((E + 4 * S + E,), -1, dtype=torch.int32)
        for expert, slot in here.items():
            shown[expert], shown[E + slot] = slot, expert
        shown, due = shown.to(device), mailbox.state[1:2].clone()
        most, row = answer_length(E, ids), mailbox.answers[6 % RING]
        row[0], row[1], row[2] = 6, len(slot_of), about
        for at, (expert, slot) in enumerate(slot_of.items()):
            row[3 + at], row[3 + most + at] = expert, slot
        mailbox.state[1] = 6  # copies have arrived
        if fused:
            expert_TK, weight_TK, slot_TK = found_TK = empty_routed(tokens, config, device)
            route_and_request(
                logits_TE, config, bias_E, *found_TK, shown, mailbox, due, 1e-2, buffer, x_TH if hands else None
            )
        else:
            expert_TK, weight_TK = chosen_TK, expected_TK
            slot_TK = torch.empty_like(expert_TK)
            request_experts(expert_TK, slot_TK, shown, E, mailbox, due, 1e-2, buffer, x_TH, weight_TK)
        if device.type == "cuda":
            torch.cuda.synchronize()
        found = [expert_TK, weight_TK, slot_TK, shown, due, mailbox.state, mailbox.requests, mailbox.trouble]
        if buffer is not None:
            found += [buffer.x, buffer.expert, buffer.weight, buffer.arrived]
        return [each.cpu().clone() for each in found]

    fused, apart = outcome(fused=True), outcome(fused=False)
    for one, two in zip(fused, apart, strict=True):
        assert torch.equal(one, two)
    assert missing and not apart[7].any() and apart[5].tolist()[0] == 6


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_of_128_experts_all_is_that_of_the_two_launches(tokens: int, device) -> None:
    """All of them are there, and the host is told which were asked for."""
    experts, slots, seed = 128, 128, torch.Generator().manual_seed(tokens)
    config = RouterConfig(experts, 8)
    logits_TE = torch.randn(tokens, experts, generator=seed).to(device)
    chosen_TK, weight_TK, _ = router_forward(logits_TE, config, None, scores=False)
    slot_E = torch.randperm(slots, generator=seed)
    shown = torch.cat([slot_E, torch.argsort(slot_E)]).to(device, torch.int32)

    def outcome(fused: bool) -> list[Tensor]:
        mailbox = mailbox_of(device, 5, tokens * 8, experts)
        due = mailbox.state[1:2].clone()
        found = empty_routed(tokens, config, device)
        if fused:
            route_and_request(logits_TE, config, None, *found, shown, mailbox, due, 1e-2)
        else:
            found = chosen_TK, weight_TK, torch.empty_like(chosen_TK)
            request_experts(chosen_TK, found[2], shown, experts, mailbox, due, 1e-2)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return [each.cpu().clone() for each in (*found, shown, due, mailbox.state, mailbox.requests, mailbox.trouble)]

    fused, apart = outcome(fused=True), outcome(fused=False)
    names = ("experts", "weights", "slots", "shown", "due", "state", "requests", "trouble")
    different = [name for name, one, two in zip(names, fused, apart, strict=True) if not torch.equal(one, two)]
    assert not different
    assert torch.equal(fused[2], slot_E[fused[0]])


def test_passes_that_do_not_fit_say_why() -> None:
    assert why_not(8, RouterConfig(128, 8)) is None and why_not(2, RouterConfig(512, 8)) is None
    assert "longer" in why_not(9, RouterConfig(128, 8)) and "longer" in why_not(3, RouterConfig(256, 8))
    assert "last bits" in why_not(1, RouterConfig(128, 8, renormalize=False))
    assert "capacity" in why_not(1, RouterConfig(128, 8, capacity_factor=1.0))
    assert "this many" in why_not(1, RouterConfig(1024, 8))


@pytest.mark.thorough
def test_it_compiles_for_hopper_without_a_sum_that_follows_the_layout(tmp_path) -> None:
    """Rows are laid out otherwise than in the router. What is still a reduction adds up one number."""
    found = compiled_by(__file__, tmp_path)
    assert found["figures"]["local_accesses"] == found["figures"]["stack_bytes"] == 0
    assert found["sums"] == found["sums of the router"] == ["1"]
    # ids and weights, a barrier, and then as test_expert_request.py has it: the row, the fence, the serial
    assert re.search(r"store (store )*barrier .*(store )+barrier fence store store ", " ".join(found["order"]))


def main() -> dict[str, object]:
    from amoeba.kernels import expert_request as module
    from amoeba.kernels import router
    from amoeba.kernels.constants import Group
    from amoeba.kernels.index_export import sizes

    config = RouterConfig(128, 8)
    of_router = router.forward_constants(config)
    constants = {"EXPERTS": 128, "RING": 64, "ROW": 131, "MOST": 128, "ENTRIES": 16, **sizes(128, 8)}
    request = Group(**constants, HOST_COMPUTES=True, ON_GPU=True)
    groups = {"REQUEST": request, "ROUTER": of_router, "bias_E": None}
    apart_of = {"ROUTER": of_router, "bias_E": None, "scores_TE": None}
    types = dict.fromkeys(("expert_N", "slot_N", "buffer_expert", "expert_TK"), "*i64")
    types |= dict.fromkeys(("limit", "N", "NUMBERS", "num_tokens"), "i32") | {"x_TH": "*bf16"}
    words = ("shown", "state", "due", "requests", "answers", "trouble", "times", "buffer_arrived")
    types |= dict.fromkeys(words, "*i32")
    numbers = ("logits_TE", "chosen_weight_N", "weight_N", "buffer_x", "buffer_weight", "weight_TK", "scores_TE")
    types |= dict.fromkeys(numbers, "*fp32")

    def compiled(kernel, constants: dict, warps: int):
        own = {name: types[name] for name in kernel.arg_names if name not in constants}
        return compile_as(kernel, own, constants, num_warps=warps)

    def sums(code) -> list[str]:
        """How many numbers each reduction of floats adds up."""
        reduction = r'"tt.reduce"[^\n]*axis = 1[^\n]*\n[^\n]*\n[^\n]*arith.addf.*?\(tensor<\d+x(\d+)xf32'
        return re.findall(reduction, code.asm["ttgir"], re.DOTALL)

    fused = compiled(module._request.kernel, groups | {"TILE_ROWS": 1}, 1)
    tile = router._tile(128)
    apart = compiled(
        router._forward.kernel, apart_of | {"TILE_ROWS": tile["TILE_ROWS"], "OVERLAP": False}, tile["num_warps"]
    )
    kinds = {"st.global": "store", "fence.acq_rel.sys": "fence", "bar.sync": "barrier"}
    found = re.findall("|".join(re.escape(each) for each in kinds), fused.asm["ptx"])
    return {
        "order": [kinds[each] for each in found],
        "sums": sums(fused),
        "sums of the router": sums(apart),
        "figures": figures(fused),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
