"""`peers`, its kernels in Triton's interpreter over real processes that share memory: rows, counters, capacity.

Where there is a GPU, two processes share it instead.
"""

import logging
from dataclasses import replace

import pytest
import torch

import rank_jobs
from amoeba import ExpertWeights, Routing, experts
from amoeba.core.phase_timer import watch_phases
from amoeba.kernels import peer_context as peer_post
from amoeba.kernels import peer_rows
from amoeba.parallel import Owners, Ranks, ShardedExperts
from amoeba.parallel.processes import LocalRanks, first_processes
from amoeba.parallel.transports import choice, peers, shmem
from amoeba.parallel.transports import peers as places
from amoeba.parallel.transports.symmetric_buffer import symmetric_buffer_of
from amoeba.proof.cases import SILU, Case
from amoeba.proof.over_ranks import DividedCase, Share, check_divided, compute_share, joined, shares, whole

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="is interpreted only where there is no GPU")
EVERYTHING = Case(23, 4, SILU, True, "sentinels", num_experts=10, lora="all", rank=5)


@interpreted
@pytest.mark.parametrize(
    ("ranks", "divided"),
    [
        (2, DividedCase(EVERYTHING, (23, 0), transport="peers")),
        (3, DividedCase(Case(23, 1, pattern="all_on_one", num_experts=2), (4, 0, 19), transport="peers")),
    ],
    ids=["everything, a rank without tokens", "all on one expert, a rank without experts"],
)
def test_every_gradient_is_right_and_has_the_bits_of_one_process(processes, ranks, divided):
    errors, unequal = check_divided(divided, torch.float32, processes, ranks)
    assert max(errors.values()) < 1e-6 and not unequal


@interpreted
def test_steps_with_changing_token_counts_have_the_bits_of_collective(processes: LocalRanks) -> None:
    """The heap grows, cells are used again, and rows that were there before are not read."""
    steps = [(3, 5), (40, 0), (5, 70), (0, 0), (2, 1)]
    for equal, _ in processes.run(rank_jobs.peers_as_collective, [(rank, 2, steps) for rank in range(2)]):
        assert len(equal) == 5 * len(steps) and all(equal)


@interpreted
@pytest.mark.parametrize(("local_backend", "steps"), [("triton", [(3, 5)]), ("eager", [(3, 5), (6, 0), (0, 0)])])
def test_rows_that_travel_while_own_ones_are_computed_change_no_bit(processes, local_backend, steps):
    """Also with a backend that waits for all rows, and without tokens on one rank or on both."""
    jobs = [(rank, 2, steps, local_backend) for rank in range(2)]
    for equal, _ in processes.run(overlapped, jobs):
        assert len(equal) == 5 * len(steps) and all(equal)


@interpreted
@pytest.mark.parametrize(
    ("count", "options", "steps"),
    [
        (2, {}, [(3, 5)]),
        pytest.param(2, {"overlap": True}, [(3, 5), (0, 4)], marks=pytest.mark.thorough),
        pytest.param(3, {"most_tokens": 6, "most_rows": 40}, [(2, 0, 6)], marks=pytest.mark.thorough),
    ],
    ids=["as they come", "overlapped", "three ranks, fixed room"],
)
def test_sums_that_go_straight_to_their_rank_have_the_same_bits(processes, count, options, steps):
    for equal, _ in processes.run(straight, [(rank, count, steps, options) for rank in range(count)]):
        assert len(equal) == 5 * len(steps) and all(equal)


@interpreted
@pytest.mark.parametrize("most", [{}, {"most_tokens": 20, "most_rows": 60}], ids=["as they come", "fixed room"])
def test_ranks_that_do_not_reach_each_others_memory_have_the_same_bits(processes: LocalRanks, most: dict) -> None:
    """By `shmem`, with files in place of NVSHMEM."""
    steps = [(3, 5), (20, 0), (0, 0), (2, 1)]
    for equal, _ in processes.run(remote, [(rank, 2, steps, most) for rank in range(2)]):
        assert len(equal) == 5 * len(steps) and all(equal)


@interpreted
def test_with_a_fixed_capacity_too_many_tokens_are_refused(processes: LocalRanks) -> None:
    jobs = [(rank, 2, steps, 9, 20) for rank in range(2) for steps in [[(3, 5)], [(3, 5), (9, 0), (1, 2)]]]
    once, often = (processes.run(with_capacity, [jobs[at], jobs[at + 2]]) for at in range(2))
    for (equal, talked), (also_equal, talked_often) in zip(once, often, strict=True):
        assert all(equal + also_equal)
        assert talked_often <= talked  # the first time they agreed, and made room
    for said in processes.run(too_many, [(rank, {"most_tokens": 5}) for rank in range(2)]):
        assert said.startswith("x_TH: expected at most most_tokens=5 tokens; got 7")


