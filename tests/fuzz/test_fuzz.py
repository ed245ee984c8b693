"""Some cases of the fuzzer in every run of the tests, and the proof that it sees what is wrong."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from amoeba import experts
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.precision.quantised_experts import dequantise_experts
from amoeba.proof.reference import experts as reference
from selection import each_value_once

from . import __main__ as command
from . import attempt as attempts
from . import ranks, router, runner, stores, worker
from . import shrink as shrinking
from .attempt import Outcome, attempt
from .case import FACTORS, FORMATS, LAYOUTS, RECIPES, Case, describe, draw
from .tensors import make
from .truth import rounding_noise, truth

SMALL = Case(
    seed=7,
    tokens=9,
    hidden=16,
    intermediate=24,
    experts=4,
    top_k=2,
    gate_up_bias=True,
    down_bias=True,
    ids="sentinels",
    ranks={"gate": 2, "up": 3, "down": 2},
    scaling=2.0,
    wanted=("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias", *FACTORS),
)


@each_value_once()
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("what", ["experts", "router", "ranks", "stores"])
def test_the_first_seeds_hold(what, seed):
    outcome = worker.attempt_case(what, worker.case_of(what, seed, "cpu", {}))
    assert outcome.verdict in ("passed", "refused"), outcome.reason


@pytest.mark.thorough
@pytest.mark.parametrize(("what", "cases"), [("experts", 400), ("router", 300), ("ranks", 400), ("stores", 200)])
def test_many_seeds_hold_in_a_process_of_their_own(what, cases):
    lines = []
    counts = runner.run(runner.Plan(what, seconds=300, most_cases=cases), lines.append)
    assert not counts.failures, "\n".join(lines)
    held = "refused" if what in ("ranks", "stores") else "passed"  # most of those are told different things or damaged
    assert counts.verdicts[held] > 0.6 * counts.cases


def test_the_fuzzer_sees_ranks_that_go_on_with_different_settings(monkeypatch):
    case = ranks.RanksCase(seed=0, ranks=3, differing=((1, "learning_rate", 0.05),))
    assert ranks.attempt(case).verdict == "refused"
    monkeypatch.setattr(ranks, "compare", lambda facts: [""] * len(facts))
    assert ranks.attempt(case) == Outcome("failed", "nobody noticed learning_rate")


def test_the_fuzzer_sees_a_damaged_store_that_is_used(monkeypatch):
    case = stores.StoreCase(seed=0, damage="foreign", file=0.15)
    assert stores.attempt(case).verdict == "refused"
    monkeypatch.setattr(stores, "_says", lambda store, device: (str(store),))
    assert stores.attempt(case).verdict == "failed"


@pytest.mark.parametrize("placement", ["cpu-bf16", "cpu-int8"])
def test_packed_experts_are_tried_and_not_refused(placement):
    case = dataclasses.replace(SMALL, dtype="bfloat16", placement=placement, wanted=("x", "weight", *FACTORS))
    assert attempt(case) == Outcome("passed", "")


@pytest.mark.parametrize("placement", FORMATS)
def test_many_rows_without_gradients_hold_in_every_format(placement):
    sizes = {"tokens": 199, "hidden": 64, "intermediate": 64, "experts": 4}
    outcome = worker.attempt_case("experts", Case(7, backend="cpu", placement=placement, mode="no_grad", **sizes))
    assert outcome.verdict == "passed", outcome.reason


@each_value_once()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("placement", FORMATS)
def test_quantising_what_a_case_draws_changes_no_number(placement, gated):
    """So the truth of such a case is that of its weights, and needs no decoder."""
    kind = "silu" if gated else "gelu"
    case = dataclasses.replace(SMALL, placement=placement, hidden=137, intermediate=150, kind=kind, gated=gated)
    made = make(case)
    found = dequantise_experts(attempts._weights(case, made))
    assert torch.equal(found.gate_up_EJH, made.tensors["gate_up"].detach())
    assert torch.equal(found.down_EHI, made.tensors["down"].detach())


@pytest.mark.parametrize("intermediate", [1, 2, 3])
def test_sums_of_a_few_numbers_in_int8_are_judged_by_its_own_rounding(intermediate):
    """Next to 0 they may be off by their own size and more, which is no fault: see tests/cpu/test_packed_experts.py."""
    for seed in range(20):
        sizes = {"tokens": 2, "hidden": 1 + seed % 4, "intermediate": intermediate}
        case = Case(seed, placement="cpu-int8", dtype="bfloat16", kind=("silu", "relu2", "gelu")[seed % 3], **sizes)
        assert attempt(case) == Outcome("passed", "")


@each_value_once("name")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["up_lora_a", "up_lora_b", "gate_up", "down"])
def test_rows_that_overlap_are_copied_or_refused_by_the_grouped_product(name, seed):
    """Which dimension has the stride 0 hangs on the seed. torch's own error came out of some."""
    case = dataclasses.replace(SMALL, seed=seed, backend="grouped", ranks={"up": 4}, layouts={name: "expanded"})
    assert attempt(case).verdict in ({"passed"} if "lora" in name else {"passed", "refused"})


