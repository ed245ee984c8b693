"""The compile cache on a hostile machine: whatever is wrong with it, a right library is loaded, or a reason is given.

A small source of two units stands for the core; it is compiled in a fraction of a second.
"""

import ctypes
import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amoeba.cpu import build, library_cache
from amoeba.system.cpu_features import Level

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine"),
    pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="the core is built on Linux and macOS"),
]
AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
SOMEBODY = 54321
SIGNATURES = {"small_answer": (ctypes.c_int, ())}
ROOT = Path(build.__file__).parents[2]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "small.h").write_text("int more();\n")
    (folder / "small.cpp").write_text(
        '#include "small.h"\nextern "C" int small_answer() { return 40 + more(); }\n'
        f"// {tmp_path}: another test's failures are not this one's\n"
    )
    (folder / "small_more.cpp").write_text('#include "small.h"\nint more() { return 2; }\n')
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache folder will be. Nothing was said and nothing private was made yet."""
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AMOEBA_CPU_CORE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library_cache, "_warned", set())
    monkeypatch.setattr(library_cache, "_private", {})
    return tmp_path / "cache"


def answer(sources: Path) -> int:
    def make(file: Path) -> int:
        return build.load(file, SIGNATURES).small_answer()

    return build.with_library("small", make, sources)


def compiled(sources: Path) -> Path:
    return build.compiled_library("small", sources=sources)


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def compiler_that(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """CXX is a script of this body, which writes a line to the file that is returned whenever it compiles or links."""
    script, log = folder / "compiler", folder / "log"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake && exit 0\necho ran >> {log}\n{body}\n')
    script.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(script))
    return log


def test_a_library_is_compiled_once_and_kept_with_its_record(sources, cache, tmp_path, monkeypatch):
    log = compiler_that(tmp_path, monkeypatch, f'exec {COMPILER} "$@"')
    assert answer(sources) == 42
    assert log.read_text().count("ran") == 3, "two units and the link"
    first = compiled(sources)
    assert compiled(sources) == first and log.read_text().count("ran") == 3
    assert {file.suffix for file in cache.iterdir()} == {".so", ".json", ".lock"}, "nothing half-built is left behind"
    assert library_cache.why_not_verified(first) is None
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_changed_header_or_unit_is_another_library(sources: Path, cache: Path) -> None:
    first = compiled(sources)
    (sources / "small_more.cpp").write_text('#include "small.h"\nint more() { return 3; }\n')
    second = compiled(sources)
    (sources / "small.h").write_text("int more();  // changed\n")
    assert len({first, second, compiled(sources)}) == 3
    assert answer(sources) == 43


# ---------------------------------------------------------------------------------------------- damaged libraries


def flip_a_byte(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def put_a_foreign_one(library: Path) -> None:
    library.write_bytes(b"\x7fELF something that somebody else compiled")


def link_elsewhere(library: Path) -> None:
    moved = library.parent / "moved"
    library.rename(moved)
    library.symlink_to(moved)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda library: os.truncate(library, library.stat().st_size // 2),
    "empty": lambda library: os.truncate(library, 0),
    "a flipped byte": flip_a_byte,
    "another library": put_a_foreign_one,
    "a symbolic link": link_elsewhere,
    "writable by everybody": lambda library: library.chmod(0o777),
    "of somebody else": lambda library: os.chown(library, SOMEBODY, SOMEBODY),
    "without a record": lambda library: library.with_suffix(".json").unlink(),
    "with an empty record": lambda library: library.with_suffix(".json").write_text(""),
    "with a record that is a list": lambda library: library.with_suffix(".json").write_text("[]"),
    "with a record that everybody may write": lambda library: library.with_suffix(".json").chmod(0o666),
    "with a record of somebody else": lambda library: os.chown(library.with_suffix(".json"), SOMEBODY, SOMEBODY),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_not_what_was_written_is_compiled_again(damage, sources, cache, caplog):
    if "somebody" in damage and not AS_ROOT:
        pytest.skip("only root gives files away")
    library = compiled(sources)
    DAMAGES[damage](library)
    assert library_cache.why_not_verified(library) is not None
    assert answer(sources) == 42
    assert library_cache.find(cache, library.stem) == library, "and it is whole again"
    assert caplog.text.count("is not loaded: it ") == 1


def test_a_library_under_another_ones_name_is_not_taken_for_it(sources: Path, cache: Path) -> None:
    library = compiled(sources)
    renamed = cache / "small-other.so"
    library.rename(renamed)
    library.with_suffix(".json").rename(renamed.with_suffix(".json"))
    assert library_cache.why_not_verified(renamed) is not None


def test_a_library_that_lacks_a_function_is_compiled_again(sources, cache, tmp_path, caplog):
    """Though its record is right."""
    library = compiled(sources)
    other = tmp_path / "other.so"
    (tmp_path / "other.cpp").write_text('extern "C" int another() { return 1; }')
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(tmp_path / "other.cpp"), "-o", str(other)], check=True)
    library_cache.keep(other, cache, library.stem, "")
    assert answer(sources) == 42
    assert "small_answer; compiling it again" in caplog.text
    assert library_cache.why_not_verified(library) is not None, "the next process compiles it into the cache"


def test_a_library_that_lacks_a_function_is_a_reason_where_nothing_compiles(sources, cache, monkeypatch):
    compiled(sources)
    without_compiler(monkeypatch)
    with pytest.raises(build.CoreUnavailable, match=r"no C\+\+ compiler"):
        build.with_library("small", lambda file: build.load(file, {"missing": (None, ())}), sources)


# ------------------------------------------------------------------------------------------------ unusable folders


def a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("")


def under_a_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("")
    monkeypatch.setenv("AMOEBA_CACHE", str(cache / "deeper" / "cache"))


def a_dangling_link(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.symlink_to(cache.parent / "nowhere")


def writable_by_everybody(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(0o777)


def writable_by_the_group(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    cache.chmod(0o770)


def below_one_that_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writable_by_everybody(cache, monkeypatch)
    monkeypatch.setenv("AMOEBA_CACHE", str(cache / "deeper"))


def of_somebody_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not AS_ROOT:
        pytest.skip("only root gives folders away")
    cache.mkdir()
    os.chown(cache, SOMEBODY, SOMEBODY)


def not_writable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if AS_ROOT:
        pytest.skip("root writes everywhere")
    cache.mkdir(mode=0o500)


def not_a_file_system_for_files(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("there is no /proc")
    monkeypatch.setenv("AMOEBA_CACHE", "/proc/amoeba")


def without_a_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AMOEBA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)


def full_when_it_is_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = library_cache.keep

    def full(built: Path, folder: Path, stem: str, compiler: str) -> Path:
        if folder == cache:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return keep(built, folder, stem, compiler)

    monkeypatch.setattr(library_cache, "keep", full)


def full_when_the_compiler_writes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f'case "$*" in *{cache}*) echo "fatal error: {os.strerror(errno.ENOSPC)}" >&2; exit 1;; esac'
    compiler_that(cache.parent, monkeypatch, f'{says}\nexec {COMPILER} "$@"')


UNUSABLE = [
    a_file, under_a_file, a_dangling_link, writable_by_everybody, writable_by_the_group, below_one_that_is,
    of_somebody_else, not_writable, not_a_file_system_for_files, without_a_home, full_when_it_is_written,
    full_when_the_compiler_writes,
]  # fmt: skip


@pytest.mark.parametrize("unusable", UNUSABLE, ids=lambda make: make.__name__)
def test_an_unusable_folder_is_replaced_by_a_private_one_with_a_warning(unusable, sources, cache, monkeypatch, caplog):
    unusable(cache, monkeypatch)
    for _ in range(3):
        assert answer(sources) == 42
    private = library_cache.private_folder()
    assert compiled(sources).parent == private and stat.S_IMODE(private.stat().st_mode) == 0o700
    said = [record for record in caplog.records if "name another folder in AMOEBA_CACHE" in record.message]
    assert len(said) == 1 and said[0].levelno == logging.WARNING
    library_cache._remove(os.getpid(), private)
    assert not private.exists()


def test_a_shared_folder_in_which_nobody_can_replace_anothers_files_serves(sources: Path, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o1777)
    assert answer(sources) == 42
    assert compiled(sources).parent == cache


def test_the_default_folder_is_closed_to_the_group(sources, cache, tmp_path, monkeypatch):
    """An older version made it as the umask said."""
    monkeypatch.delenv("AMOEBA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "amoeba").mkdir()
    (tmp_path / "amoeba").chmod(0o775)
    assert compiled(sources).parent == tmp_path / "amoeba"
    assert stat.S_IMODE((tmp_path / "amoeba").stat().st_mode) == 0o755


def test_a_cache_that_can_only_be_read_serves_what_it_has(sources, cache, monkeypatch, caplog):
    library = compiled(sources)
    caplog.clear()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(library_cache, "one_at_a_time", refuse)
    monkeypatch.setattr(library_cache, "keep", refuse)
    assert compiled(sources) == library and not caplog.records


def test_without_any_folder_the_reason_is_given(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**_: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "no usable temporary directory")

    cache.write_text("")
    monkeypatch.setattr(library_cache.tempfile, "mkdtemp", nowhere)
    with pytest.raises(build.CoreUnavailable, match=r"no usable temporary directory.*name one in AMOEBA_CACHE"):
        compiled(sources)


# ------------------------------------------------------------------------------------------------------- compilers


def test_a_warm_cache_serves_without_a_compiler(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled(sources)
    without_compiler(monkeypatch)
    assert compiled(sources) == library
    assert answer(sources) == 42


def test_a_cold_cache_without_a_compiler_names_it(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    with pytest.raises(build.CoreUnavailable, match=r"no C\+\+ compiler \(no-such-compiler\).*install g\+\+"):
        compiled(sources)


def test_a_broken_compiler_says_why_and_is_asked_once(sources, cache, tmp_path, monkeypatch):
    log = compiler_that(tmp_path, monkeypatch, 'echo "small.cpp:1: fatal error: no such header" >&2; exit 1')
    for _ in range(3):
        with pytest.raises(build.CoreUnavailable, match=r"no such header; set CXX"):
            compiled(sources)
    assert log.read_text().count("ran") <= 2, "the units, at the same time, and never again"
    assert [file.suffix for file in cache.iterdir()] == [".lock"]


def test_beside_a_broken_compiler_what_another_one_made_serves(sources, cache, tmp_path, monkeypatch, caplog):
    library = compiled(sources)
    compiler_that(tmp_path, monkeypatch, "echo error >&2; exit 1")
    assert compiled(sources) == library
    assert "using the library that another compiler built" in caplog.text


def test_a_compiler_may_come_with_arguments(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env {COMPILER}")
    assert answer(sources) == 42
    first = compiled(sources)
    monkeypatch.setenv("CXX", f"{COMPILER} -fno-inline")
    assert compiled(sources) != first


def test_a_long_compilation_is_announced_as_it_is(sources, cache, monkeypatch, caplog):
    monkeypatch.setitem(build._ONE_CORE_SECONDS, "small", 60)
    monkeypatch.setattr(build, "usable_cores", lambda: 16)
    compiled(sources)
    (said,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert "part small (2 units, 2 at a time)" in said and "about 30 s, once; kept in" in said


# ----------------------------------------------------------------------------------------- carried by a wheel


OLD, NEW = (Level(name, frozenset(), "-g0") for name in ("old", "new"))


@pytest.fixture
def carried(tmp_path: Path, sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a wheel for two kinds of CPU, both of which this one is, without a compiler and with an empty cache."""
    for kind in (OLD, NEW):
        folder = tmp_path / "carried" / kind.name
        folder.mkdir(parents=True)
        shutil.copy2(build.compiled_library("small", kind.compiler_flag, sources), folder)
    shutil.rmtree(cache)
    without_compiler(monkeypatch)
    monkeypatch.setattr(build, "CARRIED", tmp_path / "carried")
    monkeypatch.setattr(build, "fitting_levels", lambda: [NEW, OLD])
    return tmp_path / "carried"


