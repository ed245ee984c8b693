"""Packing that is killed, interrupted or runs out of room goes on where it was, and leaves nothing that opens but is
not whole."""

import errno
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import namedtuple
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stored_models import check_experts, flip, save

from amoeba.stream.store import StoreError, aligned_buffer, folder, is_store, open_store, packing
from amoeba.stream.store.packing import pack
from amoeba.stream.store.tensor_files import TensorEntry
from called import call
from hostile_folders import change_json, save_model
from selection import quick

LAYERS, INTERRUPTED = 2, 130
STEP = 5  # of the moments at which packing is killed, every so many-th in one test


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "model"
    save(path, num_experts=3)
    return path


@pytest.fixture(scope="module")
def undisturbed(model) -> dict[str, bytes]:
    return contents(Path(pack(model, model.with_name("undisturbed")).store))


def contents(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def check_unfinished_or_whole(store: Path, undisturbed: dict[str, bytes]) -> bool:
    """Whether it opens; if it does, all of it is there."""
    if not is_store(store):
        assert not (store / "index.json").exists()
        return False
    if not (store / "index.json").exists():
        with pytest.raises(StoreError, match=r"an incomplete one.*again"):
            open_store(store)
        return False
    open_store(store).close()
    assert undisturbed.items() <= contents(store).items()
    return True


def killed_at(event: int, model: Path, store: Path, by: signal.Signals = signal.SIGKILL) -> bool:
    """Packs in a process that kills itself at its so-many-th change of the store's folder; whether it came that far."""
    child = os.fork()
    if child == 0:
        left = [event]

        def count(name: str, arguments: tuple[Any, ...]) -> None:
            writes = name == "open" and arguments[1] != "r" and str(store) in str(arguments[0])
            if writes or (name in ("os.rename", "os.remove", "os.mkdir") and str(store) in str(arguments[0])):
                left[0] -= 1
                if left[0] < 0:
                    left[0] = 10**6
                    os.kill(os.getpid(), by)

        def count_bytes(now: Any) -> None:
            count("os.mkdir", (store,))

        sys.addaudithook(count)
        try:
            pack(model, store, progress=count_bytes)
        except KeyboardInterrupt:
            os._exit(INTERRUPTED)
        except BaseException:
            os.write(2, traceback.format_exc().encode())  # past what pytest does with a process of its own
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    was_killed = os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == INTERRUPTED
    assert was_killed or os.WEXITSTATUS(status) == 0, "packing failed, see its traceback"
    return was_killed


@pytest.mark.thorough  # by a full disk: below
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("first", range(STEP))
def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(first, by, model, undisturbed, tmp_path):
    event, opened = first, []
    while killed_at(event, model, tmp_path / f"store{event}", by):
        store = tmp_path / f"store{event}"
        opened.append(check_unfinished_or_whole(store, undisturbed))
        report = pack(model, store)
        assert report.resumed_layers == LAYERS or not opened[-1]
        assert contents(store) == undisturbed
        event += STEP
    assert event > 40
    assert opened == sorted(opened), "once it opens, it opens for good"
    assert not all(opened)


@quick(lambda by, event: (by, event) in ((signal.SIGINT, 6), (signal.SIGKILL, 12)))
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("event", range(0, 60, 2))
def test_killed_while_it_repairs_it_leaves_a_store_that_is_right_or_refused(event, by, model, undisturbed, tmp_path):
    store = tmp_path / "store"
    pack(model, store)
    flip(store / "experts" / "00001.bin", 70)
    (store / "config.json").write_text("{}")
    killed_at(event, model, store, by)
    with suppress(StoreError):
        open_store(store).close()
        assert contents(store)["config.json"] == undisturbed["config.json"]
        assert contents(store)["experts/00001.bin"] == undisturbed["experts/00001.bin"]
    pack(model, store)
    assert contents(store) == undisturbed


def test_killed_again_and_again_it_gets_to_the_end(model, undisturbed, tmp_path):
    kills = 0
    while killed_at(30, model, tmp_path / "store"):
        check_unfinished_or_whole(tmp_path / "store", undisturbed)
        kills += 1
        assert kills < 9
    assert kills >= 2
    assert contents(tmp_path / "store") == undisturbed


def test_a_full_disk_leaves_what_the_next_run_goes_on_with(model, undisturbed, tmp_path, monkeypatch):
    """At each of the writes in turn, of blobs and of the small files."""
    true_write, writes = os.pwrite, [0]

    def write(file: int, data: memoryview, offset: int) -> int:
        writes[0] -= 1
        if writes[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return true_write(file, data[: max(1, len(data) // 2)], offset)  # a write may do less than it was asked for

    monkeypatch.setattr(os, "pwrite", write)
    for room in (0, 1, 5, 17, 60, 120):
        store = tmp_path / f"store{room}"
        writes[0] = room
        with pytest.raises(StoreError, match=r"room for what is left; got No space left .* run the same command again"):
            pack(model, store)
        assert not list(store.rglob("*.writing"))
        assert not check_unfinished_or_whole(store, undisturbed)
        writes[0] = 10**6
        pack(model, store)
        assert contents(store) == undisturbed


def test_room_is_looked_for_first(model, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(StoreError, match=r"expected 0.06 GiB of room; got 0.00 GiB free"):
        pack(model, tmp_path / "store")
    assert not list((tmp_path / "store" / "experts").iterdir())


def test_what_a_killed_process_left_takes_no_room(model, tmp_path, monkeypatch):
    store, true = tmp_path / "store", shutil.disk_usage
    assert killed_at(12, model, store)
    assert list(store.rglob("*.writing"))

    def usage(path: Path) -> Any:
        assert not list(store.rglob("*.writing"))
        return true(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    pack(model, store)


def test_no_more_than_a_few_experts_are_in_memory(tmp_path, monkeypatch):
    save(tmp_path / "model", num_experts=40, stacked=True)
    sizes: list[int] = []
    for module in (folder, packing):
        monkeypatch.setattr(module, "aligned_buffer", lambda size: sizes.append(size) or aligned_buffer(size))
    pack(tmp_path / "model", tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        assert max(sizes) <= store.expert_bytes(0) + 4 * 4096
    in_flight = packing._READERS + 1 + packing._WRITERS + 1
    assert len(sizes) <= LAYERS * in_flight + packing._READERS, "blobs of each layer, and scratch memory of the readers"


def test_a_store_of_another_model_is_not_gone_on_with(model, undisturbed, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    os.utime(other / "model.safetensors", ns=(time.time_ns(), time.time_ns()))
    store = tmp_path / "store"
    pack(model, store)
    with pytest.raises(ValueError, match=r"--out: expected a store of .*other.* got .*source"):
        pack(other, store)
    (store / "index.json").unlink()
    (store / "packing.json").write_text(json.dumps({"folder": "elsewhere", "fingerprint": "0"}))
    with pytest.raises(ValueError, match="one of 'elsewhere'"):
        pack(model, store)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_is_no_store_is_not_written_into(model, tmp_path, what):
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    else:
        save_model(out)
    before = out.read_text() if what == "file" else contents(out)
    with pytest.raises(ValueError, match="--out: expected a new folder, or an unfinished store"):
        pack(model, out)
    assert (out.read_text() if what == "file" else contents(out)) == before


def test_two_at_once_are_refused(model, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    with packing.only_one(store), pytest.raises(ValueError, match="another process is writing"):
        pack(model, store)
    pack(model, store)


def test_a_source_cut_short_while_it_is_packed_is_named(tmp_path):
    save(tmp_path / "model")
    source = tmp_path / "model" / "model.safetensors"

    def cut(now: Any) -> None:
        os.truncate(source, 5000)

    with pytest.raises(StoreError, match=r"model.safetensors \(model.layers.\d.mlp.experts, expert \d\).*cut short"):
        pack(tmp_path / "model", tmp_path / "store", progress=cut)
    with pytest.raises(StoreError, match="an incomplete one"):
        open_store(tmp_path / "store")


def test_a_source_that_is_written_while_it_is_packed_is_refused(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")

    def change(now: Any) -> None:
        if now.bytes == now.total:
            flip(folder / "model.safetensors", -1)

    with pytest.raises(
        StoreError, match=r"model: expected a model that does not change while it is packed.*pack again"
    ):
        pack(folder, tmp_path / "store", progress=change)
    with pytest.raises(StoreError, match="an incomplete one"):
        open_store(tmp_path / "store")
    with pytest.raises(ValueError, match="another state of it"):
        pack(folder, tmp_path / "store")


def test_the_command_packs_checks_and_names_what_is_damaged(tmp_path):
    model = save(tmp_path / "model", "gpt_oss")
    done = call("pack", tmp_path / "model", "--json")
    document = done.document
    store = Path(document["store"])
    assert store == tmp_path / "model.store"
    assert (document["layers"], document["experts"]) == (2, 12)
    assert "GB/s" in done.stderr
    done = call("pack", tmp_path / "model", "--check", "--json")
    assert done.document["damaged"] == []
    assert "all checksums match" in done.stdout
    with open_store(store) as opened:
        check_experts(opened, model)
    done = call("pack", tmp_path / "model")
    assert "2 of 2 layers were already packed" in done.stdout
    for name in ("experts/00001.bin", "rest.safetensors"):
        data = bytearray((store / name).read_bytes())
        data[-1] ^= 128
        (store / name).write_bytes(data)
    done = call("pack", store, "--check", "--json", code=1)
    damaged = done.document["damaged"]
    assert len(damaged) == 2
    assert "00001.bin (model.layers.1.mlp.experts, expert 5)" in damaged[0]
    assert "rest.safetensors" in damaged[1] and "they have changed" in damaged[1]
    done = call("pack", tmp_path / "model")
    assert "repaired: experts/00001.bin, rest.safetensors" in done.stdout
    call("pack", store, "--check")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "which is not here. Download a model of the hub first"),
        (["config.json"], "the file"),
        (["."], "a folder with model.safetensors"),
    ],
)
def test_the_command_says_what_it_takes(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    done = call("pack", *words, code=2)
    assert said in done.stderr


def test_a_store_is_not_packed_again(model, tmp_path):
    pack(model, tmp_path / "store")
    done = call("pack", tmp_path / "store", code=2)
    assert "which is a store already. Add --check" in done.stderr


def test_interrupted_the_command_keeps_what_is_whole(model, tmp_path, monkeypatch):
    from amoeba.commands import convert as command

    def interrupt(self: Any, now: Any) -> None:
        if now.layer == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(command._Lines, "show", interrupt)
        done = call("pack", model, "--out", tmp_path / "store", code=130)
    assert "run the same command again" in done.stderr
    first = tmp_path / "store" / "experts" / "00000.bin"
    before = first.stat().st_mtime_ns
    done = call("pack", model, "--out", tmp_path / "store")
    assert "1 of 2 layers were already packed" in done.stdout and first.stat().st_mtime_ns == before


def test_every_tensor_of_the_rest_begins_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.touch()
    rest = {"a": TensorEntry(file, 0, torch.bfloat16, (3,)), "b": TensorEntry(file, 6, torch.float32, (2,))}
    source = SimpleNamespace(layers=[], pieces=[], rest=rest, folder=tmp_path, files=tmp_path)
    header = packing._Packing(source, tmp_path / "store", lambda now: None).header
    tensors = json.loads(header[8:])
    assert len(header) % 8 == 0 and tensors["a"]["data_offsets"] == [8, 14] and tensors["b"]["data_offsets"] == [0, 8]


# --- a store that is there already ------------------------------------------------------------------------------------


def test_small_files_that_have_changed_are_updated(model, tmp_path):
    """Config, tokenizer, template, generation settings; one that is gone from the model goes from the store."""
    folder, store = shutil.copytree(model, tmp_path / "model"), tmp_path / "store"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "old.json").write_text("{}")
    pack(folder, store)
    (store / "notes.txt").write_text("the user's own")
    change_json(folder / "config.json", rope_theta=5e5)
    change_json(folder / "generation_config.json", temperature=0.5)
    change_json(folder / "tokenizer_config.json", model_max_length=77)
    (folder / "chat_template.jinja").write_text("{{ messages[0] }}")
    (folder / "old.json").unlink()
    done = call("pack", folder, "--out", store, "--json")
    changed = ["chat_template.jinja", "config.json", "generation_config.json", "old.json", "tokenizer_config.json"]
    assert done.document["updated"] == changed
    assert "updated from the model's folder: chat_template.jinja, config.json" in done.stdout
    assert "2 of 2 layers were already packed" in done.stdout
    there = contents(store)
    assert "old.json" not in there and "notes.txt" in there
    for name, data in contents(folder).items():
        assert name == "model.safetensors" or there[name] == data
    open_store(store).close()


def test_a_small_file_changed_in_model_and_store_alike_is_taken_over(model, tmp_path):
    folder, store = shutil.copytree(model, tmp_path / "model"), tmp_path / "store"
    pack(folder, store)
    for each in (folder, store):
        change_json(each / "generation_config.json", temperature=0.5)
    with pytest.raises(StoreError, match=r"generation_config\.json.*they have changed.*pack that again"):
        open_store(store)
    assert pack(folder, store).updated == ("generation_config.json",)
    open_store(store).close()


def test_a_small_file_that_the_model_no_longer_has_goes(model, tmp_path, monkeypatch):
    folder, store = shutil.copytree(model, tmp_path / "model"), tmp_path / "store"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with monkeypatch.context() as patched:
        patched.setattr(packing, "written", lambda index: 1 / 0)  # everything but the index is there
        with pytest.raises(ZeroDivisionError):
            pack(folder, store)
    assert (store / "chat_template.jinja").is_file()
    (folder / "chat_template.jinja").unlink()
    pack(folder, store)
    assert not (store / "chat_template.jinja").exists()


def test_a_full_disk_in_a_repair_leaves_what_the_next_run_goes_on_with(model, undisturbed, tmp_path, monkeypatch):
    store, usage = tmp_path / "store", namedtuple("usage", "total used free")
    pack(model, store)
    flip(store / "rest.safetensors", -1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
        with pytest.raises(StoreError, match=r"of room; got 0\.00 GiB free"):
            pack(model, store)
    with pytest.raises(StoreError, match="an incomplete one"):
        open_store(store)
    assert pack(model, store).resumed_layers == LAYERS
    assert contents(store) == undisturbed


def test_packing_a_store_that_is_right_writes_nothing(model, tmp_path):
    """So that it may be on a read-only disk."""
    store = tmp_path / "store"
    pack(model, store)

    def changed() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (store, *store.rglob("*"))}

    before = changed()
    assert pack(model, store).resumed_layers == LAYERS
    assert changed() == before


def test_a_store_that_is_read_meanwhile_stays_right(model, tmp_path):
    store = tmp_path / "store"
    pack(model, store)
    with open_store(model) as folder, open_store(store) as reading:
        wanted, blob = (aligned_buffer(reading.expert_bytes(1)) for _ in range(2))
        reading.read(0, 0, blob)
        flip(store / "experts" / "00001.bin", 5)
        pack(model, store)
        for layer in range(LAYERS):
            folder.read(layer, 0, wanted)
            reading.read(layer, 0, blob)
            assert torch.equal(blob, wanted)


def test_a_store_of_an_earlier_version_gets_what_it_lacks(model, undisturbed, tmp_path):
    """Checksums of its small files. Until then it opens as it did."""
    from amoeba.stream.store.index import _crc32

    store = tmp_path / "store"
    pack(model, store)
    facts = json.loads((store / "index.json").read_text())
    del facts["files"], facts["crc32"]
    (store / "index.json").write_text(json.dumps(facts | {"crc32": _crc32(facts)}))
    open_store(store).close()
    report = pack(model, store)
    assert (report.repaired, report.updated, report.resumed_layers) == ((), (), LAYERS)
    assert contents(store) == undisturbed


def test_files_of_a_model_that_are_called_like_a_stores_own_do_no_harm(model, tmp_path):
    folder, store = shutil.copytree(model, tmp_path / "model"), tmp_path / "store"
    for name in ("rest.json", "packing.json", "index.json"):
        (folder / name).write_text('{"mine": true}')
    assert not is_store(folder)
    pack(folder, store)
    open_store(store).close()
    assert json.loads((store / "rest.json").read_text()) == {"mine": True}
    assert pack(folder, store).updated == ()


def test_nothing_of_the_work_stays_behind_with_a_relative_out(model, undisturbed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack(model, "store")
    assert contents(tmp_path / "store") == undisturbed
    assert sorted(path.name for path in (tmp_path / "store" / "experts").iterdir()) == ["00000.bin", "00001.bin"]


def test_check_only_checks(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    done = call("pack", folder, "--check", code=2)
    assert "model.store', which is not a store. Pack the model first" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    pack(folder, tmp_path / "model.store")
    flip(tmp_path / "model.store" / "config.json", 3)
    (tmp_path / "model.store" / "experts" / "00000.bin").unlink()
    before = contents(tmp_path / "model.store")
    done = call("pack", folder, "--check", "--json", code=1)
    damaged = done.document["damaged"]
    assert ["00000.bin" in damaged[0], "config.json" in damaged[1]] == [True, True]
    assert contents(tmp_path / "model.store") == before


@pytest.mark.parametrize("command", ["generate", "finetune", "pack"])
def test_an_unfinished_store_is_called_one(command, model, tmp_path):
    assert killed_at(12, model, tmp_path / "store")
    more = {"generate": ["hello"], "finetune": ["--data", str(model / "config.json")], "pack": []}[command]
    done = call(command, tmp_path / "store", *more, code=2)
    assert "pack has not finished" in done.stderr or "an unfinished store" in done.stderr
    assert "config.json" not in done.stderr


def test_a_store_whose_experts_are_a_link_is_not_written_through(model, tmp_path):
    store = tmp_path / "store"
    pack(model, store)
    (store / "experts").rename(tmp_path / "elsewhere")
    (store / "experts").symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="whose experts are a link"):
        pack(model, store)
    assert contents(tmp_path / "elsewhere") == before
