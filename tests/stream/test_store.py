"""A store gives back every expert bit for bit, from a packed store and from a folder, or says what is wrong with it."""

import errno
import json
import os
import shutil
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_models import check_experts, expected_experts, flip, save
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.stream.store import StoreError, aligned_buffer, is_store, open_store, reading
from amoeba.stream.store.packing import pack
from amoeba.system.machine import huge_pages
from selection import each_value_once, quick
from tiny_models import EXPERTS, experts_classes

# gates and none, transposed, interleaved, biased, stacked, with shared experts, with conversions of all kinds
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h", "inkling", "granitemoe", "llama4")
PART = reading.PART

REFUSED = {"inkling2": "expected stacked experts whose activation aMoEba computes itself"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a model with experts of more than one part."""
    path = tmp_path_factory.mktemp("model")
    save(path, hidden_size=256, moe_intermediate_size=999, num_experts=3)
    return path


@pytest.fixture(scope="module")
def packed(folder) -> Path:
    return Path(pack(folder, folder.with_name("store")).store)


@pytest.fixture
def copied(packed, tmp_path) -> Path:
    """A store that a test may spoil."""
    return Path(shutil.copytree(packed, tmp_path / "store"))


def layer_of(store: Path) -> Path:
    return store / "experts" / "00000.bin"


@each_value_once()
@quick(lambda model_type: model_type in FAMILIES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("model_type", experts_classes())
def test_experts_come_back_bit_for_bit(model_type, stacked, tmp_path):
    model = save(tmp_path / "model", model_type, stacked=stacked)
    writes = type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING or model_type == "mistral4"  # its text is of that kind
    reason = REFUSED.get(model_type) if writes else "expected a language model that writes one token after another"
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            open_store(tmp_path / "model")
        return
    with open_store(tmp_path / "model") as of_folder:
        check_experts(of_folder, model)
    pack(tmp_path / "model", tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        check_experts(store, model)
        assert store.layers == of_folder.layers
        assert store.rest.keys() == of_folder.rest.keys()


@pytest.mark.parametrize("sizes", [(34, 7, 5), (36, 3, 1), (8, 63, 2)])
def test_odd_sizes_come_back_too(sizes, tmp_path):
    hidden, intermediate, experts = sizes
    changes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "num_experts": experts}
    model = save(tmp_path / "model", **changes, num_experts_per_tok=1)
    pack(tmp_path / "model", tmp_path / "store")
    for path in (tmp_path / "model", tmp_path / "store"):
        with open_store(path) as store:
            check_experts(store, model)


def test_a_checkpoint_in_many_files_is_read_by_its_index(tmp_path):
    model = save(tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    with open_store(tmp_path) as store:
        check_experts(store, model)


def test_the_rest_is_what_is_no_expert_with_the_checkpoints_names(tmp_path):
    save(tmp_path / "model", "deepseek_v3")
    pack(tmp_path / "model", tmp_path / "store")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    assert any("shared_experts" in name for name in rest)
    for path in (tmp_path / "model", tmp_path / "store"):
        with open_store(path) as store:
            found = dict(store.rest_tensors())
        assert found.keys() == rest.keys()
        assert all(torch.equal(found[name], rest[name]) for name in rest)
    assert load_file(tmp_path / "store" / "rest.safetensors").keys() == rest.keys()


def test_a_store_is_a_whole_model(tmp_path):
    """Without its source, transformers finds all but the experts in it, and the experts are in the blobs."""
    from transformers import AutoConfig, AutoTokenizer

    model = save(tmp_path / "model", "mixtral")
    store = Path(pack(tmp_path / "model", tmp_path / "store").store)
    (tmp_path / "model").rename(tmp_path / "gone")
    assert AutoTokenizer.from_pretrained(store)("a").input_ids
    with open_store(store) as opened:
        config, state = AutoConfig.from_pretrained(opened.folder), dict(opened.rest_tensors())
        loaded, info = type(model).from_pretrained(
            None, config=config, state_dict=state, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not info["unexpected_keys"]
        inside = tuple(entry.name for entry in opened.layers)
        assert all(name.startswith(inside) for name in info["missing_keys"])
        check_experts(opened, model)
    for name, parameter in loaded.named_parameters():
        assert name.startswith(inside) or torch.equal(parameter, model.get_parameter(name)), name


def test_a_stack_of_blobs_is_a_stack_of_each_part(tmp_path):
    model = save(tmp_path, "gpt_oss")
    with open_store(tmp_path) as store:
        blobs = aligned_buffer(EXPERTS * store.expert_bytes(0)).view(EXPERTS, -1)
        for expert in range(EXPERTS):
            store.read(0, expert, blobs[expert])
        views = store.views(0, blobs)
    (expected, *_) = expected_experts(model).values()
    for view, whole in zip(views, expected, strict=True):
        assert torch.equal(view, whole)
        assert view.untyped_storage().data_ptr() == blobs.untyped_storage().data_ptr()
        assert view.stride(0) * view.element_size() == store.expert_bytes(0)


@pytest.mark.parametrize("which", ["folder", "packed"])
def test_threads_read_at_the_same_time(which, folder, packed):
    path = {"folder": folder, "packed": packed}[which]
    with open_store(path, threads=3) as store:
        alone = [aligned_buffer(store.expert_bytes(0)) for _ in range(3)]
        for expert, blob in enumerate(alone):
            store.read(0, expert, blob)

        def read(number: int) -> bool:
            blob = aligned_buffer(store.expert_bytes(0))
            store.read(0, number % 3, blob)
            return torch.equal(blob, alone[number % 3])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(48)))


@pytest.fixture
def threads_of_python(monkeypatch) -> None:
    """Which read where nothing can be compiled, and where compiled ones did not succeed."""
    monkeypatch.setattr(reading, "open_compiled_reads", lambda *_: None)


@pytest.mark.parametrize("verify", ["always", "never"])
def test_each_part_is_told_when_it_is_there_and_all_parts_are_the_expert(packed, verify):
    with open_store(packed, verify=verify) as store:
        size = store.expert_bytes(0)
        whole, blob, told = aligned_buffer(size), aligned_buffer(size), []
        store.read(0, 1, whole)
        store.read(0, 1, blob, lambda begin, bytes_: told.append((begin, blob[begin : begin + bytes_].clone())))
    told.sort(key=lambda part: part[0])
    assert torch.equal(torch.cat([part for _, part in told]), whole) and len(told) == -(-size // PART)


@pytest.mark.parametrize(("verify", "before", "after"), [("first", False, True), ("always", False, False)])
def test_an_expert_is_read_unchecked_once_nothing_is_to_be_checked(packed, verify, before, after):
    with open_store(packed, verify=verify) as store:
        if store._reader.file(layer_of(packed)).direct_descriptor() is None:
            pytest.skip("a file system without O_DIRECT")
        size = store.expert_bytes(0)
        assert (store.place(0, 1) is not None) == before
        blob = aligned_buffer(size)
        store.read(0, 1, blob)
        found = store.place(0, 1)
        assert (found is not None) == after and store.place(0, 0) is None
        if found is not None:
            again = aligned_buffer(size)
            assert os.preadv(found[0], [again.numpy()], found[1]) == size and torch.equal(again, blob)


@pytest.mark.usefixtures("threads_of_python")
@pytest.mark.parametrize("which", ["folder", "packed"])
@pytest.mark.parametrize("when", ["open", "read", "never there", "no preadv", "short reads"])
def test_any_way_of_reading_gives_the_same_bytes(when, which, folder, packed, monkeypatch, caplog):
    path, blobs = {"folder": folder, "packed": packed}[which], []
    with open_store(path) as store:
        plain = aligned_buffer(store.expert_bytes(0))
        store.read(0, 1, plain)
    true_open, true_read = os.open, os.preadv

    def refuse(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & reading._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(name))
        return true_open(name, flags, *rest, **more)

    direct = set()

    def noted(name: Any, flags: int, *rest: Any, **more: Any) -> int:
        found = true_open(name, flags, *rest, **more)
        direct.update([found] if flags & reading._DIRECT else [])
        return found

    def refused_read(descriptor: int, into: Any, offset: int) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return true_read(descriptor, into, offset)

    if when == "open":
        monkeypatch.setattr(os, "open", refuse)
    elif when == "read":
        monkeypatch.setattr(os, "open", noted)
        monkeypatch.setattr(os, "preadv", refused_read)
    elif when == "never there":
        monkeypatch.setattr(reading, "_DIRECT", 0)
    elif when == "no preadv":
        monkeypatch.delattr(os, "preadv")
    else:
        monkeypatch.setattr(os, "preadv", lambda fd, into, at: true_read(fd, [into[0][:12288]], at))
    with open_store(path) as store:
        for _ in range(2):
            blobs.append(aligned_buffer(store.expert_bytes(0)))
            store.read(1, 1, aligned_buffer(store.expert_bytes(1)))
            store.read(0, 1, blobs[-1])
    assert all(torch.equal(blob, plain) for blob in blobs)
    said = [record for record in caplog.records if "page cache" in record.message]
    if reading._DIRECT:  # a machine that has it
        assert len(said) == (when in ("open", "read"))


def test_any_memory_can_be_read_into(packed):
    with open_store(packed) as store:
        size = store.expert_bytes(0)
        plain, between, array = aligned_buffer(size), aligned_buffer(size + 64), bytearray(size)
        store.read(0, 2, plain)
        store.read(0, 2, between[64:])
        store.read(0, 2, array)
        assert torch.equal(between[64:], plain)
        assert bytes(array) == plain.numpy().tobytes()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda size: aligned_buffer(size - 1), "of shape"),
        (lambda size: aligned_buffer(2 * size)[::2], "contiguous"),
        (lambda size: aligned_buffer(size + 1)[1:], "multiple of 16"),
        (lambda size: torch.empty(size, dtype=torch.uint8, device="meta"), "on the CPU"),
        (lambda size: torch.empty(size // 2, dtype=torch.int16), "int16"),
        (bytes, "read-only"),
    ],
)
def test_memory_that_cannot_hold_an_expert_is_refused(packed, make, said):
    with open_store(packed) as store, pytest.raises(ValueError, match=said):
        store.read(0, 0, make(store.expert_bytes(0)))


@pytest.mark.parametrize(("layer", "expert"), [(2, 0), (-1, 0), (0, 3), (0, -1)])
def test_an_expert_that_is_not_there_is_refused(packed, layer, expert):
    with open_store(packed) as store, pytest.raises(ValueError, match=f"layer {layer}, expert {expert}"):
        store.read(layer, expert, aligned_buffer(store.expert_bytes(0)))


@pytest.mark.parametrize("place", [0, PART - 1, PART, -1])
def test_a_flipped_bit_is_named_and_never_given_back(copied, place):
    with open_store(copied) as store:
        size = store.expert_bytes(0)
    flip(layer_of(copied), size + place % size)
    with open_store(copied) as store:
        blob = aligned_buffer(size)
        for _ in range(2):
            with pytest.raises(StoreError, match="checksum") as caught:
                store.read(0, 1, blob)
        assert (caught.value.file, caught.value.expert) == (layer_of(copied), 1)
        assert "model.layers.0.mlp.experts, expert 1" in str(caught.value)
        assert "amoeba pack" in str(caught.value)
        store.read(0, 0, blob)
        flip(layer_of(copied), size + place % size)  # put right again
        store.read(0, 1, blob)


@pytest.mark.parametrize(("verify", "noticed"), [("first", False), ("always", True), ("never", False)])
def test_checksums_are_compared_when_asked_to(copied, verify, noticed):
    with open_store(copied, verify=verify) as store:
        blob = aligned_buffer(store.expert_bytes(0))
        store.read(0, 0, blob)
        flip(layer_of(copied), 5)
        if noticed:
            with pytest.raises(StoreError, match="checksum"):
                store.read(0, 0, blob)
        else:
            store.read(0, 0, blob)
    with pytest.raises(ValueError, match="verify: expected one of first, always, never"):
        open_store(copied, verify="sometimes")  # type: ignore[arg-type]


def test_a_file_cut_short_is_named_when_it_is_opened_and_when_it_is_read(copied):
    with open_store(copied) as store:
        os.truncate(layer_of(copied), store.expert_bytes(0) + 5000)
        blob = aligned_buffer(store.expert_bytes(0))
        store.read(0, 0, blob)
        with pytest.raises(StoreError, match=r"00000.bin \(model.layers.0.mlp.experts, expert 1\).*cut short"):
            store.read(0, 1, blob)
    with pytest.raises(StoreError, match=r"00000.bin: expected \d+ bytes; got"):
        open_store(copied)


@pytest.mark.parametrize("name", ["experts/00000.bin", "rest.safetensors"])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    with pytest.raises(StoreError, match=f"{name}.*No such file"):
        open_store(copied)


@pytest.mark.usefixtures("threads_of_python")
@pytest.mark.parametrize("which", ["folder", "packed"])
def test_after_a_read_error_the_next_try_succeeds(which, folder, packed, monkeypatch):
    true, failing, reads = os.preadv, threading.Event(), []

    def preadv(descriptor: int, into: Any, offset: int) -> int:
        reads.append(offset)
        if failing.is_set() and len(reads) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return true(descriptor, into, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_store({"folder": folder, "packed": packed}[which], threads=2) as store:
        plain, blob = aligned_buffer(store.expert_bytes(0)), aligned_buffer(store.expert_bytes(0))
        store.read(0, 2, plain)
        failing.set()
        reads.clear()
        with pytest.raises(StoreError, match=r"expert 2\).*Input/output error.*try again"):
            store.read(0, 2, blob)
        store.read(0, 2, blob)
        assert torch.equal(blob, plain)


@pytest.mark.usefixtures("threads_of_python")
def test_nothing_is_written_after_an_error(packed, monkeypatch):
    """A slot may be given to another expert as soon as `read` has failed."""
    true, begun, go_on = os.preadv, threading.Event(), threading.Event()

    def preadv(descriptor: int, into: Any, offset: int) -> int:
        if offset == 0:
            begun.wait(5)
            raise OSError(errno.EIO, "Input/output error")
        begun.set()
        go_on.wait(0.3)
        return true(descriptor, into, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with open_store(packed, threads=2) as store:
        blob = aligned_buffer(store.expert_bytes(0))
        with pytest.raises(StoreError):
            store.read(0, 0, blob)
        blob.zero_()
        go_on.set()
    assert not blob.any()


def test_equal_experts_are_equal_blobs(folder, packed):
    """What is between the parts and after them has a value too."""
    with open_store(folder) as of_folder, open_store(packed) as store:
        one, other = (aligned_buffer(store.expert_bytes(0)).fill_(255) for _ in range(2))
        of_folder.read(0, 1, one)
        store.read(0, 1, other)
        assert torch.equal(one, other)
        assert any(end > begin for begin, end in store.layers[0].gaps())


def test_a_packed_store_needs_no_transformers(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with open_store(packed) as store:
        store.read(0, 0, aligned_buffer(store.expert_bytes(0)))
        assert dict(store.rest_tensors())


def test_a_closed_store_says_so(packed):
    store = open_store(packed)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="a closed one"):
        store.read(0, 0, aligned_buffer(store.expert_bytes(0)))


SPOILED = {
    "not JSON": lambda text: text[:-9],
    "a list": lambda text: "[]",
    "another version": lambda text: text.replace('"version": 1', '"version": 2'),
    "a changed offset": lambda text: text.replace('"offset": 0', '"offset": 256'),
    "a changed checksum": lambda text: text.replace('"checksums": [', '"checksums": [1'),
    "another size": lambda text: text.replace('"hidden": 256', '"hidden": 128'),
}


@pytest.mark.parametrize("how", SPOILED)
def test_an_index_that_was_changed_is_refused(how, copied):
    path = copied / "index.json"
    text = SPOILED[how](path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    assert is_store(copied) or how == "a list"
    with pytest.raises((StoreError, ValueError), match=r"index.json|MODEL|safetensors"):
        open_store(copied)


def test_numbers_of_a_later_version_are_refused_by_name(copied):
    from amoeba.stream.store import index

    facts = json.loads((copied / "index.json").read_text())
    facts["layers"][0]["format"]["kind"] = "block_scaled"
    del facts["crc32"]
    (copied / "index.json").write_text(json.dumps(facts | {"crc32": index._crc32(facts)}))
    with pytest.raises(StoreError, match=r"got block_scaled bfloat16. Use a newer aMoEba"):
        open_store(copied)


def rewrite_index(store: Path, change: Any) -> None:
    """With a checksum that goes with it, as somebody who means harm would."""
    from amoeba.stream.store import index

    facts = json.loads((store / "index.json").read_text())
    del facts["crc32"]
    change(facts)
    (store / "index.json").write_text(json.dumps(facts | {"crc32": index._crc32(facts)}))


HOSTILE = {
    "a layer above": lambda facts: facts["layers"][0].update(file="../experts/00000.bin"),
    "an absolute layer": lambda facts: facts["layers"][0].update(file="/etc/passwd"),
    "another layer": lambda facts: facts["layers"][0].update(file=facts["layers"][1]["file"]),
    "the rest above": lambda facts: facts["rest"].update(file="../rest.safetensors"),
    "a small file above": lambda facts: facts["files"].update({"../config.json": 1}),
    "a small file without a name": lambda facts: facts["files"].update({"..": 1}),
    "no layers": lambda facts: facts.update(layers=[]),
    "layers as a number": lambda facts: facts.update(layers=3),
    "no rest": lambda facts: facts.update(rest={}),
    "a rest without a size": lambda facts: facts["rest"].pop("bytes"),
    "no experts": lambda facts: facts["layers"][0].update(experts=0, checksums=[]),
    "files as a list": lambda facts: facts.update(files=[1]),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_an_index_of_no_store_that_packing_writes_is_refused_in_a_sentence(how, copied):
    rewrite_index(copied, HOSTILE[how])
    with pytest.raises(StoreError, match=r"index.json: expected the index of a store; got a damaged one \(.+\)"):
        open_store(copied)


@pytest.mark.parametrize("name", ["experts/00000.bin", "rest.safetensors", "config.json"])
def test_a_link_out_of_the_store_is_refused(name, copied, tmp_path):
    (copied / name).rename(tmp_path / "outside")
    (copied / name).symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match=rf"{name}: expected a file inside the store; got a link to .*outside"):
        open_store(copied)
    (copied / name).unlink()
    (copied / name).symlink_to(Path(name).name)  # to itself
    with pytest.raises(StoreError, match=name):
        open_store(copied)


@pytest.mark.parametrize("place", [3, 200, -1])
def test_a_changed_byte_in_the_other_weights_is_noticed_on_loading(copied, place):
    flip(copied / "rest.safetensors", place)
    with pytest.raises(StoreError, match=r"rest\.safetensors: expected .*; got "), open_store(copied) as store:
        dict(store.rest_tensors())


def test_the_checksum_of_the_rest_is_that_of_its_file(tmp_path):
    """From parts of tensors of more than one part, whatever the byte at which they begin; of a quantised one too."""
    save(tmp_path / "model", vocab_size=20011, hidden_size=64)
    for model, out in (("model", "store"), ("fp8", "fp8.store")):
        if model == "fp8":
            quantise_folder(tmp_path / "model", tmp_path / "fp8", "fp8")
        with open_store(pack(tmp_path / model, tmp_path / out).store) as store:
            assert max(entry.size for entry in store.rest.values()) > 2 * PART
            dict(store.rest_tensors())
            flip(tmp_path / out / "rest.safetensors", 2 * PART + 77)
            with pytest.raises(StoreError, match="they have changed"):
                dict(store.rest_tensors())
        with open_store(tmp_path / out, verify="never") as store:
            dict(store.rest_tensors())


def test_crc32_of_two_pieces_is_that_of_both():
    generator = torch.Generator().manual_seed(0)
    for sizes in ((0, 0), (0, 5), (7, 0), (1, 1), (4095, 70001), (100, 2**20)):
        one, other = (torch.randint(256, (n,), generator=generator, dtype=torch.uint8).numpy().tobytes() for n in sizes)
        joined = reading.crc32_joined(zlib.crc32(one), zlib.crc32(other), len(other))
        assert joined == zlib.crc32(one + other)


@pytest.mark.skipif(huge_pages() not in ("madvise", "always"), reason="this system gives no huge pages")
def test_memory_for_experts_is_in_huge_pages() -> None:
    memory = aligned_buffer(64 * 2**20)
    memory.fill_(1)
    found, is_mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        begin, _, end = line.split(maxsplit=1)[0].partition("-")
        if end:
            is_mine = int(begin, 16) <= memory.data_ptr() < int(end, 16)
        elif is_mine and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    assert found >= memory.numel() // 2  # some may not be free
