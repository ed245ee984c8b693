"""Calls of CUDA's driver: right arguments, in whatever thread, and errors that are raised."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from amoeba.stream.gpu.device import Driver, open_driver


class Call:
    def __init__(self, calls: list, name: str, code: int = 0) -> None:
        self.calls, self.name, self.code = calls, name, code

    def __call__(self, *arguments) -> int:
        self.calls.append((self.name, threading.get_ident(), arguments))
        return self.code


class Library:
    def __init__(self, **codes: int) -> None:
        self.calls: list = []
        names = (
            "cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuStreamWriteValue32_v2 cuCtxSetCurrent cuDevicePrimaryCtxRetain"
        )
        for name in names.split():
            setattr(self, name, Call(self.calls, name, codes.get(name, 0)))


def test_each_thread_enters_the_context_once_ahead_of_its_first_copy() -> None:
    library = Library()
    driver = Driver(library, 0)
    with ThreadPoolExecutor(1) as other:
        for _ in range(2):
            driver.to_device(0x1000, 0x2000, 64, 5)
            other.submit(driver.to_host, 0x3000, 0x1000, 32, 6).result()
    driver.write_word(0x40, -1, 5)
    named = [(name, arguments) for name, thread, arguments in library.calls if thread == threading.get_ident()]
    assert [name for name, _ in named] == [
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuStreamWriteValue32_v2",
    ]
    assert named[2][1] == (0x1000, 0x2000, 64, 5)
    assert named[4][1] == (5, 0x40, 2**32 - 1, 0)
    assert [name for name, thread, _ in library.calls if thread != threading.get_ident()].count("cuCtxSetCurrent") == 1


@pytest.mark.parametrize("code", [None, 1, 801, 0], ids=["no such call", "invalid", "not supported", "there"])
def test_copies_are_called_at_once_or_where_that_is_not_possible_one_by_one(code: int | None) -> None:
    library, seen = Library(), []

    def at_once(targets, sources, sizes, count, attributes, first, attributes_count, stream) -> int:
        seen.append((list(targets), list(sources), list(sizes), count, list(attributes), attributes_count, stream))
        return code

    if code is not None:
        library.cuMemcpyBatchAsync_v2 = at_once
    driver = Driver(library, 0)
    for _ in range(2):
        driver.to_device_at_once((16, 32), (64, 128), (3, 4), 5)
    one_by_one = [arguments for name, _, arguments in library.calls if name == "cuMemcpyHtoDAsync_v2"]
    assert one_by_one == ([] if code == 0 else [(16, 64, 3, 5), (32, 128, 4, 5)] * 2)
    together = [16, 32], [64, 128], [3, 4], 2, [1, 0, 0, 0, 0, 0], 1, 5
    assert seen == ([] if code is None else [together] * (2 if code == 0 else 1))  # what was refused is not tried again


def test_an_error_is_raised_with_its_number() -> None:
    def fails(*_) -> int:
        return 700

    library = Library()
    library.cuMemcpyBatchAsync_v2 = fails
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        Driver(library, 0).to_device_at_once((1, 2), (3, 4), (5, 6), 7)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        Driver(Library(cuMemcpyHtoDAsync_v2=700), 0).to_device(0, 0, 1, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_there_is_none() -> None:
    assert open_driver(torch.device("cuda", 0)) is None


@pytest.mark.gpu
def test_bytes_and_words_arrive_in_the_order_of_the_stream() -> None:
    driver = open_driver(torch.device("cuda", torch.cuda.current_device()))
    assert driver is not None
    stream, size = torch.cuda.Stream(), 1 << 20
    source = torch.randint(0, 255, (size,), dtype=torch.uint8).pin_memory()
    target, back = (
        torch.zeros(size, dtype=torch.uint8, device="cuda"),
        torch.zeros(size, dtype=torch.uint8).pin_memory(),
    )
    word = torch.zeros(2, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()

    def copies() -> None:
        halves = [(tensor.data_ptr(), tensor.data_ptr() + size // 2) for tensor in (target, source)]
        driver.to_device_at_once(*halves, (size // 2, size // 2), stream.cuda_stream)
        driver.write_word(word.data_ptr() + 4, -7, stream.cuda_stream)
        driver.to_host(back.data_ptr(), target.data_ptr(), size, stream.cuda_stream)

    thread = threading.Thread(target=copies)  # which has no context of its own
    thread.start()
    thread.join()
    stream.synchronize()
    assert torch.equal(back, source) and torch.equal(target.cpu(), source) and word.tolist() == [0, -7]
