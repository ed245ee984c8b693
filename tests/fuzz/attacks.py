"""What `python -m tests.fuzz.attack` tries. Each function takes a device and returns a line for each thing that broke.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import dataclasses
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import torch

if not torch.cuda.is_available():  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

from amoeba import RouterConfig, experts
from amoeba.routing.router import Routing, route

from . import attempt as attempts
from . import out_of_memory
from .case import FACTORS, LAYOUTS, Case, describe, draw
from .tensors import make
from .truth import truth

ATTACKS: dict[str, Callable[[str], list[str]]] = {}
EVERYTHING = ("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias", *FACTORS)


class NotHere(Exception):
    """This machine has nothing to attack."""


def attack(function: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    ATTACKS[function.__name__] = function
    return function


def paths(device: str) -> Iterator[Case]:
    """A small case on each way through the code: training and decoding, with and without factors, in each placement."""
    if device == "cpu":
        resident = [
            ("cpu", "float32"),
            ("cpu", "bfloat16"),
            ("eager", "float32"),
            ("eager", "bfloat16"),
            ("eager", "float64"),
            ("grouped", "float32"),
            *([] if torch.cuda.is_available() else [("triton", "float32")]),  # in the interpreter
        ]
    else:
        resident = [(name, dtype) for name in ("triton", "eager") for dtype in ("bfloat16", "float16", "float32")]
        resident += [("grouped", "bfloat16"), ("eager", "float64")]
    places = [(backend, dtype, "resident", 1) for backend, dtype in resident]
    places += [("cpu", "bfloat16", "cpu-bf16", 1), ("cpu", "bfloat16", "cpu-bf16", 2)]
    places += [("cpu", "bfloat16", "cpu-int8", 1)]
    for backend, dtype, placement, nodes in places:
        interpreted = backend == "triton" and device == "cpu"
        plain = Case(
            seed=1,
            device=device,
            backend=backend,
            dtype=dtype,
            placement=placement,
            nodes=nodes,
            threads=nodes,
            tokens=9 if interpreted else 70,
            hidden=64,
            intermediate=32,
            experts=4,
            top_k=2,
            gate_up_bias=True,
            down_bias=True,
            ids="sentinels",
            wanted=EVERYTHING,
        )
        ranks = {"gate": 8, "up": 8, "down": 8}
        yield plain
        yield dataclasses.replace(plain, ranks=ranks, recompute=True)
        yield dataclasses.replace(plain, tokens=2, ids="distinct", mode="no_grad")
        yield dataclasses.replace(plain, tokens=2, ids="distinct", mode="no_grad", ranks=ranks)


def tried(cases: Iterator[Case], may_refuse: bool = False) -> list[str]:
    broken = []
    for case in cases:
        # where it died, should it die
        print(describe(case), file=sys.stderr, flush=True)
        outcome = attempts.attempt(case)
        if outcome.verdict == "failed" or (outcome.verdict == "refused" and not may_refuse):
            broken.append(f"{outcome.verdict}: {outcome.reason} [{describe(case)}]")
    return broken


@attack
def default_dtype(device: str) -> list[str]:
    """Another default dtype around every path."""
    dtypes = ("bfloat16", "float16", "float64")
    return tried(dataclasses.replace(case, default_dtype=dtype) for case in paths(device) for dtype in dtypes)


@attack
def default_device(device: str) -> list[str]:
    """Another default device around every path."""
    devices = ("meta", "cpu") if device == "cpu" else ("meta", "cpu", "cuda")
    return tried(dataclasses.replace(case, default_device=other) for case in paths(device) for other in devices)


@attack
def strides(device: str) -> list[str]:
    """Every tensor stored in every odd way, one way at a time. torch's grouped product may refuse some."""
    layouts = [dict.fromkeys((*EVERYTHING, "expert", "dy"), layout) for layout in LAYOUTS if layout != "plain"]
    cases = (dataclasses.replace(case, layouts=each, seed=2) for case in paths(device) for each in layouts)
    grouped = [case for case in cases if case.backend == "grouped"]
    cases = (dataclasses.replace(case, layouts=each, seed=2) for case in paths(device) for each in layouts)
    return tried(iter(grouped), may_refuse=True) + tried(case for case in cases if case.backend != "grouped")