def test_a_wheels_library_serves_without_a_compiler(sources: Path, carried: Path, cache: Path) -> None:
    assert answer(sources) == 42
    assert not cache.exists(), "nothing is compiled, nothing is looked for"


def test_the_newest_kind_that_the_wheel_has_is_chosen(sources: Path, carried: Path, monkeypatch) -> None:
    """`amoeba doctor` says which."""
    monkeypatch.setattr(build, "LIBRARIES", {"small": sources})

    def told() -> tuple[str | None, str]:
        (state,) = build.library_states()[1]
        return state.variant, state.what

    assert told() == ("new", "from the wheel, variant new")
    shutil.rmtree(carried / "new")
    assert told() == ("old", "from the wheel, variant old")
    shutil.rmtree(carried)
    assert told() == (None, "not compiled yet: about 0 s")


def test_a_wheels_library_of_other_sources_is_refused(sources: Path, carried: Path, monkeypatch, caplog) -> None:
    (sources / "small_more.cpp").write_text('#include "small.h"\nint more() { return 3; }\n')
    with pytest.raises(build.CoreUnavailable, match=r"no C\+\+ compiler"):
        answer(sources)
    assert "not compiled from the sources of this package" in caplog.text
    monkeypatch.delenv("CXX")
    assert answer(sources) == 43