@interpreted
def test_too_many_rows_are_refused_with_the_numbers() -> None:
    with rank_jobs.started(2) as processes:  # which cannot go on afterwards
        both = processes.run(too_many, [(rank, {"most_rows": 3}) for rank in range(2)])
    chosen_TK = rank_jobs.tokens()[1].expert_TK
    slots = [2 * int((chosen_TK < 3).sum()), 2 * int((chosen_TK >= 3).sum())]  # rank 0 owns three experts of five
    for rank, said in enumerate(both):
        asked = f"expected room for all slots with an expert of rank {rank}, {slots[rank]} in exchange 1; got 3."
        assert said.startswith(f"most_rows: {asked}")


def overlapped(rank: int, count: int, steps: list[tuple[int, ...]], local_backend: str) -> tuple[list[bool], int]:
    return rank_jobs.peers_as_collective(rank, count, steps, local_backend, overlap=True)


@pytest.mark.thorough
@interpreted
@pytest.mark.parametrize(
    "options", [{"overlap": True, "straight": False}, {"straight": True}], ids=["overlapped", "straight"]
)
def test_rows_of_a_recomputed_pass_are_not_taken_for_gradients(processes, options):
    """Checkpointing runs forward again only up to the last tensor that it saved."""
    for equal in processes.run(checkpointed, [(rank, options) for rank in range(2)]):
        assert all(equal)


def checkpointed(rank: int, options: dict) -> list[bool]:
    return rank_jobs.with_and_without_checkpointing(
        rank, 2, last=True, transport="peers", local_backend="triton", **options
    )


@interpreted
@pytest.mark.parametrize(
    "options",
    [{"straight": True}, pytest.param({"overlap": True, "straight": False}, marks=pytest.mark.thorough)],
    ids=["straight", "overlapped"],
)
def test_unused_gradients_are_not_sent(processes, options):
    for equal, left in processes.run(some_gradients, [(rank, options) for rank in range(2)]):
        assert len(equal) == 4 and all(equal)
        assert not left


def some_gradients(rank: int, options: dict) -> tuple[list[bool], list[str]]:
    """Whether passes of which not all gradients are asked for have the same bits; and what was sent and not taken."""
    layer = replace(rank_jobs.sharded_layer(2, transport="peers"), local_backend="triton", **options)
    x_TH, routing = rank_jobs.tokens()
    of = {"x": [x_TH], "routing": [routing.weight_TK], "weights": list(layer.local.tensors()[:2])}
    found, left = [], []
    for have, asked in (({"x", "weights"}, {"weights"}), ({"routing"}, {"routing"}), ({"x", "weights"},) * 2):
        for name, tensors in of.items():
            for tensor in tensors:
                tensor.requires_grad_(name in have)
        y_TH = experts(x_TH, routing, layer)
        wanted = [tensor for name, tensors in of.items() if name in asked for tensor in tensors]
        found.append([y_TH, *torch.autograd.grad(y_TH, wanted, torch.ones_like(y_TH))])
        left += [f"{channel} after {have}, {asked}" for channel in _left_in_the_heap(layer)]
    (y_TH, *of_weights), (y_again_TH, _), (y_at_last_TH, _, *of_weights_again) = found
    pairs = [(y_TH, y_again_TH), (y_TH, y_at_last_TH), *zip(of_weights, of_weights_again, strict=True)]
    return [torch.equal(*pair) for pair in pairs], left


def _left_in_the_heap(layer: ShardedExperts) -> list[str]:
    """Names of channels of which not all that has arrived here was taken."""
    layer.ranks.gather([0], torch.device("cpu"), "all to be done")
    context = symmetric_buffer_of(layer.ranks, torch.device("cpu")).checked()
    size = 2 * len(peer_post.NAMES) * context.count
    counters = context.heaps[context.rank][: 8 * size].view(torch.int64).view(2, -1, context.count)
    parts = torch.tensor([context.pushers, context.takers]).view(2, 1)
    whole = (counters[..., 1 - context.rank] == context.epochs * parts).all(0)
    return [name for name, is_whole in zip(peer_post.NAMES, whole, strict=True) if not is_whole]


