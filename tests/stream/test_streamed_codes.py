"""Checkpoints in eight and four bits streamed as codes and scales: the bits of the same experts resident."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_models import save
from torch import Tensor
from transformers import AutoModelForCausalLM

import amoeba
from amoeba.integrations.experts_module import experts_modules
from amoeba.jobs.convert import quantise as quantising
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.jobs.sharded_model import load_share
from amoeba.stream import attaching
from amoeba.stream.cpu.memory import READS
from amoeba.stream.store import StoreError, aligned_buffer, index, open_store
from amoeba.stream.store.packing import pack
from called import call
from quantised_checkpoints import write_fp8, write_mxfp4
from selection import quick
from tiny_models import EXPERTS, LAYERS, lora_gradients, token_ids

amoeba.register()
FORMATS = {
    **{"fp8": "fp8-128", "ue8m0": "fp8-128", "mxfp4": "mxfp4"},  # files of the hub's
    **{"mxfp8": "mxfp8", "nvfp4": "nvfp4", "nvfp4 of gpt-oss": "nvfp4"},
}
QUICK = {("fp8", 1), ("mxfp4", 2), ("ue8m0", EXPERTS), ("nvfp4", 2), ("nvfp4 of gpt-oss", 1)}


def write(folder: Path, name: str) -> Path:
    folder.mkdir()
    if name in ("mxfp8", "nvfp4"):  # our own: codes have a dimension more
        save(folder / "plain", hidden_size=40, moe_intermediate_size=24, vocab_size=257)
        quantise_folder(folder / "plain", folder / "model", name)
        return folder / "model"
    if name == "nvfp4 of gpt-oss":  # all experts in one tensor, with biases
        save(folder / "plain", "gpt_oss", hidden_size=48, intermediate_size=40)
        quantise_folder(folder / "plain", folder / "model", "nvfp4")
        return folder / "model"
    if name == "mxfp4":
        write_mxfp4(folder)
    else:
        write_fp8(folder, **({"scale_dtype": "float8_e8m0fnu"} if name == "ue8m0" else {}))
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """name -> folder and store."""
    found = {}
    for name in FORMATS:
        root = tmp_path_factory.mktemp(name)
        folder = write(root / "folder", name)
        found[name] = folder, Path(pack(folder, root / "store").store)
    return found


def resident(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="amoeba").eval()


def budget(path: Path, slots: int) -> int:
    with open_store(path) as store:
        return store.rest_bytes + store.scratch_bytes(READS) + slots * sum(e.expert_bytes for e in store.layers)


def outcome(model: Any) -> list[Tensor]:
    """Of many tokens at once, and of one after the other."""
    ids = token_ids()
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        steps = model.generate(input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1]), eos_token_id=None, **options)
        return [model(input_ids=ids, use_cache=False).logits, steps.sequences, *steps.logits]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@quick(lambda name, slots: (name, slots) in QUICK)
@pytest.mark.parametrize("slots", [1, 2, EXPERTS])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_and_logits_are_those_of_the_resident_model(name: str, slots: int, stored) -> None:
    folder, store = stored[name]
    with amoeba.stream.attach(store, ram=budget(store, slots)) as streamed:
        assert streamed.memory.slots == (slots,) * LAYERS
        assert streamed.rest_bytes == sum(p.nbytes for p in streamed.model.parameters())
        assert str(streamed.memory).endswith(f", as {FORMATS[name]}")
        assert same(outcome(streamed.model), outcome(resident(folder)))


def test_a_quantised_folder_is_streamed_from_without_packing_it(stored) -> None:
    folder, _ = stored["fp8"]
    with amoeba.stream.attach(folder, ram=budget(folder, 2)) as streamed:
        assert streamed.memory.slots == (2,) * LAYERS and streamed.report().store == "folder"
        assert same(outcome(streamed.model), outcome(resident(folder)))


def test_a_model_with_resident_codes_gives_them_up(stored) -> None:
    folder, store = stored["mxfp4"]
    model = resident(folder)
    expected = outcome(model)
    with amoeba.stream.attach(model, store=store, ram=budget(store, 1)) as streamed:
        assert streamed.model is model and not any(p.dtype == torch.uint8 for p in model.parameters())
        assert same(outcome(model), expected)


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_lora_next_to_streamed_codes_has_the_gradients_of_resident_ones(name: str, stored) -> None:
    targets = ["gate_proj", "up_proj", "down_proj", "q_proj"]
    folder, store = stored[name]
    expected = lora_gradients(resident(folder), token_ids(), targets=targets)
    with amoeba.stream.attach(store, ram=budget(store, 2)) as streamed:
        found = lora_gradients(streamed.model, token_ids(), targets=targets)
    assert set(found) == set(expected)
    for each, gradient in expected.items():
        assert gradient.norm() > 0 and torch.equal(found[each], gradient), each


def test_a_store_of_codes_takes_a_byte_a_number_or_half_of_one(tmp_path: Path, stored) -> None:
    write_fp8(tmp_path, hidden_size=256, moe_intermediate_size=256)
    pack(tmp_path, tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        (entry, *_) = store.layers
        assert entry.expert_bytes <= 1.03 * 3 * 256 * 256
    with open_store(stored["mxfp4"][1]) as store:
        assert sum(part.shape[0] * part.shape[1] for part in store.layers[0].parts[:4]) == 0.53125 * 3 * 64 * 96


GREEDY = ("Once", "--max-new-tokens", "6", "--temperature", "0", "--device", "cpu", "--json")


def invoke(*words: str) -> tuple[dict[str, Any], str]:
    """The last line as a document, and all that was said."""
    result = call(*words)
    return result.document, result.said


def change(path: Path, ending: str, make: Callable[[Tensor], Tensor | None]) -> None:
    file = path / "model.safetensors"
    changed = {name: make(t) if name.endswith(ending) else t for name, t in load_file(file).items()}
    save_file({name: t for name, t in changed.items() if t is not None}, file, {"format": "pt"})


def tell(path: Path, method: str | None = "fp8", **facts: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = None if method is None else config["quantization_config"] | facts
    (path / "config.json").write_text(json.dumps(config))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a scale missing": (
        lambda path: change(path, "experts.2.down_proj.weight_scale_inv", lambda t: None),
        "experts.2.down_proj.weight in fp8-128; got a tensor without scales",
    ),
    "no scales": (lambda path: change(path, "_scale_inv", lambda t: None), "got the numbers alone .float8_e4m3fn"),
    "no scales of attention": (
        lambda path: change(path, "q_proj.weight_scale_inv", lambda t: None),
        "q_proj.weight with its scales, .*; got the numbers alone",
    ),
    "nobody tells of codes": (
        lambda path: [tell(path, None), change(path, "experts", lambda t: t.float())],
        "self_attn.k_proj.weight with its scales",
    ),
    "an expert missing": (
        lambda path: change(path, "experts.4.down_proj.weight", lambda t: None),
        "a tensor .*experts.4.down_proj.weight; got none in the checkpoint",
    ),
    "scales of other blocks": (lambda path: tell(path, weight_block_size=[64, 64]), r"shape \(3, 3\)"),
    "blocks of 96": (lambda path: tell(path, weight_block_size=[96, 96]), "powers of two"),
    "one scale for a tensor": (lambda path: tell(path, weight_block_size=None), "quantised by fp8, in a way that"),
    "e5m2": (
        lambda path: change(path, "up_proj.weight", lambda t: t.float().to(torch.float8_e5m2)),
        "in float8_e5m2",
    ),
    "another method": (lambda path: tell(path, quant_method="gptq"), "quantised by gptq, in a way that"),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_a_quantised_folder_that_cannot_be_read_whole_is_refused(how: str, stored, tmp_path: Path) -> None:
    spoil, said = WRONG[how]
    shutil.copytree(stored["fp8"][0], tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(ValueError, match=said):
        open_store(tmp_path / "model")


@quick(lambda ending: ending == ".scale")
@pytest.mark.parametrize("ending", [".scale", ".qscale_weight"])
def test_scales_by_other_names_are_read_from_folder_and_store(ending: str, stored, tmp_path: Path) -> None:
    folder = shutil.copytree(stored["fp8"][0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace(".weight_scale_inv", ending): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    renamed |= {"model.norm" + ending: torch.ones(1)}  # beside a weight that is no code: no scale of it
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    store = Path(pack(folder, tmp_path / "store").store)
    expected = outcome(resident(stored["fp8"][0]))
    assert same(outcome(resident(folder)), expected)
    for each in (folder, store):
        with amoeba.stream.attach(str(each), ram=budget(each, slots=3)) as streamed:
            assert same(outcome(streamed.model), expected)


def change_layer(folder: Path, ending: str, make: Callable[[Tensor], Tensor | None]) -> None:
    """In the first layer's file of what `amoeba quantise` wrote, and in the index of all files."""
    (file,) = folder.glob("model-00001-of-*.safetensors")
    changed = {name: make(t) if name.endswith(ending) else t for name, t in load_file(file).items()}
    save_file({name: t for name, t in changed.items() if t is not None}, file, {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    facts = json.loads(path.read_text())
    gone = {name for name, tensor in changed.items() if tensor is None}
    facts["weight_map"] = {name: file for name, file in facts["weight_map"].items() if name not in gone}
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda scale: None, r"a tensor .*experts.3.down_proj.weight_matrix_scale; got none"),
        (lambda scale: scale[None], r"shape \(\) in one of float32, as all others; got \(1,\)"),
        (lambda scale: scale.half(), r"got \(\) in float16"),
    ],
    ids=["missing", "another shape", "in half precision"],
)
def test_a_matrix_without_its_own_scale_is_refused(make: Callable, said: str, stored, tmp_path: Path) -> None:
    shutil.copytree(stored["nvfp4"][0], tmp_path / "model")
    change_layer(tmp_path / "model", "experts.3.down_proj.weight_matrix_scale", make)
    with pytest.raises(ValueError, match=said):
        open_store(tmp_path / "model")


