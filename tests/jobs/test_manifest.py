"""A sealed folder: what has changed in it since is found and named."""

import json
from pathlib import Path

import pytest
import torch

from amoeba.jobs.train import manifest
from amoeba.jobs.train.manifest import MANIFEST, WholeModel, damages, save_file, seal
from selection import each_value_once
from tiny_models import build


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(manifest, "_PIECE_BYTES", 4)  # so that files have several pieces
    (tmp_path / "inner").mkdir()
    for name in ("first", "inner/second", "empty"):
        (tmp_path / name).write_text("" if name == "empty" else "0123456789")
    seal(tmp_path)
    return tmp_path


def test_what_is_as_it_was_has_no_damages(sealed: Path) -> None:
    assert damages(sealed) == []
    assert set(json.loads((sealed / MANIFEST).read_text())["files"]) == {"first", "inner/second", "empty"}


@each_value_once()
@pytest.mark.parametrize("name", ["first", "inner/second"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0123X56789", "holds other bytes than were written"),
        ("4567012389", "holds other bytes than were written"),  # the same pieces in another order
        ("012345678", "has 9 bytes instead of 10"),
        ("", "is empty"),
        (None, "is missing"),
    ],
)
def test_a_damaged_file_is_named_wherever_it_is(sealed: Path, name: str, text: str | None, said: str) -> None:
    if text is None:
        (sealed / name).unlink()
    else:
        (sealed / name).write_text(text)
    assert damages(sealed) == [f"{name} {said}"]


def test_a_manifest_that_was_changed_is_not_believed(sealed: Path) -> None:
    path = sealed / MANIFEST
    content = json.loads(path.read_text())
    content["files"].pop("first")
    path.write_text(json.dumps(content))
    assert damages(sealed) == ["manifest.json holds other text than was written"]
    path.write_text("{")
    assert damages(sealed) == ["manifest.json cannot be read (JSONDecodeError)"]


def test_a_tensor_file_is_hashed_while_written_and_equals_safetensors(tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    dtypes = torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float16, torch.uint8, torch.float8_e4m3fn
    tensors = {f"{number}.{dtype}": torch.ones(number * 7, 33).to(dtype) for number in range(3) for dtype in dtypes}
    tensors |= {"a number": torch.tensor(3.5), "large": torch.randn(3, 2**21), "turned": torch.randn(40, 3).t()}
    (tmp_path / "ours").mkdir()
    save_file(tensors, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    with monkeypatch.context() as patched:
        hashed: list[Path] = []
        read_again = manifest._hashes
        patched.setattr(manifest, "_hashes", lambda paths, *rest: hashed.extend(paths) or read_again(paths, *rest))
        seal(tmp_path / "ours")
    assert not hashed and damages(tmp_path / "ours") == []


@pytest.mark.gpu
def test_a_file_of_tensors_of_a_gpu_has_the_bytes_of_those_of_a_cpu(tmp_path: Path) -> None:
    tensors = {"large": torch.randn(5, 2**21).bfloat16(), "small": torch.arange(7), "turned": torch.randn(40, 3).t()}
    save_file(tensors, tmp_path / "cpu")
    save_file({name: tensor.cuda() for name, tensor in tensors.items()}, tmp_path / "cuda")
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda").read_bytes()


def test_a_model_is_saved_with_the_same_bytes_and_hashed_on_the_way(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "theirs")
    WholeModel().save(model, tmp_path / "ours")
    assert manifest._hashes_of_written, "this version of transformers does not save by safe_save_file"
    for path in (tmp_path / "theirs").iterdir():
        assert (tmp_path / "ours" / path.name).read_bytes() == path.read_bytes(), path.name
    seal(tmp_path / "ours")
    assert damages(tmp_path / "ours") == []