def straight(rank: int, count: int, steps: list[tuple[int, ...]], options: dict) -> tuple[list[bool], int]:
    """If sums went straight in each forward and backward, and phases were told in their order."""
    from amoeba.kernels import peer_sums

    sent, send_sums = [], peer_sums.send_sums
    with pytest.MonkeyPatch.context() as patch, watch_phases(torch.device("cpu")) as phases:
        patch.setattr(peer_sums, "send_sums", lambda *given: sent.append(given) or send_sums(*given))
        found = rank_jobs.peers_as_collective(rank, count, steps, "triton", straight=True, **options)
    told = [name for name, _ in phases.ms()]
    in_order = ["ids: taken", "rows: own ones copied", "sums: sent", "sums: added", "sums: own ones"]
    if options.get("overlap"):  # own ones are read where they lie
        in_order.remove("rows: own ones copied")
    good = len(sent) == 2 * len(steps) and sorted(in_order, key=told.index) == in_order
    return found if good else ([False], 0)


def remote(rank: int, count: int, steps: list[tuple[int, ...]], most: dict[str, int]) -> tuple[list[bool], int]:
    return rank_jobs.peers_as_collective(rank, count, steps, by="shmem", **most)


@interpreted
def test_buffers_of_a_training_pass_have_as_many_rows_as_a_rank_owns(processes: LocalRanks) -> None:
    for room, owned, slots in processes.run(buffers, [(rank, True) for rank in range(2)]):
        assert owned <= room < owned + 128 < slots
    for room, *_ in processes.run(buffers, [(rank, False) for rank in range(2)]):
        assert room is None  # the host was not told, and the GPU not waited for


def buffers(rank: int, gradients: bool) -> tuple[int | None, int, int]:
    return rank_jobs.rows_of_buffers(rank, gradients)


def with_capacity(
    rank: int, count: int, steps: list[tuple[int, ...]], most_tokens: int, most_rows: int
) -> tuple[list[bool], int]:
    return rank_jobs.peers_as_collective(rank, count, steps, most_tokens=most_tokens, most_rows=most_rows)


def too_many(rank: int, most: dict[str, int]) -> str:
    return rank_jobs.too_many_for_peers(rank, **most)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["peers", "collective"])
def test_processes_that_share_a_gpu_have_the_gradients_of_one(transport: str) -> None:
    divided = DividedCase(EVERYTHING, (20, 0, 3), transport=transport)
    with LocalRanks(3) as processes:
        parts = processes.run(on_gpu, [(share,) for share in shares(divided, torch.float32, 3)])
        (alone,) = processes.run(on_gpu, [(whole(divided, torch.float32),)])
    for name, found in joined(divided, parts, 3).items():
        if name in ("output", "inference", "x"):
            torch.testing.assert_close(found, alone[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found, alone[name]), name


@pytest.mark.gpu
def test_on_a_gpu_overlap_and_direct_sums_change_no_bit() -> None:
    """In bf16 and with tiles of own rows alone, so that products run in two parts."""
    with LocalRanks(2) as processes:
        for equal in processes.run(overlapped_on_gpu, [(rank,) for rank in range(2)]):
            assert len(equal) == 20 and all(equal)


def overlapped_on_gpu(rank: int) -> list[bool]:
    """Whether output and gradients have the bits of a pass that waits for all rows and sends sums row by row."""
    generator = torch.Generator("cuda").manual_seed(rank)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16() / 8

    local = ExpertWeights(drawn(2, 256, 256).requires_grad_(), drawn(2, 256, 128).requires_grad_())
    layer = ShardedExperts(local, Owners.even(4, 2), Ranks(first_processes(2), 30.0), transport="peers")
    tokens = (900, 1300)[rank]
    expert_TK = torch.rand(tokens, 4, generator=generator, device="cuda").topk(2, 1).indices
    x_TH, weight_TK, dy_TH = drawn(tokens, 256), drawn(tokens, 2).float(), drawn(tokens, 256)
    wanted = [x_TH.requires_grad_(), weight_TK.requires_grad_(), *local.tensors()[:2]]
    found = []
    for overlap, straight in ((False, False), (False, True), (True, False), (True, True), (True, True)):
        way = replace(layer, overlap=overlap, straight=straight)
        y_TH = experts(x_TH, Routing(expert_TK, weight_TK), way)
        found.append([y_TH, *torch.autograd.grad(y_TH, wanted, dy_TH)])
    return [torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True)]


def on_gpu(share: Share) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.cuda() for name, tensor in share.tensors.items()}
    found = compute_share(share._replace(tensors=tensors, expert_TK=share.expert_TK.cuda()))
    return {name: tensor.cpu() for name, tensor in found.items()}


