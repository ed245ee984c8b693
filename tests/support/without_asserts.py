"""Our modules as `python -O` has them, without their asserts. Torch keeps its own: under -O the thousand files that it
imports would be compiled first, which takes longer than what is to be tried.

    without_asserts.install("src")        # before the first import of amoeba
"""

import sys
from importlib.machinery import FileFinder, SourceFileLoader
from types import CodeType

loaded: list[str] = []


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        loaded.append(fullname)
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True, optimize=1)


def install(folder: str) -> None:
    def finder(path: str) -> FileFinder:
        if not path.startswith(folder):
            raise ImportError(path)  # whoever comes next on the list finds it
        return FileFinder(path, (_Loader, [".py"]))

    sys.path_hooks.insert(0, finder)
    sys.path_importer_cache.clear()
