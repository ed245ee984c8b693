"""AdamW on a GPU: the numbers of the CPU, one launch for all, no waiting, little memory."""

import pytest
import torch
from optimizers import gradients, groups, parameters, same, set_gradients, train
from torch.nn import Parameter

from amoeba.optim import AdamW

pytestmark = pytest.mark.gpu
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
STATES = pytest.mark.parametrize("states", ["float32", "bfloat16"])
SHAPES = ((64, 1024), (3, 347), (5,), (0, 4), (), (70001,), (33, 4096))


def optimizer_of(dtype, states, device="cuda"):
    of = parameters(dtype, device, SHAPES)
    return AdamW(groups(of), lr=1e-2, states=states), of


@BOTH
@STATES
def test_a_gpu_computes_what_the_cpu_does_but_for_a_few_last_bits(dtype, states):
    here, there = optimizer_of(dtype, states, "cpu"), optimizer_of(dtype, states)
    for optimizer, of in (here, there):
        train(optimizer, of, steps=5)
    differ = total = 0
    for on_cpu, on_gpu in zip(here[1], there[1], strict=True):
        one, other = here[0].master_of(on_cpu), there[0].master_of(on_gpu).cpu()
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-4)  # 0.1 % of a step is 1e-5
        differ, total = differ + int((one != other).sum()), total + one.numel()
    assert differ < total / 100


@BOTH
@STATES
def test_clipped_steps_repeat_and_have_the_norm_of_the_cpu(dtype, states):
    first, again, on_cpu = optimizer_of(dtype, states), optimizer_of(dtype, states), optimizer_of(dtype, states, "cpu")
    for optimizer, of in (first, again, on_cpu):
        train(optimizer, of, steps=5, max_norm=0.5)
    assert same(first[0], again[0])
    norms = [optimizer.note_clipping(0.5) for optimizer, _ in (first, on_cpu)]
    assert norms[0].is_cuda and torch.allclose(norms[0].cpu(), norms[1], rtol=1e-5)


def test_parameters_on_a_gpu_and_on_the_cpu_are_clipped_together():
    results = []
    for devices in (("cuda", "cpu"), ("cpu", "cpu")):
        of = [parameters(torch.bfloat16, device, [(300,)])[0] for device in devices]
        optimizer = AdamW(of, lr=1e-2)
        set_gradients(of, [torch.ones(300), torch.full((300,), 2.0)])
        norm = optimizer.note_clipping(2.0**-4)
        assert norm.device == of[0].device
        optimizer.step()
        results.append([optimizer.master_of(parameter).cpu() for parameter in of])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@BOTH
def test_a_step_never_waits_for_the_device_even_when_gradients_move(dtype):
    optimizer, of = optimizer_of(dtype, "bfloat16")
    train(optimizer, of, steps=2, max_norm=1.0)
    moved = [[parameter.grad.clone() for parameter in of] for _ in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for values in moved:
            for parameter, value in zip(of, values, strict=True):
                parameter.grad = value
            optimizer.note_clipping(1.0)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@STATES
def test_gradients_at_any_address_and_strides_give_the_same_bits(states):
    results = []
    for place in (
        torch.Tensor.contiguous,
        lambda value: (
            torch.empty(value.numel() + 1, dtype=value.dtype, device="cuda")[1:].view(value.shape).copy_(value)
        ),
        lambda value: value.t().contiguous().t(),
    ):
        of = parameters(torch.bfloat16, "cuda", [(100, 300), (70001,)])
        optimizer = AdamW(of, states=states)
        for values in gradients(of, 3):
            set_gradients(of, values)
            for parameter in of:
                parameter.grad = place(parameter.grad)
            optimizer.note_clipping(1.0)
            optimizer.step()
        results.append(optimizer)
    assert same(*results[:2]) and same(*results[1:])


def test_a_run_resumed_from_a_checkpoint_goes_on_bit_for_bit():
    whole, of = optimizer_of(torch.bfloat16, "bfloat16")
    train(whole, of, steps=3, max_norm=1.0)
    resumed = [Parameter(parameter.detach().clone()) for parameter in of]
    again = AdamW(groups(resumed), states="bfloat16")
    saved = whole.state_dict()
    on_cpu = {
        key: {name: value if name == "step" else value.cpu() for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    again.load_state_dict({**saved, "state": on_cpu})
    assert again.state[resumed[0]]["remainder"].is_cuda
    for optimizer, trained in ((whole, of), (again, resumed)):
        train(optimizer, trained, steps=3, seed=5, max_norm=1.0)
    assert same(whole, again)


def test_a_step_needs_no_memory_of_the_size_of_a_parameter():
    of = parameters(torch.bfloat16, "cuda", [(4096, 4096)])
    optimizer = AdamW(of)
    train(optimizer, of, steps=2, max_norm=1.0)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.note_clipping(1.0)
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


def test_kernels_move_the_version_of_a_parameter():
    optimizer, of = optimizer_of(torch.bfloat16, "float32")
    before = [parameter._version for parameter in of]
    train(optimizer, of, steps=1)
    assert all(parameter._version > version for parameter, version in zip(of, before, strict=True))


def test_a_step_refuses_to_be_captured_in_a_cuda_graph():
    optimizer, of = optimizer_of(torch.bfloat16, "float32")
    train(optimizer, of, steps=1)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="not to be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_a_model_that_moved_after_its_first_step_is_refused():
    optimizer, of = optimizer_of(torch.bfloat16, "float32", "cpu")
    train(optimizer, of, steps=1)
    for parameter in of:
        parameter.data = parameter.data.cuda()
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ValueError, match="Move the model before the first step"):
        optimizer.step()
