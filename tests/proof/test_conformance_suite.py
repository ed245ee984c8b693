"""The suite itself: what its cases cover, how errors are measured, what `verify` says and in which order."""

import itertools
import math
import os
from typing import get_args

import pytest
import torch
from conformance_cases import CPU, PLACED, ROUNDED, one_of_each
from torch.nn import functional

from amoeba.core.weights import LORA_NAMES
from amoeba.placements import all_placements
from amoeba.proof import conformance
from amoeba.proof.cases import ACTIVATIONS, CLAMPED_SWIGLU, SCALING, Case, Lora, cases, example, most_telling_first
from amoeba.proof.conformance import (
    COMPOSED,
    backend_names,
    check,
    poisoned_memory,
    tolerance,
    verify,
    verify_case,
    worst,
)
from selection import quick

LIMITED = [case for case in cases() if math.isfinite(case.activation.limit)]
ONE_OF_EACH_LIMITED = one_of_each(LIMITED)


class TestTheCases:
    def test_names_are_distinct(self):
        for thorough in (False, True):
            names = [case.name for case in cases(thorough)]
            assert len(set(names)) == len(names)

    def test_lora_meets_every_activation_pattern_and_rank(self):
        for thorough, factors in ((False, {"all", "gate_up", "down", "up"}), (True, set(get_args(Lora)))):
            lora = [case for case in cases(thorough) if case.lora != "none"]
            assert {case.lora for case in lora} == factors - {"none"}
            assert {case.activation for case in lora} == set(ACTIVATIONS)
            assert {case.pattern for case in lora} >= {"random", "empty_experts", "all_on_one", "sentinels"}
            assert {case.rank for case in lora} >= {1, 5, 8}
            assert {(case.bias, case.frozen) for case in lora} == set(itertools.product((True, False), repeat=2))

    def test_patterns_are_what_they_say(self):
        def ids(pattern):
            return example(Case(199, 2, pattern=pattern), torch.float32).expert_TK

        assert set(ids("random").unique().tolist()) == set(range(8))
        assert {0, 7} & set(ids("empty_experts").unique().tolist()) == set()
        assert ids("all_on_one").unique().numel() == 1
        assert {8, 11, -1, 2**32 + 1} < set(ids("sentinels").unique().tolist())
        assert not ((ids("sentinels_alone") >= 0) & (ids("sentinels_alone") < 8)).any()

    @quick(lambda case: case in ONE_OF_EACH_LIMITED)
    @pytest.mark.parametrize("case", LIMITED, ids=lambda c: c.name)
    def test_no_rounding_carries_h_over_a_limit_and_many_are_clamped(self, case):
        inputs = example(case, torch.bfloat16).inputs
        for e in range(case.num_experts):
            product = inputs["x"] @ inputs["gate_up"][e].T
            h = product + inputs["gate_up_bias"][e] if case.bias else product.clone()
            for first, name in enumerate(("gate", "up")):
                if f"{name}_lora_a" in inputs:
                    columns = slice(first, None, 2) if case.activation.interleaved else slice(None)
                    low = SCALING * inputs["x"] @ inputs[f"{name}_lora_a"][e].T
                    update = low @ inputs[f"{name}_lora_b"][e].T
                    h[:, columns] += update
                    assert torch.equal(low.bfloat16().double(), low)
                    assert torch.equal(update.bfloat16().double(), update)
            if case.bias or case.num_tokens > 1:
                assert (h == case.activation.limit).any() != case.bias
            assert torch.equal(product.bfloat16().double(), product)
            assert torch.equal(h.bfloat16().double(), h)
            if case.num_tokens:
                assert 0.05 < (h > case.activation.limit).double().mean() < 0.4

    @quick(lambda case: case in ONE_OF_EACH_LIMITED or case.num_tokens < 10)
    @pytest.mark.parametrize("case", [c for c in cases() if c.has_kink and c.num_tokens], ids=lambda c: c.name)
    def test_int8_holds_x_and_gate_up_exactly_where_a_slope_jumps(self, case):
        inputs = example(case, torch.bfloat16).inputs
        for name in ("x", "gate_up"):
            step = inputs[name].abs().amax(-1, keepdim=True) / 127
            torch.testing.assert_close((inputs[name] / step).round() * step, inputs[name], rtol=1e-15, atol=0)


