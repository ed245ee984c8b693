"""Every backend against the reference: all cases of `amoeba.proof.conformance`, every gradient by name.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import itertools
import os
from typing import get_args

import pytest
import torch
from conformance_cases import CPU, PLACED, ROUNDED, one_of_each

from amoeba import Activation
from amoeba.backends import grouped, registry
from amoeba.core.config import ActivationKind
from amoeba.core.weights import ExpertWeights
from amoeba.proof.cases import CLAMPED_SWIGLU, PLAIN_RELU2, SILU, Case, Lora, Pattern, cases
from amoeba.proof.conformance import COMPOSED, backend_names, names_of_named_backends, tolerance, verify_case
from amoeba.system import cpu_features
from selection import quick

# Cases of which the GPU kernels need many, for their tiles; a CPU computes these of them.
FOR_THE_GPU = {case for case in cases() if case.num_tokens == 399} - {
    Case(399, 2, CLAMPED_SWIGLU, True, "sentinels", hidden=320, intermediate=192, storage="transposed", narrow=True),
    Case(399, 2, SILU, False, "empty_experts", 320, 192, recompute=True, lora="all", rank=64, frozen=True),
}
ON_THE_CPU = [case for case in cases() if case not in FOR_THE_GPU]
SHORT = set(one_of_each(ON_THE_CPU))


def groups(chosen):
    """The cases in lots that are a test each; what a lot has in common is its name. Those that stand for all are lots
    of their own."""
    found = {}
    for case in chosen:
        activation = case.activation
        name = f"{activation.kind}-{'gated' if activation.gated else 'plain'}-T{case.num_tokens}-H{case.hidden}"
        name += f"-lora-{case.lora}" if case.lora != "none" else ""
        name += "" if case in SHORT else "-more"
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
    **dict.fromkeys(("fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4"), ("trains the experts themselves",)),
}


EAGER = "eager"  # as composed, torch's own operations for any dtype


def in_every_run(lot, backend, dtype):
    """Each property's values; what torch alone computes meets them in fp32 here and in fp16 below."""
    of_torch = backend in (EAGER, COMPOSED) and dtype == torch.bfloat16
    return backend not in ROUNDED and not (of_torch or SHORT.isdisjoint(lot))


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


@quick(
    lambda lot, backend, dtype: (
        (backend, dtype) in ((EAGER, torch.float16), (COMPOSED, torch.float64))
        and lot[0].num_tokens * lot[0].hidden <= 63 * 32
    )
)
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(CPU, RARER, one_of_each(IN_RARER)))
def test_backend_agrees_in_the_rarer_dtypes(lot, backend, dtype):
    assert_proven(lot, backend, CPU, dtype, REFUSALS[backend])


@pytest.mark.thorough
@pytest.mark.parametrize(("lot", "backend", "dtype"), parameters(CPU, RARER, cases()))
def test_backend_agrees_in_the_rarer_dtypes_at_length(lot, backend, dtype):
    assert_proven(lot, backend, CPU, dtype, REFUSALS[backend])


# as this CPU computes them: above
@quick(lambda backend, native, whole: backend == "cpu" and not whole and native != cpu_features.has_bf16_instructions())
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
        # one that was asked for by name, by an earlier test for example, is among the registered from then on
        registered = {backend.name for backend in registry.backends_of(ExpertWeights, device)}
        assert registered - set(names_of_named_backends(CPU)) < set(names)
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
