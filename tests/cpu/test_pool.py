"""Worker pools: several at once, again after a fork, gone when nobody holds them, and a word on bad arguments."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.cpu import numa as pool_module
from amoeba.cpu.node_passes import NodeExperts, forward
from amoeba.cpu.numa import WorkerPool, own_cores
from amoeba.cpu.weights import PackedWeights

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


class Experts:
    def __init__(self) -> None:
        torch.manual_seed(0)
        weights = PackedWeights.pack(torch.randn(6, 64, 48)), PackedWeights.pack(torch.randn(6, 48, 32))
        self.node = NodeExperts(*weights, None, None, Activation())
        self.x_TH = torch.randn(50, 48).to(torch.bfloat16)
        self.expert_TK = torch.rand(50, 6).argsort(1)[:, :3].contiguous()
        self.weight_TK = torch.rand(50, 3)

    def run(self, pool: WorkerPool) -> Tensor:
        return forward(self.node, None, self.x_TH, self.expert_TK, self.weight_TK, pool, save="nothing")[0]


@pytest.fixture(scope="module")
def experts() -> Experts:
    return Experts()


def test_many_threads_and_many_calls_give_the_same(experts: Experts) -> None:
    expected = experts.run(WorkerPool(1))
    for threads in (2, 3, 16):
        pool = WorkerPool(threads)
        assert pool.threads == threads
        for _ in range(50):
            assert torch.equal(experts.run(pool), expected)


def test_a_pool_that_fell_asleep_wakes_up(experts: Experts) -> None:
    pool, expected = WorkerPool(3), experts.run(WorkerPool(1))
    for _ in range(5):
        assert torch.equal(experts.run(pool), expected)
        time.sleep(0.01)  # far longer than the workers spin


def test_pools_run_at_the_same_time_and_one_pool_serves_many_threads(experts: Experts) -> None:
    expected, shared = experts.run(WorkerPool(1)), WorkerPool(2)
    wrong: list[str] = []

    def work(pool: WorkerPool) -> None:
        for _ in range(100):
            if not torch.equal(experts.run(pool), expected):
                wrong.append("differs")

    threads = [threading.Thread(target=work, args=(p,)) for p in (WorkerPool(2), WorkerPool(3), shared, shared)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@linux
def test_threads_end_with_their_pool(experts: Experts) -> None:
    before = set(os.listdir("/proc/self/task"))  # some of torch's may be about to end
    pool = WorkerPool(6)
    experts.run(pool)
    assert len(set(os.listdir("/proc/self/task")) - before) == 5
    del pool
    gc.collect()
    assert set(os.listdir("/proc/self/task")) <= before


@linux
def test_workers_are_pinned_and_the_caller_is_not(experts: Experts) -> None:
    before, tasks = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
    cores = own_cores()
    if len(cores) < 2:
        pytest.skip("needs two cores")
    pool = WorkerPool(2, cores=cores)
    experts.run(pool)
    (worker,) = set(os.listdir("/proc/self/task")) - tasks
    assert os.sched_getaffinity(int(worker)) == {cores[1]}
    assert os.sched_getaffinity(0) == before


@linux
def test_a_forked_child_has_its_own_threads(experts: Experts) -> None:
    pool = WorkerPool(3)
    expected = experts.run(pool)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(experts.run(pool), expected) else 1)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    pytest.fail("the child hangs")


class TestBorrowed:
    """Pools that run on the threads of torch's OpenMP runtime."""

    @pytest.fixture
    def pool(self) -> WorkerPool:
        pool = WorkerPool()
        if not pool.borrows:
            pytest.skip("torch's OpenMP runtime has no GOMP_parallel here")
        return pool

    def test_follows_the_number_of_torchs_threads(self, experts: Experts, pool: WorkerPool) -> None:
        expected, before = experts.run(WorkerPool(1)), torch.get_num_threads()
        try:
            for threads in (1, 2, 5, 1):
                torch.set_num_threads(threads)
                assert pool.threads == threads
                assert all(torch.equal(experts.run(pool), expected) for _ in range(20))
        finally:
            torch.set_num_threads(before)

    @pytest.mark.thorough
    @linux
    def test_asks_for_as_many_threads_as_torch_has_now(self, pool: WorkerPool) -> None:
        """In a process of its own, in which no operator of torch has made threads yet."""
        program = """
import os, torch
from test_pool import Experts, WorkerPool
torch.set_num_threads(1)
experts, pool, counts = Experts(), WorkerPool(), []
for threads in (1, 3):
    torch.set_num_threads(threads)
    experts.run(pool)
    counts.append(len(os.listdir("/proc/self/task")))
print(counts[1] - counts[0])
"""
        paths = os.pathsep.join(
            (
                str(Path(pool_module.__file__).parents[2]),
                str(Path(__file__).parent),
                str(Path(__file__).parents[1] / "support"),
            )
        )
        ran = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout) == 2

    @linux
    def test_makes_no_threads_of_its_own_next_to_torchs(self, experts: Experts, pool: WorkerPool) -> None:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            torch.randn(1 << 20).exp_()  # torch's threads are there
            tasks = set(os.listdir("/proc/self/task"))
            experts.run(pool)
            assert set(os.listdir("/proc/self/task")) <= tasks
        finally:
            torch.set_num_threads(before)

    @linux
    def test_a_forked_child_makes_its_own_threads(self, experts: Experts, pool: WorkerPool) -> None:
        expected = experts.run(pool)
        child = os.fork()
        if child == 0:
            right = not pool.borrows and torch.equal(experts.run(pool), expected)
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_without_such_a_runtime_there_are_threads_of_our_own(self, experts, monkeypatch):
        expected = experts.run(WorkerPool(1))
        monkeypatch.setattr(pool_module, "_torch_parallel", lambda: None)
        pool = WorkerPool()
        assert not pool.borrows and pool.threads == len(own_cores())
        assert torch.equal(experts.run(pool), expected)


def test_hyperthreads_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(core)).write_text(siblings)
    monkeypatch.setattr(pool_module, "_SIBLINGS", str(tmp_path / "{core}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert own_cores() == [0, 1]
    monkeypatch.setattr(pool_module, "_torch_parallel", lambda: None)
    assert WorkerPool().threads == 2


def test_bad_arguments_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="threads: expected at least 1; got 0"):
        WorkerPool(0)
    with pytest.raises(ValueError, match="cores: expected at least one core"):
        WorkerPool(cores=[])