class TestCases:
    def test_a_seed_is_always_the_same_case(self):
        one, other = make(draw(11)), make(draw(11))
        assert draw(11) == draw(11)
        assert torch.equal(one.tensors["x"], other.tensors["x"])
        assert one.tensors["down"].stride() == other.tensors["down"].stride()

    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_every_word_is_drawn(self, device):
        drawn = [draw(seed, device) for seed in range(3000)]
        assert {layout for case in drawn for layout in case.layouts.values()} == set(LAYOUTS) - {"plain"}
        words = {
            "placement": {"resident", "cpu-bf16", "cpu-int8", *FORMATS, *RECIPES},
            "nodes": {1, 2, 3},
            "dtype": {"float64", "float32", "bfloat16", "float16"},
            "kind": {"silu", "gelu", "gelu_tanh", "relu", "relu2"},
            "ids": {"distinct", "any", "one", "sentinels", "nobody", "duplicates"},
            "scales": {"plain", "zeros", "negative", "huge", "tiny"},
            "mode": {"grad", "no_grad", "inference_mode", "autocast", "checkpoint"}
            | ({"side_stream", "cuda_graph"} if device == "cuda" else set()),
        }
        assert {name: {getattr(case, name) for case in drawn} for name in words} == words
        assert {0, 1} <= {case.tokens for case in drawn}
        assert {1, 700} <= {case.experts for case in drawn}

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_writing_next_to_a_tensor_is_seen(self, layout):
        case = dataclasses.replace(SMALL, layouts={"down": layout})
        made = make(case)
        assert made.touched() == []
        memory, _ = made._memory["down"]
        memory.view(-1)[-1] = 3.0
        assert made.touched() == ["down"]


class TestTruth:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"kind": "relu2", "gated": False, "ranks": {"up": 3}},
            {"alpha": 1.702, "limit": 3, "up_shift": 1.0, "interleaved": True},
            {"kind": "gelu_tanh", "ids": "duplicates"},
        ],
        ids=["gated", "plain", "clamped", "duplicates"],
    )
    def test_two_truths_agree(self, changes):
        """The loop here and the reference of the package, which knows nothing of it."""
        case = dataclasses.replace(SMALL, dtype="float64", scale_dtype="float64", **changes)
        made = make(case)
        named = {name: tensor.detach() for name, tensor in made.tensors.items()}
        biases = named["gate_up_bias"], named["down_bias"]
        weights = ExpertWeights(named["gate_up"], named["down"], *biases, case.activation)
        factors = {name: tensor for name, tensor in named.items() if "lora" in name}
        problem = named["x"], made.expert_TK, named["weight"], weights, LoraFactors(**factors, scaling=case.scaling)
        other = {"output": reference.experts_forward(*problem)} | reference.experts_backward(made.dy_TH, *problem)
        for name, found in truth(case, made).items():
            torch.testing.assert_close(found, other[name], rtol=1e-10, atol=1e-10)

    def test_noise_is_of_the_size_of_a_rounding(self):
        case = dataclasses.replace(SMALL, dtype="bfloat16")
        made = make(case)
        exact = truth(case, made)
        for name, moved in rounding_noise(case, made).items():
            assert 1e-4 < moved / float(exact[name].norm()) < 2e-2, name


def _off_in_one_row(y_TH):
    wrong_TH = y_TH.clone()
    wrong_TH[0] *= 1.01
    return wrong_TH