def test_auto_says_what_it_chose_and_why_not_what_is_faster(monkeypatch, caplog):
    cpu, alone = torch.device("cpu"), rank_jobs.owners_of_one().ranks
    assert peers.TRANSPORT.why_not(alone, cpu) is None or torch.cuda.is_available()
    with caplog.at_level(logging.INFO, "amoeba"):
        transport, refused = choice.choose_transport("auto", alone, cpu)
    assert "by collective, torch's all_to_all, by gloo or NCCL; peers is for GPUs; x is on cpu" in caplog.text
    assert transport is not None and transport.name == "collective"
    assert refused == dict.fromkeys(("peers", "shmem"), "is for GPUs; x is on cpu")
    told = shmem.TRANSPORT.why_not_by_itself(torch.device("cuda"))
    assert told == "has not been tested between machines: select it by name, or with AMOEBA_REMOTE_RANKS=1"
    with monkeypatch.context() as context:
        context.setenv("AMOEBA_REMOTE_RANKS", "1")
        assert shmem.TRANSPORT.why_not_by_itself(torch.device("cuda")) is None
        forced = "needs ranks that can access each other's memory; AMOEBA_REMOTE_RANKS=1 says that they cannot"
        assert peers.TRANSPORT.why_not(alone, cpu) == forced
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert peers.TRANSPORT.why_not(alone, cpu) == "needs GPUs (or TRITON_INTERPRET=1, to try it); x is on cpu"
    between = places._why_not(["boot1 here ", "boot1 here ", "boot2 there "], cpu)
    assert between == "needs all ranks on one machine; rank 0 is on here, rank 2 on there"
    assert places._why_not(["boot1 here "] * 3, cpu) is None


@pytest.mark.parametrize(
    ("share_of", "got"),
    [
        (["50", "50", ""], None),
        (["", "", ""], "none, none"),
        (["50", "", ""], "50, none"),
        (["60", "50", ""], "60, 50"),
    ],
)
def test_nvshmem_is_refused_where_it_would_end_ranks_that_share_a_gpu(share_of: list[str], got: str | None) -> None:
    reason = shmem.why_not_on_shared_gpus(["boot here gpu0", "boot here gpu0", "boot here gpu1"], share_of)
    assert (reason is None) == (got is None)
    if reason is not None:
        assert reason.endswith(
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of at most 50 for each of the 2 ranks that share one; got {got}"
        )


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (["boot1 here gpu1", "boot1 here gpu2", "boot1 here gpu1"], [True, False, True]),
        (["boot1 here gpu1", "boot2 there gpu1"], [False, False]),
    ],
    ids=["two of three", "each its own"],
)
def test_a_gpu_is_shared_where_another_rank_is_on_the_same_one(monkeypatch, told, expected):
    """Only there do products have several programs for each multiprocessor."""
    monkeypatch.setattr(places, "places", lambda ranks, device: told)
    found = []
    for rank in range(len(told)):
        ranks = rank_jobs.owners_of_one().ranks
        ranks.rank, ranks.count = rank, len(told)
        found.append(places.shares_its_gpu(ranks, torch.device("cuda", 0)))
        assert not places.shares_its_gpu(ranks, torch.device("cpu"))
    assert found == expected
    assert not places.shares_its_gpu(rank_jobs.owners_of_one().ranks, torch.device("cuda", 0))


@interpreted
def test_sums_are_nan_after_a_wait_in_vain_so_that_nobody_goes_on_with_them() -> None:
    """The host may have enqueued more by then: it looks again when the ranks next exchange something."""
    (layer,), addresses = torch.zeros(1, 4096, dtype=torch.uint8).split(1), torch.empty(1, dtype=torch.int64)
    addresses[0] = layer.data_ptr()
    places, numbers = torch.tensor([[0], [0], [3]]), [torch.zeros(size, dtype=torch.int64) for size in (4, 1, 7)]
    at, sizes, _ = peer_post.heap_layout(1, 3, 2, 8)
    context = peer_post.PeerContext(addresses, *numbers, at, sizes, tokens=16, rank=0, count=1, seconds=1.0)
    plan, rows_RH, goes_WT = peer_post.Plan(places, places, 3, 3), torch.rand(3, 2), torch.ones(1, 3, dtype=torch.uint8)
    assert torch.equal(peer_rows.add_rows(context, plan, peer_post.SUMS, rows_RH, goes_WT), rows_RH)
    context.trouble.fill_(1)
    assert peer_rows.add_rows(context, plan, peer_post.SUMS, rows_RH, goes_WT).isnan().all()
