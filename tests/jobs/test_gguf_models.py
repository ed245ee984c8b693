"""Commands take a GGUF file: the tokens of the safetensors it was made of, fine-tuning, streaming, merging."""

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import rank_jobs
from amoeba import lora
from amoeba.cpu.core import load_core
from amoeba.decoding.cpu_step import CpuStep, NativeModel, native_model
from amoeba.decoding.decoder import Decoder
from amoeba.integrations import block_linear
from amoeba.integrations.block_linear import BlockEmbedding, BlockLinear
from amoeba.integrations.experts_module import described, experts_modules, take_back_shapes
from amoeba.integrations.model_folder import load_rest, load_without_weights
from amoeba.jobs.cpu_dtype import DtypeChoice
from amoeba.jobs.placed_model import attach_in, load_placed, read_layer
from amoeba.plan.model import read_facts
from amoeba.stream.store import open_store
from called import call
from gguf_models import ARCHITECTURES, UNLIKE, write_gguf
from selection import each_value_once, quick
from tiny_models import build, save_byte_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": 512}
CPU = torch.device("cpu")


def load(path: Path, placement: str = "auto", dtype: torch.dtype | None = None) -> Any:
    return load_placed(str(path), DtypeChoice(dtype, None, ""), placement, trains=False, device=CPU)[0]


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and the same model in a GGUF file."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(request.param, norm_topk_prob=True, **SIZES).to(torch.bfloat16)
    model.save_pretrained(folder / "folder")
    save_byte_tokenizer(folder / "folder")
    return folder / "folder", write_gguf(folder / "model.gguf", model)


