"""Rules about the source that no other linter has; `make lint` runs them.

    python dev/source_rules.py

Every allocation names dtype and device, addresses are taken in one place, private names of torch are used in one
file, products and divisions in kernels say their precision, no assert guards a caller, test files have names of their
own, and names of tests fit a line.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "amoeba"
Rule = Callable[[ast.AST], Iterator[tuple[int, str]]]
LONGEST_NAME = 75

# These take dtype or device from torch's defaults, which belong to the user. `*_like` and `new_*` take both from
# a tensor. The rest of torch's constructors (windows, frequencies, sparse and quantised tensors) is not used here.
ALLOCATORS = (
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip
# of the default dtype and device whatever one does
NEVER = ("Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor")


def main() -> int:
    found = [line for rule, paths in rules().items() for path in paths for line in broken(path, rule)]
    found += [f"tests: two files have the name {name}" for name in repeated_names(ROOT / "tests")]
    print(*found, sep="\n") if found else print("Source rules: all kept.")
    return int(bool(found))


def rules() -> dict[Rule, list[Path]]:
    """Where each rule holds."""
    files = sorted(SOURCE.rglob("*.py"))
    serves_halves_alone, cpu, backends = SOURCE / "kernels" / "attention", SOURCE / "cpu", SOURCE / "backends"
    return {
        allocations_without_dtype_or_device: files,
        addresses_outside_the_accessor: [
            path for path in (*cpu.rglob("*.py"), *backends.rglob("*.py")) if path.name != "pointers.py"
        ],
        private_names_of_torch: [path for path in files if path.name != "torch_internals.py"],
        products_in_unsaid_precision: [
            path for path in (SOURCE / "kernels").rglob("*.py") if path.parent != serves_halves_alone
        ],
        divisions_of_unsaid_rounding: list((SOURCE / "kernels").rglob("*.py")),
        asserts_that_guard: files,
        long_names_of_tests: sorted((ROOT / "tests").rglob("test_*.py")),
    }


def broken(path: Path, rule: Rule) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in rule(parsed(path))]


def long_names_of_tests(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """So that `def`, the name and its arguments are one line, and so is what pytest says of it."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > LONGEST_NAME:
            yield node.lineno, f"a name of {len(node.name)} characters, more than {LONGEST_NAME}"


def repeated_names(tests: Path) -> list[str]:
    """pytest imports them by their names alone: of a second one it would collect none, and then nothing at all."""
    names = sorted(path.name for path in tests.rglob("test_*.py"))
    return [name for name, after in itertools.pairwise(names) if name == after]


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


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


def divisions_of_unsaid_rounding(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.fdiv":
            yield node.lineno, "take tl.div_rn: Triton 3.6 does not look at the ieee_rounding of tl.fdiv"


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


if __name__ == "__main__":
    sys.exit(main())
