"""Every backend against the reference: all cases of `amoeba.proof.conformance`, every gradient by name.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import itertools
import math
import os
from dataclasses import fields
from typing import get_args

import pytest
import torch
from torch.nn import functional

import amoeba.stream.gpu.placement
import amoeba.stream.placement  # noqa: F401 - both register themselves
from amoeba import Activation, cpu_features
from amoeba.backends import grouped, registry
from amoeba.config import ActivationKind
from amoeba.placements import all_placements
from amoeba.proof import cases as cases_module
from amoeba.proof import conformance
from amoeba.proof.cases import (
    ACTIVATIONS,
    CLAMPED_SWIGLU,
    PLAIN_RELU2,
    SCALING,
    SILU,
    Case,
    Lora,
    Pattern,
    cases,
    example,
    most_telling_first,
)
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
from amoeba.weights import LORA_NAMES, ExpertWeights
from selection import quick

CPU = torch.device("cpu")
PLACED = [placement.name for placement in all_placements()]
# Each has a truth of its own, which takes longer than all else: tests/precision has a selection of cases for every run.
ROUNDED = [placement.name for placement in all_placements() if placement.represent is not None]


# Cases of which the GPU kernels need many, for their tiles; a CPU computes these of them.
FOR_THE_GPU = {case for case in cases() if case.num_tokens == 399} - {
    Case(399, 2, CLAMPED_SWIGLU, True, "sentinels", hidden=320, intermediate=192, storage="transposed", narrow=True),
    Case(399, 2, SILU, False, "empty_experts", 320, 192, recompute=True, lora="all", rank=64, frozen=True),
}
ON_THE_CPU = [case for case in cases() if case not in FOR_THE_GPU]


PROPERTIES = tuple(field.name for field in fields(Case))


def one_of_each(found, properties=PROPERTIES):
    """As few of them as have every value of every property that one of them has, most telling first."""
    seen, chosen = set(), []
    for case in most_telling_first(found):
        new = {(name, getattr(case, name)) for name in properties} - seen
        if new:
            seen |= new
            chosen.append(case)
    return chosen


def groups(chosen):
    """The cases in lots that are a test each; what a lot has in common is its name."""
    found = {}
    for case in chosen:
        activation = case.activation
        name = f"{activation.kind}-{'gated' if activation.gated else 'plain'}-T{case.num_tokens}-H{case.hidden}"
        name += f"-lora-{case.lora}" if case.lora != "none" else ""
        found.setdefault(name, []).append(case)
    return found


def parameters(device, dtypes, chosen):
    # the backend varies fastest: the truth of a case is computed once for all of them
    return [
        pytest.param(lot, backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}-{name}")
        for (name, lot), dtype in itertools.product(groups(chosen).items(), dtypes)
        for backend in backend_names(device)
        if (backend, device) != ("triton", CPU)  # that is the interpreter, which takes seconds a case: see below
        and (backend not in PLACED or dtype == torch.bfloat16)  # packed experts have no other
        and backend != "ranks"  # needs several processes: tests/parallel
    ]


def assert_proven(lot, backend, device, dtype, expected_refusals):
    """Fails with every case and every gradient that is out, next to those that are not."""
    if not lot:
        pytest.skip("no case of this lot is quick enough without instructions for bf16")
    results = [verify_case(case, backend, device, dtype) for case in lot]
    wrong = [
        f"{result.case}: {result.failure or ', '.join(f'{n}={e:.1e}' for n, e in result.errors.items())}"
        for result in results
        if not result.ok
    ]
    limits = [tolerance(backend, dtype, name) for name in ("output", "gradients")]
    assert not wrong, f"{backend} {dtype}, tolerance {limits}:\n" + "\n".join(wrong)
    refused = {result.refused for result in results if result.refused is not None}
    unexpected = [reason for reason in refused if not any(part in reason for part in expected_refusals)]
    assert not unexpected, f"{backend} {dtype} refused for reasons it should not have: {unexpected}"
    if all(result.refused is not None for result in results):
        pytest.skip(f"{backend} serves none of these: {'; '.join(sorted(refused))}")


# What a backend may refuse, by words of its reason. A refusal that is not listed here is a failure.
REFUSALS = {
    "cpu": ("takes fp32 and bf16", "computes on the CPU", "C++ core", "compiler", "cache folder", "compiled core"),
    "eager": (),
    "grouped": ("multiple of 16 bytes", "takes fp32 and bf16", "is bf16 only"),
    "triton": (),
    COMPOSED: ("nothing to recompute",),
    **dict.fromkeys(
        PLACED, ("computes in bfloat16", "takes x from", "C++ core", "compiler", "cache folder", "compiled")
    ),
    **dict.fromkeys(("fp8", "fp8-ste", "fp8-saved"), ("trains the experts themselves",)),
}


SHORT = set(one_of_each(ON_THE_CPU))
EAGER = "eager"  # as composed, torch's own operations for any dtype


def in_every_run(lot, backend, dtype):
    """All lots of the backend that has code of its own for most. The others meet each property's values."""
    all_of_them = backend == "cpu" and dtype == torch.float32
    return backend not in ROUNDED and (all_of_them or not SHORT.isdisjoint(lot))


