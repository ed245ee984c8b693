from pathlib import Path

import pytest
import torch

from amoeba.system import machine

CPU = torch.device("cpu")


@pytest.fixture
def container(tmp_path, monkeypatch) -> Path:
    """The folder in which the kernel tells a container's limits. The machine has 1000 bytes, 600 of them free."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_meminfo", {"MemTotal": 1000, "MemAvailable": 600}.get)
    return tmp_path


def test_without_a_limit_memory_is_the_machines(container):
    assert (machine.total_memory(), machine.available_memory(CPU)) == (1000, 600)
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("90\n")
    assert (machine.total_memory(), machine.available_memory(CPU)) == (1000, 600)


def test_in_a_container_no_more_is_free_than_its_limit_leaves(container):
    (container / "memory.max").write_text("500\n")
    (container / "memory.current").write_text("400\n")
    assert (machine.total_memory(), machine.available_memory(CPU)) == (500, 100)
    (container / "memory.stat").write_text("anon 250\ninactive_file 150\n")
    assert machine.available_memory(CPU) == 250, "files that nobody uses give way"
    (container / "memory.current").write_text("900\n")
    assert machine.available_memory(CPU) == 0


def test_a_large_limit_makes_no_memory(container):
    (container / "memory.max").write_text("5000\n")
    (container / "memory.current").write_text("10\n")
    assert (machine.total_memory(), machine.available_memory(CPU)) == (1000, 600)
