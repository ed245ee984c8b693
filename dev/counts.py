"""Counts that show whether the source stays easy to live in.

    python dev/counts.py [--list] [FOLDER OF THE CHECKOUT]

--list names the offenders: long functions, many parameters, small files with one importer, repeated file names.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
from collections import Counter, defaultdict
from pathlib import Path

LONGEST, PARAMETERS, SMALL, ROOMS = 120, 30, 100, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", nargs="?", default=Path(__file__).parents[1], type=Path)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    root: Path = arguments.root
    files = sorted((root / "src").rglob("*.py"))
    core = [path for path in (root / "src").rglob("*") if path.suffix in (".cpp", ".h")]
    tests = sorted((root / "tests").rglob("*.py"))
    long, wide = [], []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            parameters = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            where = f"{path.relative_to(root)}:{node.lineno} {node.name}"
            if lines > LONGEST:
                long.append((lines, where))
            if parameters > PARAMETERS:
                wide.append((parameters, where))
    lonely = sorted(path for path in small_files(files) if len(importers(path, root, files)) == 1)
    names = Counter(path.name for path in files if path.name != "__init__.py")
    repeated = {name: count for name, count in names.items() if count > ROOMS}
    variables = set()
    for path in files:
        variables |= set(re.findall(r"[\"'](AMOEBA_[A-Z0-9_]+)[\"']", path.read_text()))
    tables = {
        "lines of source": sum(lines_of(path) for path in (*files, *core)),
        "of them in C++": sum(lines_of(path) for path in core),
        "files of source": len(files),
        "modules at the root": len(list((root / "src/amoeba").glob("*.py"))),
        "lines of tests": sum(lines_of(path) for path in tests),
        "files of tests": len(tests),
        f"functions above {LONGEST} lines": len(long),
        f"functions above {PARAMETERS} parameters": len(wide),
        f"files below {SMALL} lines with one importer": len(lonely),
        f"file names in more than {ROOMS} rooms": len(repeated),
        "environment variables AMOEBA_*": len(variables),
    }
    for name, value in tables.items():
        print(f"{value:8,}  {name}")
    by_room: dict[str, int] = defaultdict(int)
    for path in files:
        inside = path.relative_to(root / "src/amoeba")
        by_room[inside.parts[0] if len(inside.parts) > 1 else "(root)"] += lines_of(path)
    print("\n" + "  ".join(f"{room} {count:,}" for room, count in sorted(by_room.items(), key=lambda item: -item[1])))
    if arguments.list:
        print("\nlong functions:", *sorted(long, reverse=True), sep="\n  ")
        print("\nmany parameters:", *sorted(wide, reverse=True), sep="\n  ")
        print("\nsmall files with one importer:", *(path.relative_to(root) for path in lonely), sep="\n  ")
        print("\nrepeated names:", repeated)
        print("\nenvironment variables:", *sorted(variables))


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def small_files(files: list[Path]) -> list[Path]:
    return [path for path in files if path.name not in ("__init__.py", "__main__.py") and lines_of(path) < SMALL]


def importers(path: Path, root: Path, files: list[Path]) -> list[Path]:
    module = ".".join(path.relative_to(root / "src").with_suffix("").parts)
    return [other for other in files if other != path and module in imported(other)]


@functools.cache
def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


if __name__ == "__main__":
    main()