def test_a_wheels_library_that_does_not_load_is_compiled_here(
    sources: Path, carried: Path, monkeypatch, caplog
) -> None:
    for library in carried.glob("*/*.so"):
        put_a_foreign_one(library)
    monkeypatch.delenv("CXX")
    assert answer(sources) == 42
    assert "of this wheel, the compiled library does not load" in caplog.text


# --------------------------------------------------------------------------------------------- several processes


def wait_for(children: list[int], seconds: float = 60) -> list[int]:
    """Their exit codes."""
    deadline, codes = time.monotonic() + seconds, {}
    while len(codes) < len(children) and time.monotonic() < deadline:
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return list(codes.values())


def in_a_child(job: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if job() else 1)
        except BaseException:
            os._exit(2)
    return child


def test_processes_that_start_together_compile_once(sources, cache, tmp_path, monkeypatch):
    log = compiler_that(tmp_path, monkeypatch, f'sleep 0.3\nexec {COMPILER} "$@"')
    children = [in_a_child(lambda: answer(sources) == 42) for _ in range(3)]
    assert wait_for(children) == [0, 0, 0]
    assert log.read_text().count("ran") == 3


def test_the_lock_of_a_killed_process_holds_nobody_up(sources: Path, cache: Path) -> None:
    library_cache.prepared(cache)

    def hold() -> bool:
        with library_cache.one_at_a_time(cache, "small", 10):
            (cache / "held").touch()
            time.sleep(60)
        return True

    child = in_a_child(hold)
    while not (cache / "held").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert answer(sources) == 42


def test_nobody_waits_longer_than_the_timeout(cache: Path) -> None:
    library_cache.prepared(cache)
    with library_cache.one_at_a_time(cache, "small", 10), library_cache.one_at_a_time(cache, "small", 0.2):
        pass


@pytest.mark.thorough
def test_a_user_of_the_library_sees_why_torch_computes(cache: Path) -> None:
    """Without a compiler and with a cache that cannot be used, nothing said about logging."""
    program = """
import torch
from amoeba import ExpertWeights, Routing, experts
weights = ExpertWeights(torch.randn(4, 16, 8), torch.randn(4, 8, 8))
for _ in range(2):
    print(experts(torch.randn(3, 8), Routing(torch.tensor([[0], [1], [3]]), torch.ones(3, 1)), weights).shape)
"""
    cache.write_text("a file where a folder should be")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([3, 8])\n" * 2
    assert done.stderr.count("name another folder in AMOEBA_CACHE") == 1
    assert done.stderr.count("torch computes experts on the CPU, which is slower: no C++ compiler") == 1
