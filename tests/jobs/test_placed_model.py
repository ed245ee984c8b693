"""A model loaded layer by layer is the one that transformers loads, bit for bit, and memory never holds it twice."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

import rank_jobs
from amoeba import lora
from amoeba.cpu import placements as cpu_placements
from amoeba.integrations.experts_module import described, experts_modules, placed_in
from amoeba.integrations.model_folder import load_model
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs import placed_model
from amoeba.jobs.cpu_dtype import DtypeChoice
from amoeba.jobs.placed_model import attach_in, load_placed
from quantised_checkpoints import quantise_saved
from selection import quick
from tiny_models import build, experts_classes, logits_of, save_byte_tokenizer

CPU = torch.device("cpu")
# gates and none, transposed, interleaved, biased, stacked, a norm after the expert, state spaces
FAMILIES = ("qwen3_moe", "gpt_oss", "nemotron_h")
NO_ENGINE = cpu_placements._why_not()
needs_engine = pytest.mark.skipif(NO_ENGINE is not None, reason=str(NO_ENGINE))


def save(folder: Path, model_type: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    shard = changes.pop("shard", "1GB")
    model: Any = build(model_type, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    save_byte_tokenizer(folder)
    return model


def by_transformers(folder: Path, dtype: torch.dtype | None, placement: str) -> Any:
    model = load_model(str(folder), dtype)
    place_experts(model, placement, trains=False, device=CPU)
    return model


def by_layers(folder: Path, dtype: torch.dtype | None, placement: str) -> Any:
    return load_placed(str(folder), DtypeChoice(dtype, None, ""), placement, trains=False, device=CPU)[0]


def facts_of(tensor: Tensor) -> tuple:
    return tensor.dtype, tensor.stride(), tensor.requires_grad


def tied(tensors: dict[str, Tensor]) -> list[int]:
    """For each the first place of the same tensor."""
    ids = [id(tensor) for tensor in tensors.values()]
    return [ids.index(each) for each in ids]


def assert_same_models(one: Any, other: Any) -> None:
    for kind in ("named_parameters", "named_buffers"):
        ones, others = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (one, other))
        assert ones.keys() == others.keys()
        for name, tensor in ones.items():
            assert facts_of(tensor) == facts_of(others[name]), name
            assert torch.equal(tensor, others[name]), name
        assert tied(ones) == tied(others)
    assert type(one) is type(other)
    assert one.training == other.training
    assert one.config.to_dict() == other.config.to_dict()
    assert one.generation_config.to_dict() == other.generation_config.to_dict()
    assert one.name_or_path == other.name_or_path
    assert torch.equal(logits_of(one), logits_of(other))


@quick(lambda model_type, dtype: model_type in FAMILIES and dtype == torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize("model_type", experts_classes())
def test_it_has_the_bits_that_transformers_gives_it(model_type, dtype, tmp_path):
    model = save(tmp_path, model_type)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        pytest.skip("a model of another kind")
    try:
        logits_of(by_transformers(tmp_path, dtype, "resident"))
    except RuntimeError as error:
        pytest.skip(f"transformers {transformers.__version__} cannot run it in this dtype: {error}")
    assert_same_models(by_transformers(tmp_path, dtype, "resident"), by_layers(tmp_path, dtype, "resident"))


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {"shard": "20KB"}, {"dtype": torch.float16}])
def test_so_has_a_checkpoint_that_is(changes, tmp_path):
    save(tmp_path, **changes)
    assert_same_models(by_transformers(tmp_path, None, "resident"), by_layers(tmp_path, None, "resident"))


@needs_engine
@quick(lambda model_type, placement, dtype: (model_type, placement, dtype) == ("gpt_oss", "cpu-int8", torch.float32))
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize("placement", ["cpu-int8", "cpu-bf16", "mxfp4-weights"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_so_have_experts_that_are_placed(model_type, placement, dtype, tmp_path):
    save(tmp_path, model_type)
    one, other = (load(tmp_path, dtype, placement) for load in (by_transformers, by_layers))
    assert experts_modules(other).keys() == experts_modules(one).keys()
    assert {described(module).placement.name for module in experts_modules(other).values()} == {placement}
    assert torch.equal(logits_of(one), logits_of(other))


def test_an_adapter_goes_on_it(tmp_path):
    model = save(tmp_path / "model")
    lora.attach(model, 2, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.1)
    lora.save(model, tmp_path / "adapter")
    found = []
    for load in (by_transformers, by_layers):
        loaded = load(tmp_path / "model", torch.float32, "resident")
        plain = logits_of(loaded)
        lora.load(loaded, tmp_path / "adapter")
        found.append(logits_of(loaded))
        assert not torch.equal(found[-1], plain)
    assert torch.equal(*found)


def test_quantised_experts_stay_as_they_are(tmp_path):
    model = save(tmp_path, dtype=torch.float32)
    quantise_saved(model, tmp_path, block=16)
    one, other = (load(tmp_path, torch.float32, "auto") for load in (by_transformers, by_layers))
    assert {described(module).placement.name for module in experts_modules(other).values()} == {"fp8-weights"}
    assert torch.equal(logits_of(one), logits_of(other))


def test_a_file_that_was_cut_short_is_named(tmp_path):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        ValueError, match=r"model\.safetensors: expected a complete safetensors file.*[Cc]opy or download"
    ):
        by_layers(tmp_path, None, "resident")


# What a load takes beside the model, however large that is: 19 to 26 MiB (Neoverse-N1, torch 2.13, transformers 5.23).
MARGIN = 36 * 2**20


def measured(small: str, large: str, placements: list[str]) -> list[tuple[int, int]]:
    """In a process of its own, which loads and forgets a model a few times, the largest result last: what each took
    beyond what was there before at its peak, and the model itself."""

    def load(folder: str, placement: str) -> Any:
        return load_placed(folder, DtypeChoice(torch.float32, None, ""), placement, trains=False, device=CPU)[0]

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

    found = []
    for placement in placements:
        load(small, placement)
        gc.collect(), ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        model = load(large, placement)
        peak = status("VmHWM") - before
        placed = [placed_in(module) for module in experts_modules(model).values()]
        bytes_of = sum(each.nbytes() for each in placed if each is not None)
        found.append((peak, bytes_of + sum(p.nbytes for p in model.parameters())))
        del model, placed
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.thorough
def test_memory_holds_the_result_and_one_layer_at_most(tmp_path):
    small, large = tmp_path / "small", tmp_path / "large"
    save(small)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 7}
    save(large, **sizes)
    layer = 32 * 3 * 256 * 256 * 2
    placements = ["resident"] if NO_ENGINE else ["cpu-int8", "resident"]
    with rank_jobs.started(1) as process:
        (found,) = process.run(measured, [(str(small), str(large), placements)])
    for name, (peak, result) in zip(placements, found, strict=True):
        assert peak < result + layer + MARGIN, f"{name}: {peak / 2**20:.0f} MiB for {result / 2**20:.0f} MiB"


def test_transformers_loads_what_is_not_read_expert_by_expert(tmp_path, monkeypatch):
    save(tmp_path)
    expected = by_layers(tmp_path, None, "resident")

    def refuses(*_: Any, **__: Any) -> Any:
        raise ValueError("not in this form")

    monkeypatch.setattr(placed_model, "open_store", refuses)
    assert_same_models(expected, by_layers(tmp_path, None, "resident"))


def test_a_streamed_model_takes_the_faster_dtype_if_the_budget_allows(tmp_path):
    build("qwen3_moe", vocab_size=16384).to(torch.bfloat16).save_pretrained(tmp_path)
    wider = DtypeChoice(torch.float32, torch.bfloat16, "faster")
    streamed, choice = attach_in(wider, str(tmp_path), ram="auto")
    with streamed:
        assert (streamed.model.dtype, choice) == (torch.float32, wider)
        rest = streamed.rest_bytes
    streamed, choice = attach_in(wider, str(tmp_path), ram=rest - 1)
    with streamed:
        assert (streamed.model.dtype, choice.dtype, choice.stored) == (torch.bfloat16, None, None)
    with pytest.raises(ValueError, match="ram: expected at least"):
        attach_in(wider, str(tmp_path), ram=1000)
