"""Where nodes compute: NUMA nodes from the kernel's files, virtual nodes from divided cores."""

import ctypes
import functools
import os
import platform
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from packed_layer import PackedLayer

from amoeba.cpu import numa
from amoeba.cpu.numa import numa_cores, numa_nodes, run_on_nodes
from amoeba.cpu.packed_experts import _tensors


@pytest.fixture(autouse=True)
def nodes_of_each_test(monkeypatch):
    """Not those that another test made, on a machine that was different for it."""
    monkeypatch.setattr(numa, "_node_of", functools.cache(numa._node_of.__wrapped__))


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    for node, text in enumerate(("0-3,8\n", "4-5,6-7\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    monkeypatch.setattr(numa, "_NODE_FOLDER", tmp_path)
    monkeypatch.setattr(numa, "own_cores", lambda: [0, 1, 2, 3, 4, 5, 6, 8])


def test_numa_nodes_are_read_and_cores_that_are_not_ours_left_out(two_sockets):
    assert numa_cores() == [[0, 1, 2, 3, 8], [4, 5, 6]]
    assert [node.cores for node in numa_nodes("auto")] == [(0, 1, 2, 3, 8), (4, 5, 6)]


def test_other_numbers_of_nodes_divide_the_cores(two_sockets):
    assert [node.cores for node in numa_nodes(4)] == [(0, 1), (2, 3), (8, 4), (5, 6)]
    assert [node.pool.threads for node in numa_nodes(2, threads=5)] == [3, 2]


def test_more_nodes_than_cores_share_them(monkeypatch, tmp_path):
    monkeypatch.setattr(numa, "_NODE_FOLDER", tmp_path)
    monkeypatch.setattr(numa, "own_cores", lambda: [0, 1])
    assert [node.cores for node in numa_nodes(3)] == [(0,), (1,), (0,)]


# get_mempolicy and move_pages, which no library here wraps
GET_POLICY, MOVE_PAGES = {"x86_64": (239, 279), "aarch64": (236, 239)}.get(platform.machine(), (None, None))
DEFAULT, PREFERRED, OF_ADDRESS = 0, 1, 2
has_nodes = pytest.mark.skipif(
    sys.platform != "linux" or GET_POLICY is None or not numa._NODE_FOLDER.exists(),
    reason="the system tells nothing of its NUMA nodes",
)


def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), *arguments):
        pytest.skip(f"refused here: {os.strerror(ctypes.get_errno())}")


def policy(tensor=None):
    """Mode and nodes; of this thread, or of the memory in the middle of a tensor."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    place = ctypes.c_void_p(None if tensor is None else tensor.data_ptr() + tensor.nbytes // 2)
    flags = ctypes.c_ulong(0 if tensor is None else OF_ADDRESS)
    call(GET_POLICY, ctypes.byref(mode), mask, ctypes.c_ulong(1024), place, flags)
    return mode.value, {node for node in range(1024) if mask[node // 64] >> node % 64 & 1}


def pages_by_node(tensor):
    size = os.sysconf("SC_PAGESIZE")
    starts = range(-(-tensor.data_ptr() // size) * size, (tensor.data_ptr() + tensor.nbytes) // size * size, size)
    pages, found = (ctypes.c_void_p * len(starts))(*starts), (ctypes.c_int * len(starts))()
    call(MOVE_PAGES, ctypes.c_int(0), ctypes.c_ulong(len(starts)), pages, None, found, ctypes.c_int(0))
    return Counter(found)


def test_a_nodes_memory_is_that_of_its_cores(two_sockets):
    assert [node.memory_node for node in numa_nodes("auto")] == [0, 1]
    assert [node.memory_node for node in numa_nodes(4)] == [0, 0, None, 1], "the third has cores of both"
    assert numa_nodes(1)[0].memory_node is None, "one for the whole machine"


@has_nodes
def test_threads_of_a_node_take_its_memory_and_others_are_left_alone():
    found = numa_nodes(2)
    assert run_on_nodes(found, [policy, policy]) == [(PREFERRED, {node.memory_node}) for node in found]
    assert policy()[0] == DEFAULT


@has_nodes
def test_packed_weights_are_bound_to_their_node_and_all_their_pages_are_there():
    packed = PackedLayer(inner=800).pack("int8", nodes=2)
    for share, node in zip(packed.shares, packed.numa_nodes, strict=True):
        large = [tensor for tensor in _tensors(share) if tensor.nbytes > 1 << 16]
        assert len(large) >= 2
        for tensor in large:
            assert policy(tensor) == (PREFERRED, {node.memory_node})
            assert set(pages_by_node(tensor)) == {node.memory_node}


@has_nodes
def test_workers_of_a_pool_take_the_memory_of_its_node():
    def preferring():
        maps = [task / "numa_maps" for task in Path("/proc/self/task").iterdir()]
        if not maps[0].exists():
            pytest.skip("the system does not tell the policy of a thread")
        return sum(" prefer:0 " in each.read_text() for each in maps)

    others = preferring()
    pool = numa.WorkerPool(3, memory_node=0)
    assert pool.handle
    until = time.monotonic() + 20
    while preferring() < others + 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert preferring() == others + 2, "the caller is the third"


@has_nodes
def test_a_node_that_is_not_there_is_refused_and_nothing_is_lost():
    node = numa.NumaNode(1, numa.own_cores()[:1])
    node.memory_node = 999
    tensor = torch.ones(1 << 16)
    node.keep([tensor])
    assert node.start(policy).result()[0] == DEFAULT
    assert tensor.sum() == 1 << 16 and policy(tensor)[0] == DEFAULT


def test_layers_share_their_nodes():
    assert numa_nodes(2) == numa_nodes(2)
    assert numa_nodes("auto") == numa_nodes(len(numa_cores()))
    assert numa_nodes(3)[0] is not numa_nodes(3)[2], "nodes that share a core are still two"


@pytest.mark.parametrize("nodes", [0, -1, "all", 1.5])
def test_a_senseless_number_of_nodes_is_refused(nodes):
    with pytest.raises(ValueError, match="nodes: expected a number of at least 1"):
        numa_nodes(nodes)


def test_fewer_threads_than_nodes_are_refused():
    with pytest.raises(ValueError, match="threads: expected at least one for each of the 3 nodes; got 2"):
        numa_nodes(3, threads=2)


def test_nodes_run_at_the_same_time_each_on_its_cores():
    both = threading.Barrier(2, timeout=20)

    def job():
        both.wait()  # one after another would wait for ever
        return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    found = numa_nodes(2)
    where = run_on_nodes(found, [job, job])
    if where[0] is not None:
        assert where == [set(node.cores) for node in found]


def test_an_error_of_one_node_is_raised_when_all_are_done():
    done = []

    def broken():
        raise ZeroDivisionError("here")

    with pytest.raises(ZeroDivisionError, match="here"):
        run_on_nodes(numa_nodes(2), [broken, lambda: done.append(1)])
    assert done == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_gets_threads_of_its_own():
    run_on_nodes(numa_nodes(2), [int, int])
    child = os.fork()
    if child == 0:
        ok = run_on_nodes(numa_nodes(2), [lambda: 3, lambda: 4]) == [3, 4]
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
