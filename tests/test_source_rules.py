"""Rules about the source itself: what makes memory says all of it, addresses are taken in one place, and nothing that
guards a caller vanishes under `python -O`."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "amoeba"

# These take dtype or device from torch's defaults, which belong to the user. `*_like` and `new_*` take both from
# a tensor. The rest of torch's constructors (windows, frequencies, sparse and quantised tensors) is not used here.
ALLOCATORS = (
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
# of the default dtype and device whatever one does
NEVER = ("Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor")


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def broken_rules(path: Path, rule) -> list[str]:
    return [f"{path.relative_to(SOURCE.parent)}:{line}: {what}" for line, what in rule(parsed(path))]


def allocations_without_dtype_or_device(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name in ALLOCATORS:
                    yield node.lineno, f"call torch.{alias.name} by its full name, so that this rule sees it"
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        name, named = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name in NEVER:
            yield node.lineno, f"torch.{name}(...) is of torch's default dtype; use torch.tensor or torch.empty"
        missing = [word for word in ("dtype", "device") if word not in named]
        if name in ALLOCATORS and missing:
            yield node.lineno, f"torch.{name}(...) without {' and '.join(missing)}"


def addresses_outside_the_accessor(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "_data_ptr", "const_data_ptr"):
            yield node.lineno, "take addresses with amoeba.cpu.pointers, which checks what is there"


def private_names_of_torch(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        names = [node.module or "", *(each.name for each in node.names)] if isinstance(node, ast.ImportFrom) else [""]
        if names[0].split(".")[0] == "torch" and any(part.startswith("_") for part in ".".join(names).split(".")):
            yield node.lineno, "ask amoeba.core.torch_internals for what torch has no public name for"
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in ("torch", "forward_ad"):
                yield node.lineno, "ask amoeba.core.torch_internals for what torch has no public name for"


def products_in_unsaid_precision(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """tl.dot of fp32 numbers is TF32 unless it is told otherwise."""
    for node in nodes(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "dot"):
            continue
        if ast.unparse(node.func) != "tl.dot":
            continue
        if not any(each.arg == "input_precision" and ast.unparse(each.value) == "'ieee'" for each in node.keywords):
            yield node.lineno, f'{ast.unparse(node)} without input_precision="ieee"'


def asserts_that_guard(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Assert) and not narrows(node.test):
            yield node.lineno, f"assert {ast.unparse(node.test)}: raise an exception, python -O drops asserts"


def narrows(test: ast.expr) -> bool:
    """Tells a type checker what is so by construction: `x is not None`, isinstance, and `and` of these."""
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and all(narrows(value) for value in test.values)
    if isinstance(test, ast.Compare):
        none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        return none and all(isinstance(operator, ast.IsNot) for operator in test.ops)
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance"


def test_every_allocation_names_its_dtype_and_its_device() -> None:
    found = [line for path in files() for line in broken_rules(path, allocations_without_dtype_or_device)]
    assert not found, "these follow torch.set_default_dtype and torch.device(...):\n" + "\n".join(found)


def test_addresses_are_taken_by_the_checked_accessor_alone() -> None:
    folders = [SOURCE / "cpu", SOURCE / "backends"]
    checked = [path for path in files() if path.parent in folders and path != SOURCE / "cpu" / "pointers.py"]
    assert len(checked) > 20
    found = [line for path in checked for line in broken_rules(path, addresses_outside_the_accessor)]
    assert not found, "\n".join(found)


def test_private_names_of_torch_are_used_in_one_file_alone() -> None:
    others = [path for path in files() if path.name != "torch_internals.py"]
    found = [line for path in others for line in broken_rules(path, private_names_of_torch)]
    assert not found, "\n".join(found)


def test_products_of_fp32_numbers_are_in_full_precision() -> None:
    serves_halves_alone = SOURCE / "kernels" / "attention"
    kernels = [path for path in (SOURCE / "kernels").rglob("*.py") if path.parent != serves_halves_alone]
    found = [line for path in kernels for line in broken_rules(path, products_in_unsaid_precision)]
    assert not found, "\n".join(found)


def test_no_assert_guards_memory_or_input() -> None:
    found = [line for path in files() for line in broken_rules(path, asserts_that_guard)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
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


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by their names alone: of a second one it would collect none, and then nothing at all."""
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, after in itertools.pairwise(names) if name == after] == []