@attack
def seeds(device: str) -> list[str]:
    """Some cases of the fuzzer."""
    return tried((draw(seed, device) for seed in range(10**6, 10**6 + 40)), may_refuse=True)


@attack
def nan_routing(device: str) -> list[str]:
    """A NaN or +inf among a token's logits is in its output, and in no other token's."""
    broken = []
    for case in paths(device):
        if case.mode == "grad":
            continue
        case = dataclasses.replace(case, tokens=16, experts=8)
        made = make(case)
        weights = attempts._weights(case, made)
        for score in ("softmax", "sigmoid", "topk_softmax"):
            for renormalize, value in ((True, math.nan), (False, math.nan), (True, math.inf)):
                if score == "sigmoid" and value == math.inf:
                    continue  # sigmoid(inf) is 1
                config = RouterConfig(num_experts=8, top_k=2, score=score, renormalize=renormalize)
                logits_TE = torch.randn(16, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
                logits_TE[::2].fill_diagonal_(value)  # every second token, each at another expert
                routing = route(logits_TE.to(device), config)
                with torch.no_grad():
                    y_TH = experts(made.tensors["x"], routing, weights, backend=case.backend)
                bad_T = (~y_TH.isfinite()).any(1)
                if not bad_T[::2].all() or bad_T[1::2].any():
                    tokens = bad_T.nonzero().flatten().tolist()
                    broken.append(f"{score} renormalize={renormalize} {value}: not finite {tokens} [{describe(case)}]")
    return broken


@attack
def derivatives(device: str) -> list[str]:
    """Forward mode, second derivatives, torch.func: right, or refused in our words."""
    broken = []
    for case in paths(device):
        if case.mode != "grad" or case.dtype == "float16":
            continue
        case = dataclasses.replace(case, tokens=5, wanted=("x",))
        made = make(case)
        weights = attempts._weights(case, made)
        x_TH = made.tensors["x"].detach()
        right = truth(case, dataclasses.replace(made, dy_TH=torch.ones_like(made.dy_TH)))
        for name, derive in _DERIVATIVES.items():

            def call(x_TH: torch.Tensor, case=case, made=made, weights=weights) -> torch.Tensor:
                named = made.tensors | {"x": x_TH}
                return attempts._forward(case, dataclasses.replace(made, tensors=named), weights)

            try:
                found, expected = derive(call, x_TH, right)
            except Exception as error:
                outcome = attempts.verdict_on(error)
                if outcome.verdict != "refused":
                    broken.append(f"{name}: {outcome.reason} [{describe(case)}]")
                continue
            if found is None:
                broken.append(f"{name}: nothing came [{describe(case)}]")
                continue
            off = float((found.detach().cpu().double() - expected).norm() / expected.norm())
            if not off < 0.1:
                broken.append(f"{name}: off by {off:.1e} [{describe(case)}]")
    return broken


def _jvp(call, x_TH, right):
    # Σ of the tangent's numbers is <gradient of Σy, direction>
    _, tangent = torch.func.jvp(call, (x_TH,), (torch.ones_like(x_TH),))
    return tangent.double().sum()[None], right["x"].sum()[None]


def _forward_ad(call, x_TH, right):
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        y_TH = call(forward_ad.make_dual(x_TH, torch.ones_like(x_TH)))
        tangent = forward_ad.unpack_dual(y_TH).tangent
        return None if tangent is None else tangent.double().sum()[None], right["x"].sum()[None]


def _func_grad(call, x_TH, right):
    return torch.func.grad(lambda x: call(x).sum())(x_TH), right["x"]


def _vmap(call, x_TH, right):
    return torch.func.vmap(call)(torch.stack((x_TH, x_TH)))[1], right["output"]


def _second(call, x_TH, right):
    x_TH = x_TH.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(x_TH).sum(), x_TH, create_graph=True)
    torch.autograd.grad(first.sum(), x_TH)
    raise AssertionError("a second derivative came out")


