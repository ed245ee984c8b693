"""transformers imported in half the time, without what a language model has no use for.

    with quick_transformers(without=NOT_FOR_TEXT):
        need("transformers.trainer")

One module of transformers finds out what is installed, and others import at once what it has found: scikit-learn for
one way to generate, SciPy for the losses of detectors, torchvision for images, and pandas behind them. Four things
are changed in that module as soon as it is loaded:

- packages in `without` are not there, for transformers alone and for the rest of the process;
- the files of all models are read once, not twice (they are more folders than its cache remembers);
- of a file, only the lines from its last `__all__` on are looked at for that list, not a million lines one by one;
- which distribution a package is from is looked up for one that is asked for, not for all that are installed (from 5.23
  on transformers does so by itself).

For commands, whose process is theirs alone. Where transformers is loaded already, nothing changes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from typing import Any

NOT_FOR_TEXT = ("datasets", "librosa", "scipy", "sklearn", "soundfile", "torchaudio", "torchcodec", "torchvision")
_CHANGED = "transformers.utils.import_utils"
_NOT_THERE = "a_package_that_nobody_has"


@contextmanager
def quick_transformers(without: tuple[str, ...]) -> Iterator[None]:
    finder = _Finder(frozenset(without))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Sees that module being imported."""

    def __init__(self, without: frozenset[str]) -> None:
        self._without = without

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _CHANGED else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_change(module: Any) -> None:
                with _distributions_on_demand():
                    execute(module)
                _hide(module, self._without)
                _remember_all_models(module)
                _look_at_the_end(module)

            loader.exec_module = execute_and_change
        return spec


def _hide(module: Any, packages: frozenset[str]) -> None:
    ask = getattr(module, "_is_package_available", None)
    if ask is None:
        return

    @functools.wraps(ask)
    def is_package_available(name: str, *arguments: Any, **options: Any) -> Any:
        return ask(_NOT_THERE if name in packages else name, *arguments, **options)

    module._is_package_available = is_package_available


def _remember_all_models(module: Any) -> None:
    read: Any = getattr(module, "create_import_structure_from_path", None)
    if hasattr(read, "__wrapped__"):
        module.create_import_structure_from_path = functools.cache(read.__wrapped__)


def _look_at_the_end(module: Any) -> None:
    """What transformers takes from a file are the names in its last `__all__`, so the lines before it do not matter."""
    own = getattr(module, "fetch__all__", None)
    if own is None:
        return

    @functools.wraps(own)
    def fetch__all__(file_content: str) -> Any:
        return own(file_content[file_content.rfind("\n__all__") + 1 :])  # all of it where there is none

    module.fetch__all__ = fetch__all__


@contextmanager
def _distributions_on_demand() -> Iterator[None]:
    from importlib import metadata  # 20 ms, which `amoeba --help` does not need

    own = metadata.packages_distributions
    metadata.packages_distributions = lambda: _Distributions(own)
    try:
        yield
    finally:
        metadata.packages_distributions = own


class _Distributions(Mapping[str, list[str]]):
    """What `packages_distributions` gives. It opens or looks for every file that is installed: a second, for a few
    hundred packages. A package that is not there, and one that is its distribution's only one, need none of it."""

    _ALONE = ("accelerate", "torch")  # no other distribution brings a package of these names

    def __init__(self, read: Any) -> None:
        self._read = functools.cache(read)

    def __getitem__(self, package: str) -> list[str]:
        if find_spec(package) is None:
            raise KeyError(package)
        if package in self._ALONE and _is_a_distribution(package):
            return [package]
        return self._read()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def _is_a_distribution(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
