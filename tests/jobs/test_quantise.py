"""`amoeba quantise`: folders with quantised experts that we and, where it knows the format, transformers read."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import InvalidVersion
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import amoeba
from amoeba.integrations.experts_module import experts_modules, hand_over, place, placed_in, resident
from amoeba.integrations.model_folder import check_model
from amoeba.jobs.convert import quantise as job
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.placements import placement_named
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from called import call
from selection import each_value_once, quick
from tiny_models import build, logits_of, randomise, save_byte_tokenizer

amoeba.register()
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")
SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 40},
    "mixtral": {"intermediate_size": 136},  # no whole blocks: transformers would take them for equal ones
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96},
}

QUICK = {("qwen3_moe", "mxfp8"), ("qwen3_moe", "nvfp4"), ("mixtral", "fp8"), ("gpt_oss", "mxfp4")}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, sizes in SIZES.items():
        found[name] = tmp_path_factory.mktemp(name) / "model"
        randomise(build(name, **sizes)).save_pretrained(found[name])
        save_byte_tokenizer(found[name])
    return found


def load(folder: Path, implementation: str = "amoeba") -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation, dtype=torch.float32)
    return model.float().eval()  # transformers dequantises some to bf16, whatever was asked for


def place_as_written(model: Any, format: str) -> None:
    for module in experts_modules(model).values():
        experts = quantise_experts(resident(module), job.FORMATS[format], closest=True)
        hand_over(module, experts, placement_named(f"{format}-weights"))


@quick(lambda model_type, format: (model_type, format) in QUICK)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", SIZES)
def test_a_written_folder_holds_what_placing_the_experts_gives(model_type, format, models, tmp_path):
    report = quantise_folder(models[model_type], tmp_path / "out", format)
    found, expected = load(tmp_path / "out"), load(models[model_type])
    place_as_written(expected, format)
    for ours, theirs in zip(experts_modules(found).values(), experts_modules(expected).values(), strict=True):
        one, other = placed_in(ours), placed_in(theirs)
        assert isinstance(one, QuantisedExperts) and isinstance(other, QuantisedExperts)
        assert torch.equal(dequantise_experts(one).gate_up_EJH, dequantise_experts(other).gate_up_EJH)
        assert torch.equal(dequantise_experts(one).down_EHI, dequantise_experts(other).down_EHI)
    assert torch.equal(logits_of(found), logits_of(expected))
    assert report.experts == 12 and not list((tmp_path / "out").glob("*.unfinished*"))
    bits = {"fp8": 1.3, "mxfp8": 1.1, "mxfp4": 0.9, "nvfp4": 0.7}  # rows of 32 to 48 numbers fill whole blocks badly
    assert report.bytes_per_parameter <= bits[format]


@pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU it wants packages for its quantised kernels")
@pytest.mark.parametrize(("model_type", "format"), [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4")])
def test_plain_transformers_reads_what_it_knows(model_type, format, models, tmp_path):
    """It dequantises them without a GPU: the same numbers."""
    report = quantise_folder(models[model_type], tmp_path / "out", format)
    assert report.read_by_transformers
    try:
        theirs = logits_of(load(tmp_path / "out", "eager"))
    except InvalidVersion as error:  # of a package that is not installed: 5.8 asks nevertheless how new it is
        pytest.skip(f"transformers {transformers.__version__} cannot load it itself: {error}")
    assert (theirs - logits_of(load(tmp_path / "out"))).norm() <= 2e-2 * theirs.norm()  # bf16 on the way


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_what_transformers_does_not_know_it_does_not_take_for_numbers(format, models, tmp_path):
    report = quantise_folder(models["qwen3_moe"], tmp_path / "out", format)
    facts = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (facts["quant_method"], facts["format"], report.read_by_transformers) == ("amoeba", format, False)
    with pytest.raises((RuntimeError, ValueError)):  # not with a warning alone
        load(tmp_path / "out", "eager")


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@quick(lambda format: format in ("fp8", "nvfp4"))
@pytest.mark.parametrize("format", FORMATS)
def test_an_interrupted_run_goes_on_and_leaves_no_model_before(format, models, tmp_path):
    class Killed(Exception):
        pass

    def stop_at_second(now: job.Progress) -> None:
        if now.layer == 1:
            raise Killed

    out = tmp_path / "out"
    with pytest.raises(Killed):
        quantise_folder(models["qwen3_moe"], out, format, progress=stop_at_second)
    whole = len(list(out.glob("model-*.safetensors")))  # those behind the first may be whole by then
    assert not (out / "config.json").exists() and whole >= 1 and not list(out.glob("*.writing"))
    with pytest.raises(
        ValueError, match=r"--out: expected a new folder, or an unfinished one.*another model or format"
    ):
        quantise_folder(models["qwen3_moe"], out, next(each for each in FORMATS if each != format))
    with pytest.raises(ValueError, match="which amoeba quantise has not finished"):
        check_model(str(out))
    report = quantise_folder(models["qwen3_moe"], out, format)
    assert report.resumed_layers >= 1 and check_model(str(out)) == str(out)
    quantise_folder(models["qwen3_moe"], tmp_path / "at-once", format)
    for path in (tmp_path / "at-once").iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (out / path.name).read_bytes(), path.name
            continue
        once, resumed = load_file(path), load_file(out / path.name)
        assert once.keys() == resumed.keys()
        assert all(torch.equal(bits_of(t), bits_of(resumed[n])) for n, t in once.items())
    with pytest.raises(ValueError, match="which is there"):
        quantise_folder(models["qwen3_moe"], out, format)
    with pytest.raises(ValueError, match=r"which is the model itself\. Choose another name\.$"):
        quantise_folder(models["qwen3_moe"], models["qwen3_moe"], format)


def test_the_command(models: dict[str, Path], tmp_path: Path) -> None:
    words = ("--format", "mxfp4", "--out", tmp_path / "out", "--json")
    document = call("quantise", models["gpt_oss"], *words).document
    assert document["document"] == "amoeba quantise" and document["read_by_transformers"]
    assert document["bytes_per_parameter"] <= 0.55
    for words, said in (
        ((models["gpt_oss"], "--format", "int3"), "one of fp8, mxfp8, mxfp4, nvfp4"),
        ((tmp_path / "nowhere",), "which is not here"),
        ((tmp_path / "out", "--format", "fp8", "--out", tmp_path / "out"), "which exists"),
    ):
        assert said in call("quantise", *words, code=2).said


@pytest.mark.parametrize(
    ("model_type", "format", "value", "made_before"),
    [
        ("qwen3_moe", "fp8", float("inf"), False),
        ("qwen3_moe", "nvfp4", float("nan"), True),
        ("gpt_oss", "mxfp4", -float("inf"), False),
        ("mixtral", "mxfp8", float("nan"), False),
    ],
)
def test_a_checkpoint_that_is_not_finite_is_refused_by_its_tensor(
    model_type: str, format: str, value: float, made_before: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models[model_type], folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = [each for each in tensors if ".1." in each and ".experts." in each and "bias" not in each][-1]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    if made_before:
        out.mkdir()
    with pytest.raises(ValueError, match=rf"expected finite numbers, which {format} can hold; got .* in {name}"):
        quantise_folder(folder, out, format)
    assert out.exists() == made_before and not list(tmp_path.glob("out/*"))
    result = call("quantise", folder, "--format", format, "--out", out, code=2)
    assert name in "".join(result.output.split())


def test_placing_is_the_same_by_either_name() -> None:
    model = build("qwen3_moe")
    for module in experts_modules(model).values():
        place(module, placement_named("fp8-weights"))
        assert isinstance(placed_in(module), QuantisedExperts)


def test_gpt_oss_with_a_cut_block_is_ours(tmp_path: Path) -> None:
    """transformers takes a row of MXFP4 for whole blocks and would find other sizes than its own."""
    randomise(build("gpt_oss", hidden_size=64, intermediate_size=48)).save_pretrained(tmp_path / "model")
    assert not quantise_folder(tmp_path / "model", tmp_path / "out", "mxfp4").read_by_transformers
    model = load(tmp_path / "model")
    place_as_written(model, "mxfp4")
    assert torch.equal(logits_of(load(tmp_path / "out")), logits_of(model))


def test_a_full_disk_says_how_to_go_on(models, tmp_path, monkeypatch):
    write = job.WholeFile.write

    def full_at_the_second(self: Any, offset: int, data: memoryview) -> None:
        if "model-00002" in str(self._path):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, offset, data)

    monkeypatch.setattr(job.WholeFile, "write", full_at_the_second)
    with pytest.raises(OSError, match=r"room for what is left; got No space left .* run the same command again"):
        quantise_folder(models["qwen3_moe"], tmp_path / "out", "fp8")
    assert not list((tmp_path / "out").glob("*.writing"))
    monkeypatch.undo()
    (tmp_path / "out" / "model-00001-of-00003.safetensors").unlink(missing_ok=True)  # whole or not, as it happened
    assert quantise_folder(models["qwen3_moe"], tmp_path / "out", "fp8").resumed_layers == 0


def same_files(one: Path, other: Path) -> None:
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


@each_value_once()  # every format and many sizes are in tests/cpu/test_quantised_by_core.py
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", SIZES)
def test_the_core_and_torch_write_the_same_bytes(model_type, format, models, tmp_path, monkeypatch):
    quantise_folder(models[model_type], tmp_path / "core", format, device=torch.device("cpu"))
    monkeypatch.setattr(job, "_core", lambda: None)
    quantise_folder(models[model_type], tmp_path / "torch", format, device=torch.device("cpu"))
    same_files(tmp_path / "core", tmp_path / "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", SIZES)
def test_a_gpu_writes_the_same_bytes_as_a_cpu(model_type, format, models, tmp_path):
    for device in ("cpu", "cuda"):
        quantise_folder(models[model_type], tmp_path / device, format, device=torch.device(device))
    same_files(tmp_path / "cpu", tmp_path / "cuda")


def test_ctrl_c_leaves_whole_files_alone(models: dict[str, Path], tmp_path: Path) -> None:
    def stop(now: job.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_folder(models["mixtral"], tmp_path / "out", "mxfp4", progress=stop)
    assert not list((tmp_path / "out").glob("*.writing")) and not (tmp_path / "out" / "config.json").exists()
    quantise_folder(models["mixtral"], tmp_path / "out", "mxfp4")
    quantise_folder(models["mixtral"], tmp_path / "once", "mxfp4")
    same_files(tmp_path / "out", tmp_path / "once")
