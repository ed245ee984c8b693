"""Where nodes compute: NUMA nodes from the kernel's files, virtual nodes from divided cores."""

import os
import threading

import pytest

from amoeba.cpu import numa
from amoeba.cpu.numa import numa_cores, numa_nodes, run_on_nodes


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
