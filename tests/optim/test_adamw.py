"""AdamW is torch's AdamW on fp32 masters; bf16 parameters are these, rounded. All the ways to compute it agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optimizers import SHAPES, by_kernels, everything, gradients, groups, parameters, same, set_gradients, train
from torch.nn import Parameter

from amoeba.optim import AdamW, torch_step
from amoeba.optim.batch import coefficients
from amoeba.optim.split_master import split
from selection import each_value_once, quick

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
STATES = pytest.mark.parametrize("states", ["float32", "bfloat16"])
needs_kernels = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def way(name: str, optimizer: AdamW) -> AdamW:
    if name == "kernels":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels do not run on the CPU here; test_adamw_gpu.py has them")
    return by_kernels(optimizer) if name == "kernels" else optimizer


@each_value_once()
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("precise", [torch.float32, torch.float64], ids=str)
def test_many_steps_of_several_groups_are_those_of_torch(precise, max_norm):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    theirs = [Parameter(parameter.detach().to(precise)) for parameter in theirs]
    train(AdamW(groups(ours), lr=1e-2), ours, steps=60, max_norm=max_norm)
    train(torch.optim.AdamW(groups(theirs), lr=1e-2), theirs, steps=60, max_norm=max_norm)
    for parameter, expected in zip(ours, theirs, strict=True):
        assert torch.allclose(parameter.to(precise), expected, rtol=2e-6, atol=2e-6)


@each_value_once()
@pytest.mark.parametrize("max_norm", [None, 0.5])
@STATES
def test_training_in_bf16_is_training_in_fp32_rounded_bit_for_bit(states, max_norm):
    rounded = parameters(torch.bfloat16)
    masters = [Parameter(parameter.detach().float()) for parameter in rounded]
    in_bf16, in_fp32 = (AdamW(groups(of), lr=1e-4, states=states) for of in (rounded, masters))
    for master in masters:
        master.grad_dtype = None  # any: the same gradients have the same norm
    for values in gradients(rounded, steps=40):
        for of, optimizer in ((rounded, in_bf16), (masters, in_fp32)):
            set_gradients(of, values, torch.bfloat16)
            if max_norm is not None:
                optimizer.note_clipping(max_norm)
            optimizer.step()
    for parameter, master in zip(rounded, masters, strict=True):
        assert torch.equal(in_bf16.master_of(parameter), master)
        assert torch.equal(in_fp32.master_of(master), master)
        assert torch.equal(parameter, split(master.detach())[0])
        if parameter.numel() > 1000:
            assert not torch.equal(parameter.float(), master), "masters are finer than bf16"


def test_steps_too_small_for_bf16_add_up():
    parameter = Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=1e-4, weight_decay=0.0)
    plain = torch.optim.AdamW([lost := Parameter(parameter.detach().clone())], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        lost.grad = torch.ones_like(lost)
        optimizer.step()
        plain.step()
    assert torch.equal(lost, torch.ones_like(lost)), "what happens without masters"
    assert torch.allclose(optimizer.master_of(parameter), torch.tensor(0.99), atol=1e-5)
    assert torch.equal(parameter, torch.full_like(parameter, 0.99))


@needs_kernels
@quick(lambda dtype, states, gradient_dtype: gradient_dtype == dtype or (dtype, states) == (torch.bfloat16, "float32"))
@BOTH
@STATES
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_compute_the_same_bits_as_torch(dtype, states, gradient_dtype):
    optimizers = []
    for name in ("torch", "kernels"):
        of = parameters(dtype)
        optimizer = way(name, AdamW(groups(of), lr=1e-2, states=states, seed=3))
        for parameter in of:
            parameter.grad_dtype = None
        for values in gradients(of, steps=2):
            set_gradients(of, values, gradient_dtype)
            optimizer.step()
        optimizers.append(optimizer)
    assert same(*optimizers)


@pytest.mark.parametrize("by_mkl", [None, True])
def test_roots_are_the_nearest_numbers(by_mkl, monkeypatch):
    """The first two are those that MKL rounds the wrong way."""
    if by_mkl is not None:
        monkeypatch.setattr(torch_step, "_ROOTS_BY_MKL", by_mkl)
    sizes = 10.0 ** torch.randint(-30, 30, (1 << 16,), generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(1 << 16, generator=torch.Generator().manual_seed(1)) * sizes
    numbers = torch.cat([torch.tensor([0.5158079862594604, 0.5028960704803467, 0.0, 1e-45, torch.inf]), drawn])
    assert torch.equal(torch_step.nearest_root(numbers), torch.from_numpy(np.sqrt(numbers.numpy())))


@needs_kernels
@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_options_may_be_whole_numbers(name):
    results = []
    for kind in (int, float):
        of = parameters(torch.bfloat16, shapes=[(40,)])
        options = {"lr": kind(1), "betas": (kind(0), kind(0)), "weight_decay": kind(0), "eps": kind(0)}
        optimizer = way(name, AdamW(of, **options))
        train(optimizer, of, steps=1)
        assert all(type(value) is float for value in coefficients(optimizer.param_groups[0], 1)[:-1])
        results.append(optimizer)
    assert same(*results)


@needs_kernels
@BOTH
def test_kernels_find_the_norm_and_clip_by_it(dtype):
    optimizers, norms = [], []
    for name in ("torch", "kernels"):
        of = parameters(dtype)
        optimizer = way(name, AdamW(of))
        set_gradients(of, next(gradients(of, 1)))
        norms.append(optimizer.note_clipping(0.1))
        optimizer._clipping = torch.tensor(0.0625) if optimizer._clipping < 1 else None  # of the same bits for both
        optimizer.step()
        optimizers.append(optimizer)
    exact = torch.cat([value.double().flatten() for value in next(gradients(of, 1))]).norm()
    for norm in norms:
        assert norm.dtype == torch.float32 and norm.dim() == 0
        assert abs(norm.item() / exact.item() - 1) < 1e-5
    assert same(*optimizers)


@needs_kernels
@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_gradients_may_lie_anyhow_in_memory(name):
    def trained(place):
        of = parameters(torch.bfloat16, shapes=[(36, 64), (1100,)])
        optimizer = way(name, AdamW(of, lr=1e-2))
        for values in gradients(of, 1):
            set_gradients(of, [place(value) for value in values])
            norm = optimizer.note_clipping(1.0)
            optimizer.step()
        return [*everything(optimizer), norm]

    def shifted(value):
        return torch.empty(value.numel() + 1, dtype=value.dtype)[1:].view(value.shape).copy_(value)

    def strided(value):
        return torch.stack((value, value), -1)[..., 0]

    def transposed(value):
        return value.t().contiguous().t()

    expected = trained(torch.Tensor.contiguous)
    for place in (shifted, strided, transposed):
        for found, wanted in zip(trained(place), expected, strict=True):
            assert torch.equal(found, wanted), place.__name__


@needs_kernels
@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_a_parameter_that_lies_transposed_in_memory_trains_like_another(name):
    results = []
    for transposed in (False, True):
        (parameter,) = parameters(torch.bfloat16, shapes=[(40, 60)])
        if transposed:
            parameter = Parameter(parameter.detach().t().contiguous().t())
        optimizer = way(name, AdamW([parameter], lr=1e-2))
        train(optimizer, [parameter], steps=2)
        results.append(optimizer.master_of(parameter))
    assert torch.equal(*results)


@needs_kernels
@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_what_is_not_a_number_is_seen_in_the_parameter(name):
    (parameter,) = parameters(torch.bfloat16, shapes=[(1024,)])
    parameter.grad_dtype = None
    optimizer = way(name, AdamW([parameter], states="bfloat16"))
    gradient = torch.zeros(1024)
    gradient[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    gradient.view(torch.int32)[3] = 0x7FFFFFFF  # the NaN that a GPU computes
    set_gradients([parameter], [gradient], torch.float32)
    optimizer.step()
    assert parameter[:4].isnan().all() and parameter[4:].isfinite().all()
    assert optimizer.state[parameter]["exp_avg"][:4].isfinite().logical_not().all()


@needs_kernels
@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_who_keeps_something_of_a_parameter_sees_by_its_version_that_it_changed(name):
    of = parameters(torch.bfloat16, shapes=[(8,), (9,)])
    optimizer = way(name, AdamW(of))
    before = [parameter._version for parameter in of]
    train(optimizer, of, steps=1)
    assert all(parameter._version > version for parameter, version in zip(of, before, strict=True))


def test_chunks_do_not_show(monkeypatch):
    results = []
    for size in (torch_step.CHUNK, 1000):
        monkeypatch.setattr(torch_step, "CHUNK", size)
        of = parameters(torch.bfloat16)
        train(optimizer := AdamW(of, states="bfloat16"), of, steps=2)
        results.append(optimizer)
    assert same(*results)


# Clipping


def test_clipping_is_that_of_torch_and_leaves_the_gradients_as_they_are():
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    (values,) = gradients(ours, 1)
    set_gradients(ours, values)
    set_gradients(theirs, values)
    optimizer = AdamW(ours)
    norm, expected = optimizer.note_clipping(2.0), torch.nn.utils.clip_grad_norm_(theirs, 2.0)
    assert norm > 2.0 and torch.allclose(norm, expected)
    for parameter, value, clipped in zip(ours, values, theirs, strict=True):
        assert torch.equal(parameter.grad, value.float())
        assert torch.allclose(parameter.grad * optimizer._clipping, clipped.grad)


@pytest.mark.parametrize("forgotten_by", ["step", "zero_grad"])
def test_clipping_is_for_one_step(forgotten_by):
    of = parameters(torch.float32)
    optimizer = AdamW(of)
    train(optimizer, of, steps=1, max_norm=1e-3)
    if forgotten_by == "zero_grad":
        set_gradients(of, next(gradients(of, 1)))
        optimizer.note_clipping(1e-3)
        optimizer.zero_grad()
    other = AdamW(unclipped := [Parameter(parameter.detach().clone()) for parameter in of])
    other.load_state_dict(optimizer.state_dict())
    train(optimizer, of, steps=1)
    train(other, unclipped, steps=1)
    assert same(optimizer, other)


def test_a_norm_below_the_limit_changes_nothing():
    of, plain = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = AdamW(of), AdamW(plain)
    train(optimizer, of, steps=2, max_norm=1e9)
    train(other, plain, steps=2)
    assert same(optimizer, other)


def test_the_norm_of_bf16_gradients_has_the_digits_of_fp32():
    """torch's own is rounded to bf16, gradient by gradient."""
    of = parameters(torch.bfloat16)
    optimizer = AdamW(of)
    (values,) = gradients(of, 1)
    set_gradients(of, values)
    exact = torch.cat([value.double().flatten() for value in values]).norm()
    assert abs(optimizer.note_clipping(1.0).double() / exact - 1) < 1e-5


# Averages in bf16


def test_the_average_of_squares_follows_in_bf16_what_it_would_not_if_it_were_rounded_to_nearest():
    (parameter,) = parameters(torch.bfloat16, shapes=[(4096,)])
    optimizer = AdamW([parameter], lr=0.0, betas=(0.9, 0.999), states="bfloat16")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    average = optimizer.state[parameter]["exp_avg_sq"]
    assert average.dtype == torch.bfloat16
    average.fill_(1.0)
    nearest = average.clone()
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(1000):
        optimizer.step()
        nearest.mul_(0.999)
    assert (nearest == 1).all(), "0.999 is nearer to 1 than to the number below it"
    assert abs(average.double().mean() - 0.999**1000) < 0.01


@STATES
def test_two_trainings_are_bitwise_equal_and_another_seed_shows_in_bf16_averages_alone(states):
    runs = []
    for seed in (0, 0, 1):
        of = parameters(torch.bfloat16)
        train(optimizer := AdamW(of, states=states, seed=seed), of, steps=4)
        runs.append(optimizer)
    assert same(*runs[:2])
    assert same(*runs[1:]) == (states == "float32")


def test_shapes_cover_what_they_should():
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    assert 0 in sizes and 1 in sizes and max(sizes) > 16384
