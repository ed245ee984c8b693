"""A layer under FSDP2: sharded parameters, the same output and the same gradients; on a GPU where there is one."""

import copy
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from amoeba import MoE, MoEConfig, RouterConfig
from fp8_stand_ins import stand_in
from selection import each_value_once

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture
def world(tmp_path) -> Iterator[None]:
    dist.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@each_value_once()
@pytest.mark.parametrize("fused", [False, True], ids=["AdamW", "fused AdamW"])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_sharded_layer_in_fp8_never_sees_old_codes(backend, fused, world, monkeypatch):
    """What FSDP gathers comes to the same memory again, with other numbers. Without a Hopper GPU the products of
    `triton` are stood in for."""
    if backend == "triton" and not IS_HOPPER:
        if DEVICE == "cuda":
            pytest.skip("the kernels for fp8 are for Hopper, and what stands in for them for a CPU")
        stand_in(monkeypatch)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if backend == "triton" and IS_HOPPER else torch.float32
    config = MoEConfig(64, 64, RouterConfig(4, 2))
    whole = MoE(config, backend=backend, precision="fp8", device=DEVICE, dtype=dtype)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=init_device_mesh(DEVICE, (1,)), reshard_after_forward=True)
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused) for layer in (whole, sharded)]
    x = torch.randn(5, 64, device=DEVICE, dtype=dtype)
    for _ in range(3):
        found, expected = sharded(x), whole(x)
        assert torch.equal(found, expected)
        found.float().square().mean().backward()
        expected.float().square().mean().backward()
        for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(one.grad.full_tensor(), other.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.gpu
@pytest.mark.thorough  # half a minute
def test_a_thousand_scheduled_backwards_end_while_fsdp_gathers(world: None) -> None:
    """A kernel that waits on all multiprocessors, and copies of other streams beside it."""
    torch.manual_seed(0)
    config = MoEConfig(256, 128, RouterConfig(16, 2))
    model = torch.nn.Sequential(*(MoE(config, backend="tasks", device=DEVICE, dtype=torch.bfloat16) for _ in range(3)))
    mesh = init_device_mesh(DEVICE, (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for before, after in pairwise(model):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    x = torch.randn(300, 256, device=DEVICE, dtype=torch.bfloat16)
    parameters = list(model.parameters())
    first, differ = None, torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(1000):
        model(x).float().square().mean().backward()
        found = [parameter.grad.to_local() for parameter in parameters]
        first = first or [each.clone() for each in found]
        for left, right in zip(found, first, strict=True):
            differ |= (left != right).any()
        model.zero_grad()
    assert not differ


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16 compute"])
def test_a_sharded_layer_gives_the_gradients_of_a_whole_one(world: None, half: bool) -> None:
    torch.manual_seed(0)
    whole = MoE(MoEConfig(64, 128, RouterConfig(8, 2)), device=DEVICE, dtype=torch.float32)
    sharded = copy.deepcopy(whole)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
    fully_shard(sharded, mesh=init_device_mesh(DEVICE, (1,)), mp_policy=policy)
    x = torch.randn(3, 40, 64, device=DEVICE)
    if half:  # what FSDP casts: the parameters, and x
        whole, x = whole.to(torch.bfloat16), x.to(torch.bfloat16)
    for _ in range(2):  # the second time the parameters have been sharded again
        found, expected = sharded(x), whole(x)
        torch.testing.assert_close(found, expected)
        found.float().square().mean().backward()
        expected.float().square().mean().backward()
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(one, DTensor) and isinstance(one.grad, DTensor), name
        gradient = other.grad.float()
        error = (one.grad.full_tensor() - gradient).norm() / gradient.norm()
        assert error < (1e-2 if half else 1e-5), f"{name}: {error:.1e}"  # bf16 gradients add up in fp32 and in bf16


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("shape", [(5, 16), (2, 5, 16), (16,)], ids=str)
def test_what_a_sharded_layer_returns_may_be_added_to_in_place(shape: tuple[int, ...], world: None) -> None:
    """A view of something else would lose FSDP's hook there, and with it the weights that backward needs."""
    torch.manual_seed(0)
    whole = MoE(MoEConfig(16, 8, RouterConfig(4, 2)), device=DEVICE)
    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=init_device_mesh(DEVICE, (1,)), reshard_after_forward=True)
    x = torch.randn(shape, device=DEVICE)
    for layer in (whole, sharded):
        y = layer(x)
        assert y.shape == x.shape
        y += x
        y.square().sum().backward()
    for (name, one), other in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad), name