class TestItSeesWhatIsWrong:
    """Each of these is `experts` with one thing wrong, on a case that holds otherwise."""

    @pytest.fixture
    def reason(self, monkeypatch):
        def reason_of(wrong, **changes):
            case = dataclasses.replace(SMALL, **changes)
            assert attempt(case) == Outcome("passed")
            monkeypatch.setattr(attempts, "experts", wrong)
            outcome = attempt(case)
            assert outcome.verdict == "failed"
            return outcome.reason

        return reason_of

    @pytest.mark.parametrize("name", ["x", "weight"])
    def test_a_gradient_that_is_a_little_off(self, reason, name):
        def wrong(x_TH, routing, weights, **others):
            x_TH = x_TH.view_as(x_TH)
            routing = dataclasses.replace(routing, weight_TK=routing.weight_TK.view_as(routing.weight_TK))
            given = x_TH if name == "x" else routing.weight_TK
            given.register_hook(lambda gradient: gradient * 1.001)
            return experts(x_TH, routing, weights, **others)

        assert reason(wrong).startswith(f"{name}: off by")

    @pytest.mark.parametrize("name", ["gate_up", "down_bias"])
    def test_an_expert_without_rows_that_gets_a_gradient(self, reason, name):
        def wrong(x_TH, routing, weights, **others):
            field = {"gate_up": "gate_up_EJH", "down_bias": "down_bias_EH"}[name]
            tensor = getattr(weights, field)
            given = tensor.view_as(tensor)
            given.register_hook(lambda gradient: gradient + 1e-12)
            return experts(x_TH, routing, dataclasses.replace(weights, **{field: given}), **others)

        assert "not zero for a expert without rows" in reason(wrong, ids="one", recompute=True)

    def test_an_output_that_is_off_in_one_row(self, reason):
        assert reason(lambda *given, **others: _off_in_one_row(experts(*given, **others))).startswith("output: off by")

    def test_an_output_in_another_dtype(self, reason):
        assert "torch.float64 (9, 16)" in reason(lambda *given, **others: experts(*given, **others).double())

    def test_an_output_with_uninitialised_numbers(self, reason):
        def wrong(*given, **others):
            y_TH = experts(*given, **others)
            return torch.where(torch.arange(y_TH.shape[0])[:, None] == 3, torch.empty_like(y_TH), y_TH)

        assert "not finite" in reason(wrong, ids="distinct")

    @pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
    def test_a_number_that_is_not_finite_and_is_lost(self, reason, bad):
        wrong = lambda *given, **others: experts(*given, **others).nan_to_num()  # noqa: E731
        assert "that are not finite were lost" in reason(wrong, nan="gate_up", bad=bad, ids="distinct", top_k=4)

    def test_an_input_that_is_written_to(self, reason):
        def wrong(x_TH, routing, weights, **others):
            y_TH = experts(x_TH, routing, weights, **others)
            weights.gate_up_bias_EJ.data.mul_(2)  # of which autograd knows nothing
            return y_TH

        assert "gate_up_bias: was written to" in reason(wrong)

    def test_other_bits_the_second_time(self, reason):
        calls = iter((1.0, 1.0 + 2e-7))
        wrong = lambda *given, **others: experts(*given, **others) * next(calls)  # noqa: E731
        assert reason(wrong, repeats=True) == "output: other bits the second time"

    @pytest.mark.parametrize(
        "error", [AssertionError(), RuntimeError("a.stride(0) != 1"), ValueError("no"), KeyError(3)]
    )
    def test_an_exception_in_other_words_than_ours(self, reason, error):
        def wrong(*given, **others):
            raise error

        assert type(error).__name__ in reason(wrong)

    def test_the_router_with_a_token_that_goes_to_the_wrong_expert(self, monkeypatch):
        case = router.RouterCase(3, tokens=7, experts=8, top_k=2)
        assert router.attempt(case) == Outcome("passed")
        right = router.route

        def wrong(logits_TE, *given, **others):
            return right(logits_TE + torch.eye(7, 8) * 1e-2, *given, **others)

        monkeypatch.setattr(router, "route", wrong)
        assert router.attempt(case).verdict == "failed"


class TestRunner:
    def test_a_worker_that_dies_is_a_failure_and_the_next_one_goes_on(self, monkeypatch):
        script = textwrap.dedent("""
            import itertools, json, os, signal, sys
            for seed in itertools.count(int(sys.argv[1])):
                begun = {"seed": seed, "row": "here", "case": f"seed={seed}"}
                print(json.dumps(begun), flush=True)
                if seed == 2:
                    os.kill(os.getpid(), signal.SIGSEGV)
                print(json.dumps(begun | {"verdict": "passed", "reason": ""}), flush=True)
        """)

        def start(plan, seed):
            command = [sys.executable, "-c", script, str(seed)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)

        monkeypatch.setattr(runner, "_start", start)
        said = []
        counts = runner.run(runner.Plan(seconds=60, most_cases=6), said.append)
        assert counts.failures == [(2, "the process died of SIGSEGV")]
        assert (counts.cases, counts.rows["here"]) == (6, 5)
        assert "--case 2" in said[1]

    @pytest.mark.thorough
    def test_the_command_that_runs_a_case_again(self):
        command = [sys.executable, "-m", "tests.fuzz", "--case", "0", "--set", "tokens=3", "--set", 'mode="no_grad"']
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        environment = os.environ | {"PYTHONPATH": os.path.join(root, "src")}
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert "tokens=3" in ended.stdout and "mode=no_grad" in ended.stdout
        assert ended.returncode == 0, ended.stdout + ended.stderr


def test_a_case_is_made_as_simple_as_it_still_fails(monkeypatch):
    monkeypatch.setattr(shrinking, "apart", lambda case, attempt: attempt(case))

    def fails(case):
        broken = case.tokens >= 3 and case.layouts.get("down") == "expanded"
        return Outcome("failed", "here") if broken else Outcome("passed")

    case = dataclasses.replace(SMALL, layouts={"x": "sliced", "down": "expanded"}, mode="checkpoint")
    simple, outcome = shrinking.shrink(case, fails)
    assert outcome.reason == "here"
    assert describe(simple) == "seed=7 tokens=3 layouts={'down': 'expanded'}"


def test_a_run_in_which_nothing_was_checked_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seconds", "0"])
    assert command.main() == 1
    assert "nothing was checked" in capsys.readouterr().out
