"""The rules of dev/source_rules.py see what breaks them, and let pass what is right."""

import ast

import pytest

from source_rules import (
    addresses_outside_the_accessor,
    allocations_without_dtype_or_device,
    asserts_that_guard,
    divisions_of_unsaid_rounding,
    long_names_of_tests,
    private_names_of_torch,
    products_in_unsaid_precision,
)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (long_names_of_tests, f"def test_{'a' * 71}(): pass"),
        (allocations_without_dtype_or_device, "torch.empty(3)"),
        (allocations_without_dtype_or_device, "torch.empty(3, dtype=d)"),
        (allocations_without_dtype_or_device, "y = f(torch.zeros((3, 4), device=d).sum())"),
        (allocations_without_dtype_or_device, "torch.tensor([1.0], **options)"),
        (allocations_without_dtype_or_device, "torch.FloatTensor(3)"),
        (allocations_without_dtype_or_device, "from torch import Tensor, zeros"),
        (addresses_outside_the_accessor, "call(x.data_ptr())"),
        (addresses_outside_the_accessor, "map(Tensor.data_ptr, tensors)"),
        (private_names_of_torch, "torch._C._len_torch_dispatch_stack()"),
        (private_names_of_torch, "torch.cuda._sleep(3)"),
        (private_names_of_torch, "from torch.utils._pytree import tree_leaves"),
        (products_in_unsaid_precision, "y = tl.dot(a, b, y)"),
        (products_in_unsaid_precision, "y = tl.dot(a, b, y, input_precision='tf32')"),
        (divisions_of_unsaid_rounding, "y = tl.fdiv(a, 6.0, ieee_rounding=True)"),
        (asserts_that_guard, "assert x.stride(1) == 1"),
        (asserts_that_guard, "assert x is not None and x.dim() == 2"),
        (asserts_that_guard, "assert x is not None or y"),
    ],
)
def test_the_rules_see_what_breaks_them(rule, code: str) -> None:
    assert list(rule(ast.parse(code)))


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (allocations_without_dtype_or_device, "torch.empty(3, dtype=d, device=x.device)"),
        (allocations_without_dtype_or_device, "torch.empty_like(x); x.new_zeros(3); tl.zeros((3,), tl.float32)"),
        (private_names_of_torch, "f'{torch.__version__}'; torch.empty_like(x); module._modules"),
        (products_in_unsaid_precision, 'tl.dot(a, b, input_precision="ieee"); torch.dot(a, b)'),
        (asserts_that_guard, "assert x is not None and isinstance(y, Tensor)"),
    ],
)
def test_the_rules_let_pass_what_is_right(rule, code: str) -> None:
    assert not list(rule(ast.parse(code)))
