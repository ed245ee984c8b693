"""A model that is loaded already streams the experts it has, or is refused: never those of another checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_models import save
from torch import nn
from transformers import AutoModelForCausalLM

import amoeba
from amoeba import lora
from amoeba.integrations.experts_module import experts_modules
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.stream.store import open_store
from amoeba.stream.store.index import _crc32
from amoeba.stream.store.packing import pack
from selection import each_value_once, quick

KINDS = ("qwen3_moe", "gpt_oss")  # plain; transposed, in turns and with biases


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """kind -> folder and store."""
    found = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        save(root / "folder", kind, dtype=torch.float32)
        found[kind] = root / "folder", Path(pack(root / "folder", root / "store").store)
    root = tmp_path_factory.mktemp("fp8")
    quantise_folder(found["qwen3_moe"][0], root / "folder", "fp8")
    found["fp8"] = root / "folder", Path(pack(root / "folder", root / "store").store)
    return found


def resident(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="amoeba").eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40, dtype=torch.int64, device="cpu")[None], use_cache=False).logits


def merge_an_adapter(model: Any) -> None:
    attached = lora.attach(model, r=2, alpha=4)
    for factors in attached.experts.values():
        for parameter in factors.parameters():
            nn.init.normal_(parameter, std=0.2)
    lora.merge(model, keep_base=False)
    lora.detach(model)


def change_one_expert(model: Any) -> None:
    with torch.no_grad():
        list(experts_modules(model).values())[1].down_proj[3] *= 1.5


def change_one_number(model: Any) -> None:
    with torch.no_grad():
        list(experts_modules(model).values())[1].down_proj[3, 16, 11] += 1


def swap_two_experts(model: Any) -> None:
    with torch.no_grad():
        gate_up = list(experts_modules(model).values())[1].gate_up_proj
        gate_up[[3, 4]] = gate_up[[4, 3]].clone()


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "merged": (merge_an_adapter, r"layers\.0\.mlp\.experts, expert 0"),
    "one expert": (change_one_expert, r"layers\.1\.mlp\.experts, expert 3"),
    "one number": (change_one_number, r"layers\.1\.mlp\.experts, expert 3"),
    "two swapped": (swap_two_experts, r"layers\.1\.mlp\.experts, expert 3"),
}


@quick(lambda kind, which, change: kind == "qwen3_moe" or (which, change) == ("store", "merged"))
@pytest.mark.parametrize(
    ("which", "change"),
    # a folder has no checksums, and samples need not meet a single number
    [
        (which, change)
        for which in ("folder", "store")
        for change in CHANGES
        if (which, change) != ("folder", "one number")
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_were_changed_are_refused_by_name(kind: str, change: str, which: str, stored) -> None:
    make, said = CHANGES[change]
    model = resident(stored[kind][0])
    make(model)
    expected = logits(model)
    with pytest.raises(ValueError, match=rf"the model has now \(model\.{said}\).*other weights in .*[Ss]ave"):
        amoeba.stream.attach(model, store=stored[kind][which == "store"], ram="auto")
    assert torch.equal(logits(model), expected), "a model that was refused is as it was"


@each_value_once()
@pytest.mark.parametrize("which", ["folder", "store"])
@pytest.mark.parametrize("kind", [*KINDS, "fp8"])
def test_experts_that_are_the_stores_are_streamed(kind: str, which: str, stored) -> None:
    model, path = resident(stored[kind][0]), stored[kind][which == "store"]
    expected = logits(model)
    with amoeba.stream.attach(model, store=path, ram="auto"):
        torch.testing.assert_close(logits(model), expected)
    with amoeba.stream.attach(model, store=path, ram="auto"):  # again, with nothing in memory
        torch.testing.assert_close(logits(model), expected)


def test_the_folder_a_model_came_from_is_compared_too(stored) -> None:
    model = resident(stored["qwen3_moe"][0])
    merge_an_adapter(model)
    with pytest.raises(ValueError, match="experts that the model has now"):
        amoeba.stream.attach(model, ram="auto")


def test_a_store_of_another_checkpoint_of_the_same_shape_is_refused(stored, tmp_path) -> None:
    other = resident(stored["qwen3_moe"][0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    other.save_pretrained(tmp_path / "other", save_original_format=True)
    pack(tmp_path / "other", tmp_path / "store")
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts, expert 0.*other weights in .*store"):
        amoeba.stream.attach(resident(stored["qwen3_moe"][0]), store=tmp_path / "store", ram="auto")
    with amoeba.stream.attach(stored["qwen3_moe"][1], ram="auto") as streamed:
        streamed.close()
        with pytest.raises(ValueError, match=r"streamed from .*[Ll]oad the model again"):
            amoeba.stream.attach(streamed.model, store=tmp_path / "store", ram="auto")


def test_codes_that_were_changed_are_refused(stored) -> None:
    folder, store = stored["fp8"]
    model = resident(folder)
    with torch.no_grad():
        list(experts_modules(model).values())[1].placed_1[2, 0, 0] += 1  # a scale
    for path in (folder, store):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts, expert 2"):
            amoeba.stream.attach(model, store=path, ram="auto")


def test_a_store_in_another_number_format_is_refused(stored) -> None:
    with pytest.raises(ValueError, match=r"experts in float32, as the model has them .*; got fp8-128"):
        amoeba.stream.attach(resident(stored["qwen3_moe"][0]), store=stored["fp8"][1], ram="auto")


def test_experts_placed_in_another_format_are_refused(stored) -> None:
    from amoeba.integrations.place_experts import place_experts

    model = resident(stored["qwen3_moe"][0])
    place_experts(model, "cpu-int8", trains=False, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"experts as the checkpoint has them.*without a placement"):
        amoeba.stream.attach(model, store=stored["qwen3_moe"][1], ram="auto")


def test_another_activation_is_refused_for_a_loaded_model_and_for_a_folder(stored, tmp_path) -> None:
    folder, store = stored["qwen3_moe"]
    model = resident(folder)
    for module in experts_modules(model).values():
        module.act_fn = nn.GELU()
    for path in (folder, store):
        with pytest.raises(ValueError, match=r"activation of the model \(model\.layers\.0.*: kind=gelu; got kind=silu"):
            amoeba.stream.attach(model, store=path, ram="auto")


def test_an_activation_of_its_own_is_refused(stored) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() * x

    model = resident(stored["qwen3_moe"][0])
    for module in experts_modules(model).values():
        module.act_fn = Odd()
    with pytest.raises(ValueError, match="an activation that aMoEba computes itself"):
        amoeba.stream.attach(model, store=stored["qwen3_moe"][1], ram="auto")


def test_an_index_that_says_another_activation_than_config_json_is_refused(stored, tmp_path) -> None:
    pack(stored["qwen3_moe"][0], tmp_path / "store")
    path = tmp_path / "store" / "index.json"
    facts = json.loads(path.read_text())
    for layer in facts["layers"]:
        layer["activation"]["kind"] = "gelu"
    del facts["crc32"]
    path.write_text(json.dumps(facts | {"crc32": _crc32(facts)}))
    with pytest.raises(ValueError, match="kind=silu; got kind=gelu"):
        amoeba.stream.attach(tmp_path / "store", ram="auto")


def test_comparing_reads_nothing_of_a_store_and_little_of_a_folder(tmp_path, monkeypatch) -> None:
    save(tmp_path / "folder", hidden_size=256, moe_intermediate_size=512, num_experts=4)
    pack(tmp_path / "folder", tmp_path / "store")
    from amoeba.stream.attaching import check_match
    from amoeba.stream.store import reading

    model, read, read_once = resident(tmp_path / "folder"), [], reading._read_once

    def counted(descriptor: int, into: memoryview, offset: int) -> int:
        read.append(len(into))
        return read_once(descriptor, into, offset)

    monkeypatch.setattr(reading, "_read_once", counted)
    with open_store(tmp_path / "store") as store:
        check_match(model, store)
        assert not read
    with open_store(tmp_path / "folder") as store:
        check_match(model, store)
        experts = sum(entry.experts for entry in store.layers)
        assert 0 < sum(read) <= 16 * 1024 * experts < sum(e.experts * e.expert_bytes for e in store.layers) / 20