class TestTheMeasure:
    """The suite itself must notice what it is there to notice."""

    def error(self, found, truth, name="gate_up", dtype=torch.float32):
        return conformance.relative_error(
            name, torch.tensor(found, dtype=dtype), torch.tensor(truth).double(), torch.float32
        )

    def test_error_is_relative_in_the_l2_norm(self):
        assert self.error([[3.0, 4.0]], [[3.0, 5.0]]) == pytest.approx(1 / math.sqrt(34))

    def test_nan_and_inf_are_infinitely_wrong(self):
        assert self.error([[math.nan, 1.0]], [[0.0, 1.0]]) == math.inf
        assert self.error([[math.inf, 1.0]], [[0.0, 1.0]]) == math.inf

    def test_an_inactive_expert_has_a_gradient_of_exactly_zero(self):
        assert self.error([[1.0, 2.0], [0.0, 0.0]], [[1.0, 2.0], [0.0, 0.0]]) == 0
        assert self.error([[1.0, 2.0], [0.0, 1e-30]], [[1.0, 2.0], [0.0, 0.0]]) == math.inf

    def test_a_slot_of_nobodys_has_a_gradient_of_exactly_zero(self):
        assert self.error([[1.0, 1e-30]], [[1.0, 0.0]], name="weight") == math.inf

    def test_where_all_is_zero_only_zero_will_do(self):
        assert self.error([[0.0]], [[0.0]]) == 0
        assert self.error([[1e-30]], [[0.0]]) == math.inf

    def test_a_wrong_dtype_or_shape_is_an_error(self):
        with pytest.raises(TypeError, match=r"gate_up: expected torch.float32 \(1, 1\); got torch.float64 \(1, 1\)"):
            self.error([[0.0]], [[0.0]], dtype=torch.float64)
        with pytest.raises(TypeError, match=r"got torch.float32 \(1, 2\)"):
            self.error([[0.0, 0.0]], [[0.0]])

    def test_memory_is_really_poisoned(self):
        rows_NH, offs_E = torch.ones(9, 16), torch.tensor([3, 7], dtype=torch.int32)
        with poisoned_memory():
            assert torch.empty(3).isnan().all()
            assert torch.empty_like(rows_NH).isnan().all()
            assert rows_NH.new_empty(2, 2).isnan().all()
            assert torch.empty(2, dtype=torch.int64).unique().tolist() == [2**63 - 1]
            product = functional.grouped_mm(rows_NH, torch.ones(2, 16, 16), offs=offs_E)
        assert product[:7].isfinite().all()
        assert product[7:].isnan().all()

    def test_poisoning_restores_what_was_before_even_after_an_error(self):
        before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
        with pytest.raises(KeyError), poisoned_memory():
            raise KeyError
        after = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
        assert before == after
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with poisoned_memory():
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("backend", PLACED)
def test_placed_experts_have_one_tolerance_for_every_gradient(backend):
    clamped = Case(9, 2, CLAMPED_SWIGLU, bias=True, lora="all", rank=5)
    result = verify_case(clamped, backend, CPU, torch.bfloat16)
    if result.refused is not None:
        pytest.skip(result.refused)
    assert set(result.errors) == {"output", "inference", "x", "weight", *LORA_NAMES}
    as_resident = dict.fromkeys(("streamed", *ROUNDED), (1e-2, 1e-2))
    limits = {"cpu-int8": (3e-2, 5e-2), "cpu-int8-bf16": (3e-2, 1e-2), **as_resident}.get(backend, (5e-3, 1e-2))
    assert (tolerance(backend, torch.bfloat16, "output"), tolerance(backend, torch.bfloat16, "x")) == limits


