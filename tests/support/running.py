"""One thread, repeatable property tests, and in each file a visible reason for tests that this machine cannot run."""

import atexit
import gc
import logging
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter; to be set before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

import quick_interpreter
from amoeba import Routing
from amoeba.backends.backend import Request
from amoeba.backends.registry import backends_of
from amoeba.bench import timing
from amoeba.core.weights import ExpertWeights
from amoeba.cpu import build, node_library, numa
from amoeba.cpu import node_passes as node
from amoeba.cpu import weights as packed
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.weights import Path, load_packed
from amoeba.plan import machine
from amoeba.system.cpu_features import cpu_flags
from selection import first_case, leave_the_rest_to_thorough, one_of_each_file
from small_layer import Layer

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

os.fsync = os.fstat  # no test pulls the plug, and a disk takes milliseconds for each of 6000 files
gc.disable()  # until all is imported and collected: two seconds of looking through what stays
torch.set_num_threads(1)
with torch.device("meta"):
    torch.empty(0)  # torch notes at first use what makes tensors: not while a test has put something in its place
quick_interpreter.install()
# A benchmark measures as often as it is told and no longer; and what this CPU and its disk give at best, which doctor
# asks for each time on a busy machine, in an instant instead of two seconds.
timing.LEAST_SECONDS, timing.SIZES["cpu"], machine._FILE_BYTES = 0.0, timing.Size(64, 1 << 20, 1), 4 << 20


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Tests of what the extras are for are skipped without them."""
    report = (yield).get_result()
    missing = re.search(r"No module named '(transformers|accelerate|peft)'", str(report.longrepr))
    if report.failed and missing is not None:
        reason = f"Skipped: needs {missing[1]}: pip install 'amoeba-moe[hf,lora]'"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Without a GPU, a test that needs one is the case that says so: thousands take seconds to make."""
    if not torch.cuda.is_available() and metafunc.definition.get_closest_marker("gpu") is not None:
        marks = metafunc.definition.own_markers
        marks[:] = [first_case(mark) if mark.name == "parametrize" else mark for mark in marks]


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_the_rest_to_thorough(items)
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device; torch sees none here"
    if "amx_bf16" not in cpu_flags():
        missing["amx"] = "needs a CPU with AMX, or make test-other-cpus, which emulates it"
    for marker, reason in missing.items():
        # a thousand cases that are skipped for one reason say it once a file
        said, unsaid = one_of_each_file([item for item in items if item.get_closest_marker(marker) is not None])
        for item in said:
            item.add_marker(pytest.mark.skip(reason=reason))
        config.hook.pytest_deselected(items=unsaid)
        left_out = set(unsaid)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is never garbage: each run of a Trainer would look through a million of its objects. And
    pytest adds a handler to each logger that does not hand on its records, six times a test: torch has 50 of them."""
    for name, found in logging.root.manager.loggerDict.items():
        if isinstance(found, logging.Logger) and name.partition(".")[0] == "torch":
            found.propagate = True
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # extension modules complain of what is left when they go


_BEGAN = time.monotonic()
_SECONDS = float(os.environ.get("AMOEBA_THOROUGH_SECONDS", "inf"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (plans := sys.modules.get("amoeba.kernels.launch.plan")) is not None:
        plans.forget_plans()  # a test may put something else in the place of what they were made with
    if item.get_closest_marker("thorough") is not None and time.monotonic() - _BEGAN > _SECONDS:
        pytest.skip(f"AMOEBA_THOROUGH_SECONDS={_SECONDS:g} are over")


@pytest.fixture(params=[backend.name for backend in backends_of(ExpertWeights, torch.device("cpu"))])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of every backend that serves a small fp32 layer on the CPU."""
    layer = Layer()
    weights = layer.weights(layer.tensors)
    asked = Request(layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), weights)
    (found,) = (backend for backend in backends_of(ExpertWeights, torch.device("cpu")) if backend.name == request.param)
    reason = found.why_not(asked)
    if reason is not None:
        pytest.skip(f"{found.name}: {reason}")
    return found.name


@pytest.fixture(params=["generic", "avx512", pytest.param("amx", marks=pytest.mark.amx)])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to multiply packed experts that this CPU has, and it is the one that is taken."""
    best = load_packed().best_path
    if Path[request.param.upper()] > best:
        pytest.skip(f"this CPU with this compiler has {best.name} at best")
    monkeypatch.setenv("AMOEBA_CPU_PATH", request.param)
    return request.param


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """gpu_of(9, 0): every device is said to be a GPU of this compute capability."""
    return lambda *found: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found)


@pytest.fixture
def our_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What aMoEba says with --verbose."""
    monkeypatch.setattr(logging.getLogger("amoeba"), "propagate", True)
    caplog.set_level(logging.INFO, logger="amoeba")
    return caplog


@pytest.fixture
def by_decoder(monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath) -> None:
    """Models on the CPU are taken for ones whose steps can be captured."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr("amoeba.jobs.generate.token_steps.why_plain", lambda model: None)


@pytest.fixture(scope="session")
def workers() -> WorkerPool:
    return WorkerPool(threads=2)


@pytest.fixture(params=["-march=x86-64", "-march=haswell"])
def older_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed experts are computed by libraries that were built for CPUs of that kind, with -O1: as -O3 (which
    `make test-wheel` runs) in half the time, which is the longest that a fresh machine compiles for."""
    if platform.machine() != "x86_64":
        pytest.skip("names of x86 instruction sets")
    products, passes = (build.compiled_library(name, f"{request.param} -O1") for name in ("packed", "node"))
    older = {"load_packed": packed.PackedLibrary(products), "load_node": node_library.open_node(passes)}
    users = (packed, "load_packed"), (node, "load_packed"), (node, "load_node"), (numa, "load_node")
    for module, name in (*users, (node_library, "load_node")):
        monkeypatch.setattr(module, name, lambda name=name: older[name])
    monkeypatch.setenv("AMOEBA_CPU_PATH", "generic")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory):
    """A small base with its tokenizer, and texts to train it on."""
    from tiny_runs import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"))
