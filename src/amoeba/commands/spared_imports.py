"""What transformers imports beside itself, where it is installed, and no language model of ours has a use for.

    with spared_imports(NOT_FOR_TEXT):
        need("transformers.trainer")

transformers asks one function of its own whether a package is there and imports it at once, scikit-learn for one way to
generate, SciPy for the losses of detectors, torchvision for images: with these and pandas behind them, half as much
again as transformers itself. In here the answer is no, to transformers alone and for the rest of the process, as on a
machine without them. For commands, whose process is theirs; where transformers is loaded already nothing changes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

NOT_FOR_TEXT = ("datasets", "librosa", "scipy", "sklearn", "soundfile", "torchaudio", "torchcodec", "torchvision")
_ASKED = "transformers.utils.import_utils"  # where transformers finds out what is installed
_NOT_THERE = "a_package_that_nobody_has"


@contextmanager
def spared_imports(packages: tuple[str, ...]) -> Iterator[None]:
    finder = _Finder(frozenset(packages))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder:
    """Sees that one module being imported, and changes it as soon as it is there."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _ASKED else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def run_and_change(module: Any) -> None:
                run(module)
                self._hide_packages(module)
                _list_models_once(module)

            loader.exec_module = run_and_change
        return spec

    def _hide_packages(self, module: Any) -> None:
        ask = getattr(module, "_is_package_available", None)
        packages = self._packages
        if ask is not None:

            @functools.wraps(ask)
            def is_package_available(name: str, *arguments: Any, **options: Any) -> Any:
                return ask(_NOT_THERE if name in packages else name, *arguments, **options)

            module._is_package_available = is_package_available


def _list_models_once(module: Any) -> None:
    """transformers reads the files of all its models twice: they are more folders than its cache remembers."""
    read = getattr(module, "create_import_structure_from_path", None)
    if hasattr(read, "__wrapped__"):
        module.create_import_structure_from_path = functools.cache(read.__wrapped__)
