"""Experts over processes: every gradient, the bits of one process, and what others fell into."""

import copy
import itertools

import pytest
import torch

import amoeba
import rank_jobs
from amoeba import Request, Routing, experts
from amoeba.backends import eager, triton
from amoeba.backends.backend import Backend
from amoeba.core.problem import Problem
from amoeba.core.weights import LoraFactors
from amoeba.parallel import Owners, Ranks, ShardedExperts, shard_experts, shard_lora
from amoeba.parallel.processes import LocalRanks
from amoeba.parallel.sharded import is_own
from amoeba.precision.recipes import OF_ALL_TOKENS, SUMMARIES
from amoeba.proof.over_ranks import divided_cases, verify_divided
from called import call
from selection import each_value_once, quick
from small_layer import Layer


@quick(lambda ranks, dtype: (ranks, dtype) == (3, torch.bfloat16) or dtype.itemsize == 8)
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [*itertools.product([2, 3, 4], [torch.float32, torch.bfloat16]), (4, torch.float64), (4, torch.float16)],
)
def test_every_gradient_is_right_and_has_the_bits_of_one_process(processes, ranks, dtype):
    """In fp32, too: `verify --ranks 2`, below."""
    results = [verify_divided(case, dtype, processes, ranks) for case in divided_cases(ranks)]
    wrong = [f"{result.case}: {result.failure or result.out_of_tolerance}" for result in results if not result.ok]
    assert not wrong, "\n".join(wrong)
    assert sum(result.refused is None for result in results) >= 12


def test_verify_over_ranks_starts_its_own_processes_and_compares_bits():
    result = call("verify", "--ranks", "2", "--dtype", "float32", "--json")
    document = result.document
    row, *in_fp8 = document["backends"]
    assert document["ok"] and document["ranks"] == 2 and row["backend"] == "2 ranks" and row["cases_checked"] >= 12
    assert {"inference", "output", "x", "weight", "gate_up", "down_bias", "gate_lora_a"} <= set(row["worst"])
    recipes = SUMMARIES.keys() - {OF_ALL_TOKENS}
    assert {each["backend"] for each in in_fp8} == {f"2 ranks, {recipe}" for recipe in recipes}
    for each in in_fp8:  # with the tolerance of its recipe
        assert each["cases_checked"] and each["tolerance"]["gradients"] == (
            1e-2 if "nvfp4" in each["backend"] else 3e-3
        )
    assert "bitwise identical to one process" in result.stdout


@pytest.mark.parametrize("about", ["experts per token", "gradients"])
def test_ranks_that_disagree_all_say_so(processes: LocalRanks, about: str) -> None:
    said = processes.run(rank_jobs.disagree, [(rank, about) for rank in range(3)])
    assert len(set(said)) == 1
    value = "2 on rank 0, 3 on rank 1" if about == "experts per token" else "True on rank 0, False on rank 1"
    assert said[0].startswith(f"{about}: expected the same on all ranks of the group; got {value}")


def test_a_token_is_sent_once_to_a_rank_with_several_of_its_experts(processes: LocalRanks) -> None:
    sent = processes.run(rank_jobs.sizes_of_messages, [(0,), (1,)])
    assert sent[0][:2] == [("ids and routing weights", 7 * 2 * (4 + 4)), ("tokens", 7 * rank_jobs.H * 4)]
    assert sent[1][1] == ("tokens", 0) and sent[1][2] == ("sums of the experts", 7 * rank_jobs.H * 4)


def test_checkpointing_exchanges_again_also_on_a_rank_without_experts(processes: LocalRanks) -> None:
    for equal in processes.run(rank_jobs.with_and_without_checkpointing, [(rank,) for rank in range(4)]):
        assert equal == [True] * 4


def test_a_copied_model_trains_its_own_share() -> None:
    module = torch.nn.Module()
    module.placed = shard_experts(rank_jobs.owners_of_one().local)
    module.down = module.placed.local.down_EHI
    copied = copy.deepcopy(module)
    assert copied.down is copied.placed.local.down_EHI and copied.down is not module.down
    assert is_own(module.down) and is_own(copied.down)
    assert copied.placed.ranks is module.placed.ranks