_DERIVATIVES = {"jvp": _jvp, "forward_ad": _forward_ad, "func.grad": _func_grad, "vmap": _vmap, "second": _second}


@attack
def memory_runs_out(device: str) -> list[str]:
    """In the middle of a step; the step after it is right, and nothing is left behind."""
    if device == "cpu" and not sys.platform.startswith("linux"):
        raise NotHere("a limit of the address space that holds")
    return [line for case in out_of_memory.cases(device) for line in out_of_memory.attack(case)]


@attack
def two_processes_on_a_cold_cache(device: str) -> list[str]:
    """Both build, or one waits for the other; both are right."""
    choice = [case for case in paths(device) if case.mode == "no_grad" and not case.ranks]
    script = (
        "import sys; from tests.fuzz import attacks; "
        f"choice = [case for case in attacks.paths({device!r}) if case.mode == 'no_grad' and not case.ranks]; "
        "broken = attacks.tried(iter(choice)); print(*broken, sep='\\n'); sys.exit(bool(broken))"
    )
    assert choice
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"AMOEBA_CACHE": f"{folder}/amoeba", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, "-c", script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pair = [subprocess.Popen(command, env=environment, **pipes) for _ in range(2)]
        outputs = [child.communicate()[0] for child in pair]
    return [
        f"process {number} left with {child.returncode}: {output[-300:]}"
        for number, (child, output) in enumerate(zip(pair, outputs, strict=True))
        if child.returncode
    ]


@attack
def more_than_two_billion_numbers(device: str) -> list[str]:
    """Tensors whose places do not fit into 32 bits, the last token's output and gradient against a product in fp64."""
    if device == "cpu" or torch.cuda.get_device_properties(0).total_memory < 100 * 2**30:
        raise NotHere("memory for tensors of more than 2^31 numbers on a GPU")
    broken = []
    for backend in ("triton", "grouped"):
        for tokens, count, hidden, inner in ((1_100_000, 2, 2048, 64), (64, 300, 2048, 2048)):
            case = Case(1, device, backend, dtype="bfloat16", tokens=tokens, hidden=hidden, intermediate=inner)
            normal = torch.Generator(device).manual_seed(1)
            options = {"device": device, "dtype": torch.bfloat16, "generator": normal}
            x_TH = torch.randn(tokens, hidden, **options).requires_grad_()
            gate_up_EJH = torch.randn(count, 2 * inner, hidden, **options).mul_(hidden**-0.5)
            down_EHI = torch.randn(count, hidden, inner, **options).mul_(inner**-0.5)
            expert_TK = torch.full((tokens, 1), count - 1, device=device)
            routing = Routing(expert_TK, torch.ones(tokens, 1, device=device, dtype=torch.float32))
            named = {"gate_up": gate_up_EJH, "down": down_EHI}
            y_TH = experts(x_TH, routing, attempts._weights(case, _Tensors(named)), backend=backend)
            (dx_TH,) = torch.autograd.grad(y_TH, x_TH, torch.ones_like(y_TH))
            last = x_TH[-1:].detach().double().requires_grad_()
            gate, up = (last @ gate_up_EJH[-1].double().T).chunk(2, 1)
            right = (torch.nn.functional.silu(gate) * up) @ down_EHI[-1].double().T
            (right_dx,) = torch.autograd.grad(right.sum(), last)
            for name, found, expected in (("output", y_TH, right), ("x", dx_TH, right_dx)):
                off = float((found[-1].double() - expected[0]).norm() / expected.norm())
                if not off < 2e-2:
                    broken.append(f"{backend} T={tokens} E={count}: {name} off by {off:.1e}")
            del x_TH, y_TH, dx_TH, gate_up_EJH, down_EHI, named, routing
            torch.cuda.empty_cache()
    return broken


@dataclasses.dataclass
class _Tensors:
    """As much of `Made` as weights are made from."""

    tensors: dict[str, torch.Tensor]
