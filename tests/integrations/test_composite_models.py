"""Folders with a vision or audio part, as users download them: every command serves them, and none loses a part."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from amoeba import lora, stream
from amoeba.integrations.model_folder import load_config, load_model
from amoeba.integrations.text_model import beyond_text, vocabulary
from amoeba.jobs.convert.merge import merge
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.jobs.finetune.finetune import finetune
from amoeba.jobs.settings import FinetuneSettings
from amoeba.stream.store import aligned_buffer, open_store
from amoeba.stream.store.packing import pack
from tiny_composites import VOCABULARY, composite_config, kinds, save_composite
from tiny_runs import Quiet

pytestmark = pytest.mark.filterwarnings("ignore")

# Loaded whole. Of one with a text-only class, which leaves the vision part out: jobs/test_images.py.
QUICK = ("gemma4",)
# Kinds that no command serves -> what is said.
REFUSED = {"diffusion_gemma": "a language model that writes one token after another"}
# Kinds that are loaded, trained and merged, but whose experts are not read one by one -> what is said.
RESIDENT_ALONE = {
    "inkling2": "whose activation aMoEba computes itself",
    "muse_spark": "whose activation aMoEba computes itself",
}
# Resident in another order of gate and up, or transposed: other kernels, equal up to rounding.
OTHER_ORDER = {"aria"}
# Packages that a kind imports -> it is left out where they are absent.
NEEDS = {"inkling_mm_model": "scipy"}
LEAST_KINDS = 5  # in transformers 5.8; 5.23 has 22


@pytest.mark.parametrize("model_type", QUICK)
def test_a_folder_with_a_vision_part_goes_through_every_command(model_type: str, tmp_path: Path) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    every_command(model_type, tmp_path)


def test_experts_for_text_and_for_images_are_told_apart_in_one_list(tmp_path: Path) -> None:
    model_type = "ernie4_5_vl_moe"
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    folder = save_composite(model_type, tmp_path / "model")
    expected = load_model(str(folder), None).state_dict()
    with open_store(folder) as store:
        assert {each.name.split(".")[-2] for each in store.layers} == {"text_moe", "vision_moe"}
        for number, layer in enumerate(store.layers):
            for expert in range(layer.experts):
                blob = aligned_buffer(layer.expert_bytes)
                store.read(number, expert, blob)
                views = layer.views(blob)
                assert torch.equal(views.gate_up_JH, expected[f"{layer.name}.gate_up_proj"][expert])
                assert torch.equal(views.down_HI, expected[f"{layer.name}.down_proj"][expert])


@pytest.mark.thorough
def test_every_kind_with_a_vision_or_audio_part_goes_through_every_command(tmp_path: Path) -> None:
    failed, tried = [], []
    for model_type in kinds():
        if model_type in NEEDS:
            try:
                __import__(NEEDS[model_type])
            except ImportError:
                continue
        tried.append(model_type)
        try:
            every_command(model_type, tmp_path / model_type)
        except Exception as error:
            failed.append(f"{model_type}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)
    assert len(tried) >= LEAST_KINDS


def every_command(model_type: str, root: Path) -> None:
    if model_type in REFUSED:  # by its configuration: some versions of transformers cannot make a small one
        composite_config(model_type).save_pretrained(root)
        with pytest.raises(ValueError, match=REFUSED[model_type]):
            load_model(str(root), None)
        return
    folder = save_composite(model_type, root / "model")
    assert vocabulary(load_config(str(folder))) == VOCABULARY
    model = load_model(str(folder), None)
    expected = logits_of(model)
    prompt = torch.tensor([[9, 27, 80]], dtype=torch.int64, device="cpu")
    assert model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 5)
    if model_type in RESIDENT_ALONE:
        for command in (pack, lambda *names: quantise_folder(*names, "mxfp8")):
            with pytest.raises(ValueError, match=RESIDENT_ALONE[model_type]):
                command(folder, root / "refused")
    else:
        streams(model_type, folder, root / "store", expected)
        quantises(folder, root / "quantised", expected)
    trains_and_merges(folder, root, expected)


def streams(model_type: str, folder: Path, store: Path, expected: Tensor) -> None:
    pack(folder, store)
    for source in (store, folder):
        with stream.attach(source, ram="1GiB") as streamed:
            found = logits_of(streamed.model)
        assert torch.allclose(found, expected, atol=1e-5) if model_type in OTHER_ORDER else torch.equal(found, expected)


def quantises(folder: Path, out: Path, expected: Tensor) -> None:
    """Everything but the experts is there, bit for bit."""
    quantise_folder(folder, out, "mxfp8")
    before, after = tensors_in(folder), tensors_in(out)
    for name, tensor in before.items():
        if ".experts." not in name:
            assert torch.equal(after[name], tensor), name
    found = logits_of(load_model(str(out), None))
    assert (found - expected).norm() < 0.2 * expected.norm()


def trains_and_merges(folder: Path, root: Path, expected: Tensor) -> None:
    data, run, merged = root / "data.jsonl", root / "run", root / "merged"
    rows = [{"prompt": f"say {number}", "completion": f"it is {number * number}"} for number in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = FinetuneSettings(
        model=str(folder),
        data=str(data),
        out=str(run),
        steps=2,
        batch_size=2,
        sequence_length=32,
        r=2,
        alpha=4,
        targets=["all-linear"],
        held_out=0.2,
        learning_rate=1e-2,
    )
    finetune(settings, Quiet())
    model = load_model(str(folder), None)
    state = lora.load(model, run / "adapter")
    assert state.experts
    assert not {*state.experts, *state.linears} & beyond_text(model)
    adapted = logits_of(model)
    assert not torch.equal(adapted, expected)

    merge(folder, run, merged)
    before, after = tensors_in(folder), tensors_in(merged)
    assert list(after) == list(before)
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    for part in ("vision", "visual", "audio"):
        assert not [name for name in changed if part in name]
    assert json.loads((merged / "config.json").read_bytes()) == json.loads((folder / "config.json").read_bytes())
    assert torch.allclose(logits_of(load_model(str(merged), None)), adapted, atol=1e-4, rtol=1e-4)
    architecture = getattr(transformers, load_config(str(merged)).architectures[0])
    _, told = architecture.from_pretrained(merged, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def logits_of(model: Any) -> Tensor:
    ids = torch.tensor([[3, 9, 27, 80, 4, 9]], dtype=torch.int64, device="cpu")
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found