def test_one_rank_is_the_local_backend_without_a_process_group() -> None:
    layer, (x_TH, routing) = rank_jobs.owners_of_one(), rank_jobs.tokens()
    assert torch.equal(experts(x_TH, routing, layer), experts(x_TH, routing, layer.local))
    assert amoeba.explain(Request(x_TH, routing, layer)).backend.name == "ranks"


class TestMostRows:
    """Buffers of sorted rows are as large as the rows that a rank owns, not as its tokens times K."""

    expert_TK = torch.tensor([[0, -1], [-1, 3], [-1, 9], [1, 3], [-1, -1]])  # four of ten slots have an expert

    def run(self, backend: str, most_rows: int | None, **options) -> list[torch.Tensor]:
        layer = Layer(rank=3, tokens=5, expert_TK=self.expert_TK)
        routing = Routing(self.expert_TK, layer.tensors["weight"], most_rows=most_rows)
        weights, lora = layer.weights(layer.tensors), layer.lora(layer.tensors)
        y_TH = experts(layer.tensors["x"], routing, weights, lora=lora, backend=backend, **options)
        return [y_TH, *torch.autograd.grad(y_TH, list(layer.tensors.values()), layer.dy_TH)]

    @each_value_once("backend")
    @quick(lambda most_rows, recompute: most_rows == (7 if recompute else 4))
    @pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
    @pytest.mark.parametrize("most_rows", [4, 7, 100])
    def test_results_have_the_same_bits(self, backend: str, most_rows: int, recompute: bool) -> None:
        expected = self.run(backend, None, recompute=recompute)
        for found, right in zip(self.run(backend, most_rows, recompute=recompute), expected, strict=True):
            assert torch.equal(found, right)

    @pytest.mark.parametrize("backend", [eager.BACKEND, triton.BACKEND], ids=["eager", "triton"])
    def test_what_is_saved_is_no_larger(self, backend: Backend) -> None:
        layer = Layer(tokens=5, expert_TK=self.expert_TK)
        given = layer.tensors["x"], self.expert_TK, layer.tensors["weight"], layer.weights(layer.tensors)
        with torch.no_grad():
            _, saved = backend.forward(Problem(*given, most_rows=4), "h")
        assert saved.h_NJ.shape[0] == saved.order_N.shape[0] == 4

    @pytest.mark.parametrize("name", ["eager", "triton"])
    def test_too_few_are_refused_and_nothing_is_dropped(self, name: str) -> None:
        with pytest.raises(ValueError, match=r"most_rows: expected at least as many as slots with an expert, 4; got 3"):
            self.run(name, 3)


def test_factors_of_all_experts_are_refused_and_those_of_the_share_are_taken() -> None:
    whole = rank_jobs.owners_of_one()
    two = object.__new__(Ranks)
    two.rank, two.count = 1, 2
    owners = Owners.even(rank_jobs.E, 2)
    local = amoeba.ExpertWeights(*(owners.take(tensor, 1) for tensor in whole.local.tensors()[:2]))
    layer = ShardedExperts(local, owners, two)
    lora = LoraFactors(down_lora_a=torch.zeros(5, 3, 24), down_lora_b=torch.zeros(5, 16, 3))
    with pytest.raises(ValueError, match=r"shapes \(2, R, 24\) and \(2, 16, R\)"):
        lora.check(layer)
    shard_lora(lora, layer).check(layer)


def test_tracing_and_unknown_words_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (x_TH, routing) = rank_jobs.owners_of_one(), rank_jobs.tokens()
    with pytest.raises(ValueError, match=r"tokens: expected own or same; got 'all'"):
        ShardedExperts(layer.local, layer.owners, layer.ranks, tokens="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"transport: expected one of auto, peers, shmem, collective; got 'pigeons'"):
        experts(x_TH, routing, ShardedExperts(layer.local, layer.owners, layer.ranks, transport="pigeons"))
    with pytest.raises(ValueError, match=r"local: expected the 5 experts that rank 0 owns; got 2 of them"):
        ShardedExperts(rank_jobs.ExpertWeights(*(t[:2] for t in layer.local.tensors()[:2])), layer.owners, layer.ranks)
    with pytest.raises(ValueError, match=r"owners among the 1 ranks of the group; got 2 ranks"):
        ShardedExperts(layer.local, Owners.even(5, 2), layer.ranks)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    reason = amoeba.explain(Request(x_TH, Routing(routing.expert_TK, routing.weight_TK), layer)).refused["ranks"]
    assert "torch.compile" in reason