def test_memory_is_poisoned_also_where_somebody_has_switched_that_off(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with conformance.poisoned_memory():
        assert torch.empty(1000).isnan().all()
    assert not torch.utils.deterministic.fill_uninitialized_memory


class TestVerify:
    def test_every_case_of_every_backend_gets_a_result_and_is_reported(self, monkeypatch):
        monkeypatch.setattr(conformance, "cases", lambda thorough: [Case(3, 2), Case(3, 2, recompute=True)])
        heard = []
        results = verify(CPU, [torch.float32], progress=heard.append)
        assert [check.done for check in heard] == list(range(len(results)))
        assert {check.total for check in heard} == {len(results)}
        assert [(check.backend, check.dtype, check.case.name) for check in heard] == [
            (result.backend, result.dtype, result.case) for result in results
        ]
        assert [result.backend for result in results] == [*backend_names(CPU)] * 2
        assert all(result.ok for result in results)
        assert [result.refused is not None for result in results if result.backend == COMPOSED] == [False, True]
        table = worst(results)
        # on a machine with a GPU the kernels run there, elsewhere in the interpreter
        elsewhere = {placement.name for placement in all_placements()} - {"streamed", *ROUNDED} | (
            {"triton"} if torch.cuda.is_available() else set()
        )
        assert set(table) == {(name, torch.float32) for name in backend_names(CPU) if name not in elsewhere}
        assert set(table["eager", torch.float32]) == {"output", "inference", "x", "weight", "gate_up", "down"}
        assert table["eager", torch.float32]["x"] == max(r.errors["x"] for r in results if r.backend == "eager")

    def test_a_backend_that_raises_is_a_failure_with_the_text(self, monkeypatch):
        def broken(*_, **__):
            raise RuntimeError("the kernel fell over")

        monkeypatch.setattr(conformance, "experts", broken)
        (result,) = verify_cases(monkeypatch, "eager")
        assert not result.ok
        assert result.failure == "RuntimeError: the kernel fell over"

    def test_a_wrong_number_is_named(self, monkeypatch):
        right = conformance.experts
        monkeypatch.setattr(conformance, "experts", lambda x, *args, **kw: right(x, *args, **kw) + 0.01 * x.detach())
        (result,) = verify_cases(monkeypatch, "eager")
        assert not result.ok
        assert set(result.out_of_tolerance) == {"output", "inference"}

    @pytest.mark.parametrize("frozen", [True, False])
    def test_every_factor_has_an_error_by_name_and_frozen_weights_have_none(self, frozen):
        result = verify_case(Case(9, 2, bias=True, lora="all", frozen=frozen), "eager", CPU, torch.float32)
        base = {"gate_up", "down", "gate_up_bias", "down_bias"}
        assert set(result.errors) == {"output", "inference", "x", "weight", *LORA_NAMES} | (set() if frozen else base)

    @pytest.mark.parametrize("name", LORA_NAMES)
    def test_a_wrong_factor_gradient_is_named(self, name, monkeypatch):
        right = conformance.experts

        def wrong(x, *args, lora, **kw):
            factor = getattr(lora, name)
            return right(x, *args, lora=lora, **kw) + 0.1 * (factor - factor.detach()).sum()

        monkeypatch.setattr(conformance, "experts", wrong)
        result = verify_case(Case(9, 2, lora="all"), "eager", CPU, torch.float32)
        assert set(result.out_of_tolerance) == {name}

    def test_an_unknown_backend_is_an_error_that_lists_the_known(self):
        with pytest.raises(
            ValueError, match=r"backend: expected one of .*eager.*, composed, cpu-bf16.*; got 'egaer'\. Leave backends"
        ):
            verify(CPU, [torch.float32], backends=["egaer"])


def verify_cases(monkeypatch, backend):
    monkeypatch.setattr(conformance, "cases", lambda thorough: [Case(3, 2)])
    return verify(CPU, [torch.float32], backends=[backend])


def test_the_order_of_the_short_form_loses_no_case_and_shows_much_at_once():
    chosen = cases()
    ordered = most_telling_first(chosen)
    assert sorted(map(str, ordered)) == sorted(map(str, chosen))
    early = ordered[:16]
    for name in ("activation", "bias", "pattern", "storage", "recompute", "narrow", "lora", "frozen"):
        values = {getattr(case, name) for case in chosen}
        few = {getattr(case, name) for case in early}
        assert len(few) >= min(3, len(values)), name
    assert set(check(ordered[0], "eager", CPU, torch.float32)) >= {*LORA_NAMES, "down_bias", "weight"}
    assert all(case.num_experts * case.hidden * case.intermediate < 2**18 for case in early[2:]), (
        "weights take time too"
    )


def test_without_time_every_backend_meets_a_case_that_it_serves():
    results = verify(CPU, [torch.bfloat16], ["eager", "fp8"], seconds=0)
    assert [(result.backend, result.refused is None) for result in results] == [
        ("eager", True),
        ("fp8", False),  # trains without factors
        ("fp8", True),
    ]


@pytest.mark.parametrize("before", [None, ":16:8"])
def test_poisoned_memory_leaves_the_environment_as_it_was(before, monkeypatch):
    """Ranks compare it."""
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with conformance.poisoned_memory():
        assert os.environ[name] == (before or ":4096:8")
    assert os.environ.get(name) == before