def test_logits_and_tokens_are_those_of_the_safetensors_source(pair):
    prompt = torch.randint(0, 256, (1, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = (load(path)(prompt).logits for path in reversed(pair))
    assert torch.equal(found, expected)


# The numbers of all, in every run: stream/test_gguf_store.py; their configurations: integrations/test_gguf_files.py.
@quick(lambda model_type: model_type in ("qwen2_moe", "deepseek_v3", "qwen3_next", "lfm2_moe", "granitemoe"))
@pytest.mark.parametrize("model_type", [kind for kind in ARCHITECTURES if kind not in ("qwen3_moe", "gpt_oss")])
def test_every_family_has_the_logits_and_tokens_of_its_safetensors_source(model_type, tmp_path):
    """Weights that llama.cpp's converter permutes, shifts or splits are as they were."""
    model = build(model_type, **SIZES, **UNLIKE.get(model_type, {})).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", model)
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        models = [load(each, dtype=torch.float32) for each in (path, tmp_path / "folder")]
        found, expected = (each(ids).logits for each in models)
        assert torch.allclose(found, expected, atol=1e-5, rtol=1e-4)
        assert expected.std() > 0.1
        found, expected = (each.generate(ids, max_new_tokens=6, do_sample=False) for each in models)
    assert torch.equal(found, expected)


def test_text_of_a_vision_model_is_served_without_its_images(tmp_path):
    model = build("qwen3_moe", norm_topk_prob=True, **SIZES).to(torch.bfloat16)
    changes = {"general.architecture": "qwen3vlmoe", "rope.dimension_sections": [1, 1, 2, 0]}
    found = load(write_gguf(tmp_path / "model.gguf", model, **changes), dtype=torch.float32)
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, model.float()(ids).logits, atol=1e-3)


@quick(lambda pair: pair == "gpt_oss")
def test_generate_writes_the_same_tokens_resident_and_streamed(pair):
    options = ("Once", "--max-new-tokens", 6, "--temperature", 0, "--json")
    folder, file = (call("generate", path, *options).document for path in pair)
    assert file["generated_ids"] == folder["generated_ids"]
    streamed, expected = (call("generate", path, *options, "--ram", "64MiB").document for path in reversed(pair))
    assert streamed["generated_ids"] == expected["generated_ids"]
    assert streamed["placement"] == "streamed"


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("gpt_oss", **SIZES | {"hidden_size": 64, "intermediate_size": 64}).to(torch.bfloat16)
    kinds = {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4", "rest": "Q8_0"}
    return write_gguf(tmp_path_factory.mktemp("mxfp4") / "model.gguf", model, kinds)


def test_quantised_experts_stay_so_and_can_be_packed_for_the_cpu(mxfp4):
    prompt = torch.randint(0, 256, (1, 7), generator=torch.Generator().manual_seed(0))
    stored, numbers = (load(mxfp4, placement, torch.float32) for placement in ("auto", "cpu-bf16"))
    names = {type(module).__name__: module for module in stored.modules()}
    assert next(iter(names["GptOssExperts"]._parameters.values())).dtype == torch.uint8
    with torch.no_grad():
        found, expected = stored(prompt).logits, numbers(prompt).logits
    assert (found - expected).norm() < 1e-2 * expected.norm()
    with pytest.raises(ValueError, match="experts: expected mxfp4-weights, as they are in the file; got nvfp4-weights"):
        load(mxfp4, "nvfp4-weights")


def test_streamed_logits_are_those_of_resident_experts(mxfp4):
    prompt = torch.randint(0, 256, (1, 7), generator=torch.Generator().manual_seed(0))
    streamed, _ = attach_in(DtypeChoice(torch.float32, None, ""), str(mxfp4), ram="64MiB")
    with streamed, torch.no_grad():
        found, expected = streamed.model(prompt).logits, load(mxfp4, dtype=torch.float32)(prompt).logits
    assert (found - expected).norm() < 1e-2 * expected.norm()  # streamed ones are computed in bf16


def test_an_adapter_is_trained_on_a_file_records_it_and_is_merged(mxfp4, tmp_path, caplog):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "hello hello hello world"}\n' * 20)
    options = ("--data", data, "--steps", 2, "--sequence-length", 32, "--batch-size", 2, "--out", tmp_path / "run")
    call("finetune", mxfp4, *options)
    lora.load(load(mxfp4), tmp_path / "run" / "adapter")
    assert "another file" not in caplog.text
    merged = tmp_path / "merged"
    call("merge", mxfp4, "--adapter", tmp_path / "run", "--out", merged)
    assert json.loads((merged / "config.json").read_text())["model_type"] == "gpt_oss"

    other = mxfp4.with_name("other.gguf")
    other.write_bytes(mxfp4.read_bytes()[:-1] + b"\1")
    lora.load(load(other), tmp_path / "run" / "adapter")
    assert "was trained on another file of its base model" in caplog.text


def test_a_plan_knows_the_sizes_of_a_file(mxfp4):
    facts = read_facts(str(mxfp4))
    assert (facts.numbers, facts.why_not_streamed, facts.files_here) == ("mxfp4", None, True)
    assert facts.expert_bytes("resident") < mxfp4.stat().st_size


@quick(lambda kind: kind in ("Q8_0", "Q5_K"))  # what each stands for: tests/precision/test_blocks.py
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_quantised_type_is_the_dequantised_model(kind, tmp_path):
    model = build("qwen3_moe", norm_topk_prob=True, **SIZES, hidden_size=256, moe_intermediate_size=256)
    kinds = dict.fromkeys(("gate", "up", "down"), kind)
    path = write_gguf(tmp_path / "model.gguf", model.to(torch.bfloat16), kinds)
    stored = load(path, dtype=torch.float32)
    placements = {described(module).placement.name for module in experts_modules(stored).values()}
    assert placements == {f"{kind.lower()}-weights"}
    numbers = unquantised(path, stored.config)
    prompt = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = stored(prompt).logits, numbers(prompt).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()
    native = native_model(stored)
    assert isinstance(native, NativeModel), native
    decoder = Decoder(stored, batch=1, length=32, native=native)
    tokens = [token for (token,) in decoder.generate(prompt.tolist(), max_new_tokens=8)]
    stored.generation_config.eos_token_id = None
    assert tokens == stored.generate(prompt, do_sample=False, max_new_tokens=8)[0, 12:].tolist()


KINDS_OF_REST = ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K"]


@each_value_once()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS_OF_REST)
def test_what_is_no_expert_stays_in_blocks_where_the_cpu_multiplies_them(kind, tied, tmp_path, monkeypatch):
    if not load_core().in_whole_numbers:
        pytest.skip("this CPU has no dot products of bytes in 512 bits")
    monkeypatch.setattr(block_linear, "compute_dtype", lambda dtype, device: torch.float32)
    model = build("qwen3_moe", norm_topk_prob=True, **SIZES, hidden_size=256, tie_word_embeddings=tied)
    path = write_gguf(tmp_path / "model.gguf", model.to(torch.bfloat16), {"rest": kind})
    numbers, choice = load(path, dtype=torch.float32), DtypeChoice(torch.float32, None, "")
    found, _ = load_placed(str(path), choice, "auto", trains=False, device=CPU, rest_in_blocks=True)
    layers = {name: each for name, each in found.named_modules() if isinstance(each, BlockLinear | BlockEmbedding)}
    assert len(layers) == 4 * found.config.num_hidden_layers + (0 if tied else 2)
    for name, layer in layers.items():
        plain = numbers.get_submodule(name)
        assert torch.equal(layer.weight.bfloat16(), plain.weight.bfloat16())
        assert not list(layer.parameters()) and layer.rows.nbytes < plain.weight.nbytes / 3
        plain.weight.data.copy_(layer.weight)  # else rounded to the file's bf16

    prompt = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, expected = found(prompt).logits, numbers(prompt).logits
    of_tokens = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Rows are rounded to 8 bits; a token that chooses another expert is seen by all that follow
    assert 1e-5 < of_tokens.flatten().sort().values[2] < 2e-2
    logits = found(inputs_embeds=found.get_input_embeddings()(prompt).requires_grad_()).logits
    assert torch.allclose(logits, expected, atol=1e-4)  # they are not where a gradient is taken

    natives = [native_model(each) for each in (found, numbers)]
    assert all(isinstance(native, NativeModel) for native in natives), natives
    tokens = []
    for each, native in zip((found, numbers), natives, strict=True):
        decoder = Decoder(each, batch=1, length=32, native=native)
        step = CpuStep(native, decoder._rows, None)
        step()  # from an empty cache
        tokens.append(step._logits_BV.clone())
    assert (tokens[0] - tokens[1]).norm() < 1e-3 * tokens[1].norm()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.thorough