def test_gate_and_up_with_a_scale_each_are_refused_where_they_are_read(stored, tmp_path: Path) -> None:
    folder = shutil.copytree(stored["nvfp4"][0], tmp_path / "model")
    change_layer(folder, "experts.3.up_proj.weight_matrix_scale", lambda scale: 2 * scale)
    said = r"expert 3.*one scale for gate and up of an expert; got two.*amoeba quantise"
    with open_store(folder) as store:
        blob = aligned_buffer(store.expert_bytes(0))
        store.read(0, 2, blob)
        with pytest.raises(StoreError, match=said):
            store.read(0, 3, blob)
    with pytest.raises(StoreError, match=said):
        pack(folder, tmp_path / "store")
    with pytest.raises(StoreError, match="an incomplete one"):
        open_store(tmp_path / "store")


@quick(lambda family, format: (family, format) == ("qwen3_moe", "nvfp4"))
@pytest.mark.parametrize("format", quantising.FORMATS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_quantise_writes_is_packed_and_generates_as_the_resident_folder(family, format, tmp_path):
    plain, folder, store = tmp_path / "plain", tmp_path / "model", tmp_path / "store"
    save(plain, family, vocab_size=257, **({"moe_intermediate_size": 56} if family == "qwen3_moe" else {}))
    invoke("quantise", str(plain), "--format", format, "--out", str(folder), "--json")
    document, _ = invoke("pack", str(folder), "--out", str(store), "--json")
    assert document["numbers"] == quantising.FORMATS[format].name
    assert not invoke("pack", str(store), "--check", "--json")[0]["damaged"]
    words = (*GREEDY, "--dtype", "float32")
    kept, _ = invoke("generate", str(folder), *words)
    assert kept["placement"] == f"{format}-weights"
    for each in (store, folder):
        streamed, said = invoke("generate", str(each), *words, "--ram", str(2 * budget(each, 2)))
        assert streamed["text"] == kept["text"] and f"as {document['numbers']}" in said
        assert streamed["streaming"]["numbers"] == document["numbers"]


def test_what_takes_plain_experts_alone_says_so(stored) -> None:
    _, store = stored["fp8"]
    with pytest.raises(ValueError, match="Leave --experts ranks out"):
        load_share(str(store), None, ranks=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected torch.float32"):
        amoeba.stream.attach(store, ram="1GiB", dtype=torch.bfloat16)
    with open_store(store) as opened, pytest.raises(ValueError, match="quantised ones, in fp8-128"):
        opened.views(0, aligned_buffer(opened.expert_bytes(0)))


@pytest.mark.parametrize("changed", [{"name": "fp6"}, {"kind": "vectors"}, {"row_parts": 3}, {"dtype": "int4"}])
def test_codes_of_a_later_version_are_refused_by_name(changed: dict[str, Any], stored, tmp_path: Path) -> None:
    shutil.copytree(stored["fp8"][1], tmp_path / "store")
    path = tmp_path / "store" / "index.json"
    facts = json.loads(path.read_text())
    facts["layers"][1]["format"] |= changed
    del facts["crc32"]
    path.write_text(json.dumps(facts | {"crc32": index._crc32(facts)}))
    with pytest.raises(StoreError, match=r"got (block_scaled|vectors) .*Use a newer aMoEba"):
        open_store(path.parent)


def test_an_index_without_the_scale_of_a_matrix_is_refused(stored, tmp_path: Path) -> None:
    """Else the scale of a matrix would be what lies behind its parts."""
    shutil.copytree(stored["nvfp4"][1], tmp_path / "store")
    path = tmp_path / "store" / "index.json"
    facts = json.loads(path.read_text())
    for layer in facts["layers"]:
        layer["parts"] = [part for part in layer["parts"] if part["name"] != "down_matrix_scale"]
    del facts["crc32"]
    path.write_text(json.dumps(facts | {"crc32": index._crc32(facts)}))
    with pytest.raises(StoreError, match="a damaged one"):
        open_store(path.parent)


def test_a_changed_code_is_named_and_never_computed_with(stored, tmp_path: Path) -> None:
    shutil.copytree(stored["mxfp4"][1], tmp_path / "store")
    file = tmp_path / "store" / "experts" / "00001.bin"
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    with amoeba.stream.attach(tmp_path / "store", ram="1GiB") as streamed, pytest.raises(StoreError, match="expert 0"):
        outcome(streamed.model)


def test_all_but_the_experts_is_an_unquantised_model(stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU transformers would else put linears of its own into it, which have no gradient."""
    asked, load = [], attaching.load_rest

    def loaded(kind: Any, config: Any, *rest: Any) -> Any:
        asked.append(copy.deepcopy(config))
        return load(kind, config, *rest)

    monkeypatch.setattr(attaching, "load_rest", loaded)
    with amoeba.stream.attach(stored["fp8"][1], ram="1GiB") as streamed:
        model = streamed.model
        assert len(asked) == 1 and not hasattr(asked[0], "quantization_config")
        assert not getattr(model, "is_quantized", False) and all(p.dtype == torch.float32 for p in model.parameters())
        assert not [p for module in experts_modules(model).values() for p in module.parameters()]


def test_without_a_dtype_in_config_the_rest_is_bf16_as_in_the_resident_model(stored, tmp_path: Path) -> None:
    shutil.copytree(stored["mxfp4"][0], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    del config["dtype"]
    path.write_text(json.dumps(config))
    with amoeba.stream.attach(tmp_path / "model", ram="1GiB") as streamed:
        assert streamed.model.dtype == streamed.memory.layers[0].dtype == resident(path.parent).dtype == torch.bfloat16