@quick(in_every_run)
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(CPU, (torch.float32, torch.bfloat16), ON_THE_CPU))
def test_backend_agrees_with_the_reference(lot, backend, dtype, monkeypatch):
    prove_on_this_cpu(lot, backend, dtype, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(CPU, (torch.float32, torch.bfloat16), cases(True)))
def test_backend_agrees_with_the_reference_in_every_case(lot, backend, dtype, monkeypatch):
    prove_on_this_cpu(lot, backend, dtype, monkeypatch)


def prove_on_this_cpu(lot, backend, dtype, monkeypatch):
    # grouped leaves bf16 to eager on CPUs that only emulate it; it is proven all the same
    if backend == "grouped" and dtype == torch.bfloat16:
        lot = in_emulated_bf16(lot)
    monkeypatch.setattr(grouped, "has_bf16_instructions", lambda: True)
    assert_proven(lot, backend, CPU, dtype, REFUSALS[backend])


def in_emulated_bf16(lot):
    """The cases of few tokens, where torch emulates bf16: it takes a hundred times as long there."""
    return lot if cpu_features.has_bf16_instructions() else [case for case in lot if case.num_tokens <= 1]


RARER = torch.float64, torch.float16
IN_RARER = [case for case in ON_THE_CPU if (case.num_tokens, case.hidden) != (760, 208)]  # one so large is enough


@quick(lambda backend, dtype: (backend, dtype) not in ((EAGER, torch.float64), (COMPOSED, torch.float16)))
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(CPU, RARER, one_of_each(IN_RARER)))
def test_backend_agrees_in_the_rarer_dtypes(lot, backend, dtype):
    assert_proven(lot, backend, CPU, dtype, REFUSALS[backend])


@pytest.mark.thorough
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(CPU, RARER, cases()))
def test_backend_agrees_in_the_rarer_dtypes_at_length(lot, backend, dtype):
    assert_proven(lot, backend, CPU, dtype, REFUSALS[backend])


@quick(lambda backend, whole: backend == "cpu" and not whole)
@pytest.mark.parametrize("whole", [False, True], ids=["few", "all"])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "eager", COMPOSED])
def test_bf16_agrees_with_and_without_instructions_for_it(backend, native, whole, monkeypatch):
    """As the other kind of CPU computes them, and as this one does."""
    lot = ON_THE_CPU if whole else one_of_each(ON_THE_CPU)
    lot = in_emulated_bf16(lot) if native else lot
    monkeypatch.setattr(cpu_features, "has_bf16_instructions", lambda: native)
    assert_proven(lot, backend, CPU, torch.bfloat16, REFUSALS[backend])