def test_memory_holds_hardly_more_than_the_file(tmp_path):
    small, large = (write_large(tmp_path / f"{layers}.gguf", layers) for layers in (1, 3))
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "hello hello hello world"}\n' * 20)
    training = ["--data", str(data), "--steps", "2", "--sequence-length", "32", "--batch-size", "2", "--r", "1"]
    runs = [("generate", "Once", "--max-new-tokens", "6"), ("finetune", *training)]
    with rank_jobs.started(1) as process:
        (peaks,) = process.run(peaks_of, [(str(small), str(large), str(tmp_path), runs)])
    size = large.stat().st_size
    assert size > 300e6
    for (command, *_), peak in zip(runs, peaks, strict=True):
        assert peak < 1.3 * size, f"{command}: {peak / 1e6:.0f} MB for a file of {size / 1e6:.0f} MB"


def write_large(path: Path, layers: int) -> Path:
    """113 MB for each layer."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 2, "num_hidden_layers": layers}
    model = build("qwen3_moe", norm_topk_prob=True, **SIZES, **sizes)
    model.config.num_experts = count = 128
    for module in experts_modules(model).values():
        for name, stack in list(module.named_parameters()):
            setattr(module, name, torch.nn.Parameter(stack[:1].expand(count, -1, -1)))
    for name, _ in list(model.named_parameters()):
        if name.endswith("mlp.gate.weight"):
            model.get_submodule(name.removesuffix(".weight")).weight = torch.nn.Parameter(torch.randn(count, 1024))
    return write_gguf(path, model, dict.fromkeys(("gate", "up", "down", "rest"), "Q4_K") | {"rest": "Q6_K"})


def peaks_of(small: str, large: str, folder: str, runs: list[list[str]]) -> list[int]:
    """In a process of its own: beyond what was there before, when the commands had run with the small file."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

    found = []
    for command, *options in runs:
        for number, file in enumerate((small, large)):
            gc.collect(), ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            out = ["--out", f"{folder}/{command}{number}"] if command == "finetune" else []
            call(command, file, *options, *out)
        found.append(status("VmHWM") - before)
    return found


def unquantised(path: Path, config: Any) -> Any:
    """The model with plain experts, in fp32."""
    with open_store(path) as store:
        model = load_rest(load_without_weights(config, str(path)), str(path), dict(store.rest_tensors()), torch.float32)
        for number, entry in enumerate(store.layers):
            module = model.get_submodule(entry.name)
            take_back_shapes(module, torch.float32)
            read_layer(store, number, module)
    return model
