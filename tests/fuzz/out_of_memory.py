"""Memory that runs out in the middle of a step, at one place after another.

    lines = attack(case)        # what broke

On a GPU the limit is torch's own for this process, on the CPU the address space of the process. A step that fails must
fail with an exception; the step after it, with memory again, gives the same bits as the one before, and what the failed
one had allocated is free.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from amoeba.cpu.weights import Path, current_path

from . import attempt as attempts
from .case import Case, describe
from .tensors import make

# Megabytes more than what is there when the step begins. A GPU's memory is given out by 20 of them at a time.
ROOM = {"cpu": (0, 1, 2, 4, 7, 12, 24), "cuda": (0, 20, 40, 80, 120, 200, 400)}


def cases(device: str) -> Iterator[Case]:
    """Big enough for a step to want more than what there is room for.

    On the CPU only where every product is ours: OpenBLAS, which torch's products use, ends the process itself.
    """
    places = [("cpu", "float32", "resident")]
    if device == "cuda":
        places = [(name, "bfloat16", "resident") for name in ("triton", "grouped", "eager")]
    elif current_path() > Path.GENERIC:
        places.append(("cpu", "bfloat16", "resident"))
    places += [("cpu", "bfloat16", "cpu-bf16"), ("cpu", "bfloat16", "cpu-int8")]
    for backend, dtype, placement in places:
        yield Case(
            seed=1,
            device=device,
            backend=backend,
            dtype=dtype,
            placement=placement,
            threads=2 if device == "cpu" else 8,
            tokens=512 if device == "cpu" else 4096,
            hidden=256 if device == "cpu" else 1024,
            intermediate=512 if device == "cpu" else 1024,
            experts=4,
            top_k=2,
            wanted=("x", "weight", "gate_up", "down", "down_lora_a", "down_lora_b"),
            ranks={} if (device, placement, dtype) == ("cpu", "resident", "float32") else {"down": 16},
        )


def attack(case: Case) -> list[str]:
    print(describe(case), file=sys.stderr, flush=True)  # where it died, should it die
    torch.set_num_threads(case.threads)
    made = make(case)
    weights = attempts._weights(case, made)
    wanted = attempts._distinct_leaves(made)

    def step() -> dict[str, Tensor]:
        y_TH = attempts._forward(case, made, weights)
        return {"output": y_TH.detach()} | attempts._gradients(y_TH, wanted, made)

    broken, failed = [], 0
    before = step()
    left = _allocated(case)
    limit = _limited_on_cuda if case.device == "cuda" else _limited_address_space
    for room in (megabytes * 2**20 for megabytes in ROOM[case.device]):
        failed += _fails(step, limit, room)
        gc.collect()
        if case.device == "cuda" and _allocated(case) > left:
            broken.append(f"{_allocated(case) - left} bytes left behind with room for {room} [{describe(case)}]")
        after = step()
        broken += [
            f"{name}: other numbers after memory ran out with room for {room} [{describe(case)}]"
            for name in before
            if not attempts._same_bits(before[name], after[name])
        ]
        del after
    if not failed:
        broken.append(f"memory never ran out, nothing was tried [{describe(case)}]")
    return broken


def _fails(step: Callable[[], object], limit: Callable, room: int) -> bool:
    """Whether the step ran out of memory, which is an exception; any other end of it is not caught here."""
    try:
        with limit(room):
            step()
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one of the latter
        if "memory" not in str(error).lower() and "alloc" not in str(error).lower():
            raise
        return True
    return False


def _allocated(case: Case) -> int:
    return torch.cuda.memory_allocated() if case.device == "cuda" else 0


@contextmanager
def _limited_on_cuda(room: int) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _limited_address_space(room: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    # what was freed before stays with the process, and is room too: it is taken, and so much of it given back
    taken = [each for size in (2**26, 2**23, 2**20, 2**18) for each in _all_there_is(size)]
    given_back = 0
    while taken and given_back < room:
        given_back += taken.pop().nbytes
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _all_there_is(size: int) -> Iterator[Tensor]:
    while True:
        try:
            yield torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError:
            return
