"""Models that cannot be packed into a store are refused with what is wrong about their folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stored_models import save

from amoeba.stream.store import StoreError, aligned_buffer, mapping, open_store
from hostile_folders import bring_code, change_json, cut_short
from tiny_models import EXPERTS


def drop(path: Path, ending: str) -> None:
    file = path / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if not name.endswith(ending)}, file, {"format": "pt"})


def change(path: Path, ending: str, make: Any) -> None:
    file = path / "model.safetensors"
    tensors = {name: make(t) if name.endswith(ending) else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


DAMAGED: dict[str, tuple[Any, str]] = {
    "cut short": (lambda path: cut_short(path / "model.safetensors"), r"model.safetensors: expected \d+ bytes"),
    "garbage": (lambda path: (path / "model.safetensors").write_bytes(b"\1" * 99), "safetensors file; got a damaged"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "expected a folder with model.safetensors"),
    "an expert missing": (lambda path: drop(path, "experts.4.down_proj.weight"), "tensors for 6 experts; got 5"),
    "a layer missing": (lambda path: drop(path, "down_proj.weight"), "weights for model.layers.0.mlp.experts.down"),
    "gates missing": (lambda path: drop(path, "gate_proj.weight"), "tensors for 1 of 2 patterns"),
    "another size": (lambda path: change_json(path / "config.json", moe_intermediate_size=20), r"shape \(20, 32"),
    "two dtypes": (lambda path: change(path, "up_proj.weight", torch.Tensor.float), "one dtype for a layer's experts"),
    "fp8": (lambda path: change(path, "_proj.weight", lambda t: t.to(torch.float8_e4m3fn)), "numbers alone .float8"),
    "quantized": (
        lambda path: change_json(path / "config.json", quantization_config={"quant_method": "fp8"}),
        "got qwen3_moe quantised by fp8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_folder_that_cannot_be_read_whole_is_refused(how, tmp_path):
    spoil, said = DAMAGED[how]
    save(tmp_path)
    spoil(tmp_path)
    with pytest.raises((StoreError, ValueError), match=said):
        open_store(tmp_path)


def test_a_shard_that_is_missing_or_cut_is_named(tmp_path):
    save(tmp_path, shard="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    cut_short(shard)
    with pytest.raises(StoreError, match=shard.name):
        open_store(tmp_path)
    shard.unlink()
    with pytest.raises(StoreError, match=shard.name):
        open_store(tmp_path)


def test_a_model_without_experts_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got llama, which has no experts"):
        open_store(tmp_path)


def test_a_conversion_that_is_not_known_is_refused_with_the_familys_name(tmp_path, monkeypatch):
    save(tmp_path)
    from transformers import core_model_loading

    class Scramble(core_model_loading.Concatenate):
        pass

    true = mapping._undo
    monkeypatch.setattr(mapping, "_undo", lambda operation, *rest: true(Scramble(operation.dim), *rest))
    with pytest.raises(
        ValueError, match=r"a checkpoint of qwen3_moe .* got model.layers.0.mlp.experts.gate_up_proj by"
    ):
        open_store(tmp_path)


def keeps_values(ops: Any, name: str) -> Any:
    """An operation of another version of transformers."""

    def convert(self: Any, found: Any, *_: Any, **__: Any) -> Any:
        return {pattern: tensors[0] for pattern, tensors in found.items()}

    return type(name, (ops.ConversionOps,), {"convert": convert})()


CHAINS: dict[str, Any] = {
    "interleaved, transposed": lambda ops: [ops.Interleave(dim=1), ops.Transpose(1, 2)],
    "transposed, interleaved": lambda ops: [ops.Transpose(1, 2), ops.Interleave(dim=1)],
    "interleaved back": lambda ops: [ops.Transpose(-2, -1), ops.Interleave(dim=1, inverse=True)],
    "transposed twice": lambda ops: [ops.Transpose(1, 2), ops.Transpose(2, 1)],
    "aligned": lambda ops: [ops.Transpose(1, 2), keeps_values(ops, "Force16BytesAlignment")],
    "where it has to be": lambda ops: [ops.Transpose(1, 2, check_dims=True)],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_conversions_are_undone_one_after_another(chain, tmp_path, monkeypatch):
    """Of stacked experts, against what transformers makes of them."""
    from transformers import conversion_mapping, core_model_loading

    if "interleaved" in chain and not hasattr(core_model_loading, "Interleave"):
        pytest.skip(f"transformers {transformers.__version__} interleaves nothing")
    model, name = save(tmp_path, stacked=True), "mlp.experts.gate_up_proj"
    operations = CHAINS[chain](core_model_loading)
    wide = chain in ("transposed twice",) or chain.startswith("where")
    change(tmp_path, name, lambda tensor: tensor if wide else tensor.mT.contiguous())
    expected = {}
    for key, tensor in load_file(tmp_path / "model.safetensors").items():
        if key.endswith(name):
            for operation in operations:
                made = operation.convert({name: [tensor]}, [name], [name], model=model, full_layer_name=key)
                tensor = made[name]
            expected[key.removesuffix(".gate_up_proj")] = tensor
    assert {tuple(tensor.shape) for tensor in expected.values()} == {(EXPERTS, 48, 32)}
    converter = core_model_loading.WeightConverter(name, name, operations)
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [converter])
    with open_store(tmp_path) as store:
        for layer, entry in enumerate(store.layers):
            blob = aligned_buffer(store.expert_bytes(layer))
            for expert in range(EXPERTS):
                store.read(layer, expert, blob)
                assert torch.equal(store.views(layer, blob).gate_up_JH, expected[entry.name][expert])


def test_code_of_a_folder_runs_only_where_it_is_trusted(tmp_path):
    save(tmp_path / "model")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    bring_code(tmp_path / "model", "config.json", auto_map, tmp_path / "mark", model_type="evil")
    with pytest.raises(ValueError, match="trust"):
        open_store(tmp_path / "model")
    assert not (tmp_path / "mark").exists()