# What Triton's interpreter computes of `triton`: each of the suite's subjects once, where the GPU computes them all.
# bf16 is missing: the interpreter multiplies it wrongly. A tile has 16 rows, or 64 where experts have more than 16.
_ODD = {"hidden": 31, "intermediate": 23}
_FEW = {"num_experts": 4}
INTERPRETED = {
    torch.float32: [
        Case(31, 2, bias=True, pattern="sentinels", **_FEW),
        Case(9, 2, Activation("gelu"), bias=True, pattern="zero_weights", **_FEW),
        Case(9, 2, Activation("gelu_tanh"), pattern="empty_experts", storage="transposed"),
        Case(9, 2, Activation("relu"), bias=True, pattern="sentinels", narrow=True, **_FEW),
        Case(9, 2, Activation("relu2"), bias=True, pattern="sentinels", recompute=True, **_FEW),
        Case(9, 2, Activation("silu", gated=False), bias=True, **_FEW),
        Case(9, 2, Activation("gelu", gated=False), bias=True, pattern="sentinels_alone", **_FEW),
        Case(9, 2, Activation("gelu", gated=False), bias=True, **_FEW),
        Case(9, 2, Activation("gelu", gated=False, limit=0.75), bias=True, **_FEW),
        Case(9, 1, Activation("gelu_tanh", gated=False), pattern="all_on_one", **_FEW),
        Case(9, 2, Activation("relu", gated=False), bias=True, pattern="sentinels", **_FEW, **_ODD),
        Case(9, 8, PLAIN_RELU2, pattern="sentinels"),
        Case(19, 2, CLAMPED_SWIGLU, bias=True, pattern="sentinels", **_FEW),
        Case(9, 2, Activation("silu", alpha=1.702, up_shift=-0.5), **_FEW),
        Case(0, 2),
        Case(0, 1, CLAMPED_SWIGLU, bias=True, recompute=True),
        Case(1, 1),
        Case(1, 8, CLAMPED_SWIGLU, bias=True, recompute=True),
        Case(3, 4, bias=True, pattern="sentinels", hidden=128, intermediate=64, **_FEW),  # several tiles of columns
        Case(63, 1, bias=True, pattern="all_on_one"),  # several tiles of 16 rows
        Case(65, 2, bias=True, pattern="empty_experts", **_FEW),  # and of 64; too many tokens to be decoded
        Case(17, 1, bias=True, num_experts=1),
        Case(9, 2, PLAIN_RELU2, recompute=True, storage="transposed", narrow=True, **_FEW, **_ODD),
        Case(9, 2, bias=True, pattern="sentinels", lora="all", rank=5, **_FEW),
        Case(9, 2, CLAMPED_SWIGLU, True, "empty_experts", lora="all", rank=1, frozen=True),
        Case(9, 2, PLAIN_RELU2, pattern="sentinels", recompute=True, lora="all", rank=8, **_FEW),
        Case(9, 2, CLAMPED_SWIGLU, storage="transposed", lora="all", rank=5, **_FEW, **_ODD),
        Case(17, 1, bias=True, pattern="all_on_one", lora="down", rank=5, frozen=True, **_FEW),
        Case(3, 2, pattern="sentinels_alone", lora="all", **_FEW),
        Case(1, 2, lora="gate_up", rank=5, frozen=True, **_FEW),
        Case(0, 2, lora="all"),
    ],
    torch.float16: [
        Case(1, 8, bias=True),
        Case(9, 2, Activation("gelu_tanh"), bias=True, pattern="sentinels", narrow=True, **_FEW),
        Case(9, 2, PLAIN_RELU2, bias=True, pattern="sentinels", storage="transposed", **_FEW, **_ODD),
        Case(9, 2, CLAMPED_SWIGLU, bias=True, pattern="sentinels", lora="all", rank=5, **_FEW),
    ],
}
INTERPRETED_AT_LENGTH = {
    torch.float32: [
        *(
            Case(31, 2, Activation(kind, gated=gated), bias=True, pattern="sentinels", num_experts=4)
            for kind, gated in itertools.product(get_args(ActivationKind), (True, False))
        ),
        Case(63, 2, CLAMPED_SWIGLU, bias=True, pattern="sentinels"),
        Case(31, 2, Activation("gelu", gated=False, limit=0.75), bias=True),
        Case(31, 2, Activation("silu", alpha=1.702, up_shift=-0.5)),
        Case(0, 2),
        Case(0, 1, CLAMPED_SWIGLU, bias=True, recompute=True),
        Case(1, 1),
        Case(1, 8, CLAMPED_SWIGLU, bias=True, recompute=True),
        Case(7, 4, bias=True, pattern="sentinels", hidden=128, intermediate=64),
        Case(63, 1, bias=True, pattern="all_on_one"),
        Case(63, 8, PLAIN_RELU2, pattern="sentinels", num_experts=8),
        Case(63, 1, bias=True, num_experts=1),
        Case(63, 2, bias=True, pattern="sentinels_alone"),
        Case(63, 2, bias=True, pattern="zero_weights"),
        Case(63, 2, CLAMPED_SWIGLU, True, "empty_experts", storage="transposed"),
        Case(63, 2, recompute=True, storage="transposed", narrow=True),
        Case(63, 2, bias=True, pattern="sentinels", **_ODD),
        Case(63, 2, PLAIN_RELU2, storage="transposed", **_ODD),
        Case(199, 2, bias=True, pattern="empty_experts"),
        Case(199, 1, PLAIN_RELU2, pattern="sentinels", recompute=True),
        Case(31, 2, bias=True, pattern="sentinels", num_experts=4, lora="all", rank=5),
        Case(31, 2, CLAMPED_SWIGLU, True, "empty_experts", lora="all", rank=1, frozen=True),
        Case(31, 2, PLAIN_RELU2, pattern="sentinels", num_experts=4, recompute=True, lora="all", rank=8),
        Case(31, 2, CLAMPED_SWIGLU, num_experts=4, storage="transposed", lora="all", rank=5, **_ODD),
        Case(17, 1, bias=True, pattern="all_on_one", lora="down", rank=5, frozen=True),
        Case(9, 2, pattern="sentinels_alone", lora="all"),
        Case(1, 8, lora="gate_up", rank=5, frozen=True),
        Case(0, 2, lora="all"),
    ],
    torch.float16: [
        Case(0, 2),
        Case(1, 8, bias=True),
        Case(31, 2, Activation("gelu_tanh"), bias=True, pattern="sentinels", narrow=True),
        Case(63, 1, CLAMPED_SWIGLU, bias=True, pattern="all_on_one", recompute=True),
        Case(63, 2, pattern="sentinels_alone", narrow=True),
        Case(63, 2, PLAIN_RELU2, storage="transposed"),
        Case(63, 2, bias=True, pattern="sentinels", **_ODD),
        Case(63, 2, CLAMPED_SWIGLU, bias=True, pattern="empty_experts"),
        Case(31, 2, CLAMPED_SWIGLU, bias=True, pattern="sentinels", num_experts=4, lora="all", rank=5),
    ],
}


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="with a GPU triton runs there")


