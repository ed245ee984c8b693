"""Everything we use of torch that is not public, in one place; a test tells when it changes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "tree_leaves"]  # from torch, for others

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, which imports torch._dynamo, and that takes as long as torch itself."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def custom_graph_pass() -> Any:
    """What a pass over the compiler's graphs is derived from, so that what it has passed over can be kept."""
    from torch._inductor.custom_graph_pass import CustomGraphPass  # which imports the compiler

    return CustomGraphPass


def begin_hashing_compiler() -> None:
    """Begins to hash torch's 2,000 files, by which the compiler finds what it has kept; it remembers the result.
    Reading and hashing leave Python's lock to the imports of the compiler, which take longer and come next."""
    try:
        from torch._inductor.codecache import torch_key
    except ImportError:
        return

    def run() -> None:
        with suppress(Exception):  # then the compiler does it, and says what is wrong
            torch_key()

    Thread(target=run, name="torch_key").start()


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """As `torch.use_deterministic_algorithms(True)`, for the time of a block. That one tells torch's compiler, too, and
    imports it for that, for seconds; ours leaves the compiler as it is."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warns)


def default_store() -> Any:
    """Where the processes of torch.distributed met, and can leave each other notes."""
    return torch.distributed.distributed_c10d._get_default_store()


def why_not_symmetric_memory() -> str | None:
    """Why this torch has no memory that other processes' GPUs reach; or None."""
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        return str(error)
    missing = [name for name in ("empty", "rendezvous") if not hasattr(_symmetric_memory, name)]
    return f"torch {torch.__version__} has no {' and no '.join(missing)} for it" if missing else None


def why_not_nvshmem() -> str | None:
    """Why this process cannot have memory that NVSHMEM reaches from other machines; or None."""
    reason = why_not_symmetric_memory()
    if reason is not None:
        return reason
    from torch.distributed import _symmetric_memory

    available = getattr(_symmetric_memory, "is_nvshmem_available", lambda: False)
    if not available():
        return f"torch {torch.__version__} finds no NVSHMEM"
    try:
        nvshmem_device_functions().NvshmemLibFinder.find_device_library()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return None


def nvshmem_device_functions() -> Any:
    """What Triton kernels call of NVSHMEM, and `requires_nvshmem` for these kernels."""
    from torch.distributed._symmetric_memory import _nvshmem_triton

    return _nvshmem_triton


def symmetric_memory(nbytes: int, device: torch.device, group: Any, *, nvshmem: bool = False) -> tuple[Tensor, Any]:
    """Bytes on this GPU, and a handle whose buffer_ptrs are the addresses of all ranks' bytes. All ranks call it.

    nvshmem: by NVSHMEM, for good and for all that is allocated so in this process; torch refuses where there was other.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # several ranks on one GPU
    from torch.distributed import _symmetric_memory

    if nvshmem:
        _symmetric_memory.set_backend("NVSHMEM")
    own = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    return own, _symmetric_memory.rendezvous(own, group)


@constant_when_traced  # torch.compile enters the transforms that it traces, and guards on the others
def transformed() -> bool:
    """Whether a transform of torch.func or forward mode is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batch_of_gradients(dy: Tensor) -> bool:
    """Whether this stands for several gradients at once (is_grads_batched=True)."""
    return torch._C._functorch.is_legacy_batchedtensor(dy)


def has_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode looks on."""
    return torch._C._len_torch_dispatch_stack() != 0


def dispatch_modes() -> list[TorchDispatchMode]:
    return [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]


def only_dispatch_mode() -> TorchDispatchMode | None:
    """The one that looks on where no other does."""
    return torch._C._get_dispatch_stack_at(0) if torch._C._len_torch_dispatch_stack() == 1 else None


def leave_dispatch_mode() -> None:
    """The innermost one, without what `with` does besides."""
    torch._C._pop_torch_dispatch_stack(None)


def enter_dispatch_mode(mode: TorchDispatchMode) -> None:
    torch._C._push_on_torch_dispatch_stack(mode)


def is_view(operation: Any) -> bool:
    """Whether what an operator that a TorchDispatchMode sees gives back is memory of its argument."""
    return operation.is_view


def copy_all(to: list[Tensor], of: list[Tensor]) -> None:
    """By one launch for many."""
    torch._foreach_copy_(to, of)


def reshaped(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The same numbers in another shape, and to autograd no view of the tensor, which is not used any more."""
    return torch.ops.aten._unsafe_view(tensor.contiguous(), shape)


def writes_to_arguments(operation: Any) -> bool:
    return operation._schema.is_mutable


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def backward_goes_on_to(node: Any) -> bool:
    """In a backward: whether it will come to this node of its graph. It leaves out what leads to nothing that
    `torch.autograd.grad` was asked for; `needs_input_grad` does not tell."""
    return torch._C._will_engine_execute_node(node)


def graph_is_freed() -> bool:
    """Whether a backward is under way after which what was saved for it is gone (no retain_graph)."""
    return inside_backward() and not torch._C._autograd._get_current_graph_task_keep_graph()


def occupy_gpu(cycles: int) -> None:
    """Lets the GPU spin for so long, so that what is enqueued meanwhile starts without gaps."""
    torch.cuda._sleep(cycles)


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, *, pool: Any = None, stream: Any = None, capture_error_mode: str = "thread_local"
) -> Iterator[None]:
    """As `torch.cuda.graph`, without garbage collection inside: collecting another graph frees it, which CUDA does not
    permit during a capture, and ends this one."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode):
            yield
    finally:
        if enabled:
            gc.enable()


def end_failed_capture(pool: tuple[int, int]) -> None:
    """Where CUDA refuses to end a spoiled capture, torch leaves it open: memory stays set aside for it in this pool,
    and random numbers are refused until another capture has come to its end."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # it was ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError), capture(torch.cuda.CUDAGraph()):
        torch.zeros((), dtype=torch.float32, device=torch.device("cuda", device))


def grouped_product_in_fp8(
    rows_NW: Tensor, matrix_EWO: Tensor, scale_N: Tensor, scale_EO: Tensor, offs_E: Tensor
) -> Tensor:
    """torch's own, of e4m3 with one scale for a row and one for a column; in bf16."""
    return torch._scaled_grouped_mm(
        rows_NW, matrix_EWO, scale_N, scale_EO, offs=offs_E, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each document, and its logsumexp. `torch.nn.attention.varlen` does this, but its backward
    gives other bits from run to run."""
    found = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        0.0,  # dropout
        True,
        return_debug_mask=False,
        scale=scale,
        window_size_left=window,
        window_size_right=-1 if window < 0 else 0,
    )
    return found[0], found[1]


def flash_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    logsumexp: Tensor,
    ends: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, the same bits each time."""
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of random numbers, for a dropout that is zero
    with deterministic_algorithms():
        return torch.ops.aten._flash_attention_backward(
            dy,
            q,
            k,
            v,
            y,
            logsumexp,
            ends,
            ends,
            longest,
            longest,
            0.0,
            True,
            state,
            torch.empty(0, device=q.device, dtype=q.dtype),
            scale=scale,
            window_size_left=window,
            window_size_right=-1 if window < 0 else 0,
        )