def each(chosen):
    return [
        pytest.param(dtype, case, id=f"{str(dtype).removeprefix('torch.')}-{case.name}")
        for dtype, found in chosen.items()
        for case in found
    ]


OFTEN_INTERPRETED = one_of_each(INTERPRETED[torch.float32])


@interpreted
@quick(lambda dtype, case: dtype == torch.float16 or case in OFTEN_INTERPRETED)
@pytest.mark.parametrize(("dtype", "case"), each(INTERPRETED))
def test_triton_agrees_with_the_reference_in_the_interpreter(dtype, case):
    assert_proven([case], "triton", CPU, dtype, expected_refusals=())


@interpreted
@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "case"), each(INTERPRETED_AT_LENGTH))
def test_triton_agrees_with_the_reference_in_the_interpreter_at_length(dtype, case):
    assert_proven([case], "triton", CPU, dtype, expected_refusals=())


def test_the_interpreter_meets_every_pattern_and_activation():
    chosen = OFTEN_INTERPRETED
    assert {case.pattern for case in chosen} == set(get_args(Pattern))
    assert {case.activation for case in cases()} <= {
        *(case.activation for case in chosen),
        Activation("gelu_tanh", limit=0.75),  # clamps as the others do
    }
    for name in ("bias", "recompute", "storage", "narrow", "frozen"):
        assert len({getattr(case, name) for case in chosen}) == 2, name
    assert {case.lora for case in chosen} == set(get_args(Lora)) - {"up"}


def test_the_short_selections_leave_out_no_value_of_any_property():
    for chosen in (ON_THE_CPU, one_of_each(ON_THE_CPU), one_of_each(IN_RARER)):
        for name in ("activation", "bias", "pattern", "num_experts", "recompute", "storage", "narrow", "lora", "rank"):
            assert {getattr(case, name) for case in chosen} == {getattr(case, name) for case in cases()}, name
    assert len(one_of_each(ON_THE_CPU)) < len(ON_THE_CPU) // 3


ON_A_GPU = torch.device("cuda"), (torch.bfloat16, torch.float16, torch.float32)
FOR_ANY_GPU = one_of_each(cases(True))
# The ways through the kernels: no rows, decoding, few and many tiles; and of these the ones with code of their own.
OF_EACH_SIZE = one_of_each(FOR_ANY_GPU, ("num_tokens",))
OF_EACH_WAY = [case for case in OF_EACH_SIZE if case.num_tokens in (1, 63, 760)]


def in_every_run_on_a_gpu(lot, backend, dtype):
    """Kernels are compiled for every case, half a minute of them: in bf16 for all, and what compiles none has all."""
    if backend == "triton" and dtype != torch.bfloat16:
        return any(case in OF_EACH_WAY for case in lot)
    return backend not in PLACED or any(case in OF_EACH_SIZE for case in lot)


@pytest.mark.gpu
@quick(in_every_run_on_a_gpu)
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(*ON_A_GPU, FOR_ANY_GPU))
def test_backend_agrees_with_the_reference_on_a_gpu(lot, backend, dtype):
    assert_proven(lot, backend, torch.device("cuda"), dtype, REFUSALS[backend])


@pytest.mark.gpu
@pytest.mark.thorough  # kernels are compiled for every case: half an hour on a few cores
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(*ON_A_GPU, cases(True)))
def test_backend_agrees_with_the_reference_on_a_gpu_at_length(lot, backend, dtype):
    assert_proven(lot, backend, torch.device("cuda"), dtype, REFUSALS[backend])


def test_every_registered_backend_is_in_the_suite():
    for device in (CPU, torch.device("cuda")):
        names = backend_names(device)
        assert {backend.name for backend in registry.backends_of(ExpertWeights, device)} < set(names)
        assert set(names) <= set(REFUSALS), "a new backend needs its line in REFUSALS"


def test_unaligned_sizes_are_refused_by_grouped_and_served_by_eager():
    odd = next(case for case in cases() if case.hidden == 31)
    refused = verify_case(odd, "grouped", CPU, torch.float32)
    assert "multiple of 16 bytes" in refused.refused
    assert refused.ok
    assert refused.errors == {}
    served = verify_case(odd, "eager", CPU, torch.float32)
    assert served.refused is None
    assert served.ok


LIMITED = [case for case in cases() if math.isfinite(case.activation.limit)]
ONE_OF_EACH_LIMITED = one_of_each(LIMITED)


class TestTheCases:
    def test_names_are_distinct(self):
        for thorough in (False, True):
            names = [case.name for case in cases(thorough)]
            assert len(set(names)) == len(names)

    def test_the_quick_selection_meets_every_pattern_that_has_structure(self):
        assert {case.pattern for case in cases()} >= {"random", "empty_experts", "all_on_one", "sentinels"}

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
def test_placed_experts_have_the_same_tolerance_in_every_case_and_every_gradient_is_compared(backend):
    clamped = Case(9, 2, CLAMPED_SWIGLU, bias=True, lora="all", rank=5)
    result = verify_case(clamped, backend, CPU, torch.bfloat16)
    if result.refused is not None:
        pytest.skip(result.refused)
    assert set(result.errors) == {"output", "inference", "x", "weight", *LORA_NAMES}
    as_resident = dict.fromkeys(("streamed", *ROUNDED), (1e-2, 1e-2))
    limits = {"cpu-int8": (3e-2, 5e-2), **as_resident}.get(backend, (5e-3, 1e-2))
    assert (tolerance(backend, torch.bfloat16, "output"), tolerance(backend, torch.bfloat16, "x")) == limits


class TestVerify:
    def test_every_case_of_every_backend_gets_a_result_and_progress_hears_of_each(self, monkeypatch):
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


def test_the_truth_of_a_case_is_found_once_for_who_asks_whether_and_who_computes(monkeypatch):
    counted, reference = [], cases_module._reference
    monkeypatch.setattr(cases_module, "_reference", lambda *given: counted.append(given) or reference(*given))
    assert verify_case(Case(3, 2, seed=71), "eager", CPU, torch.float32).ok
    assert len(counted) == 1
