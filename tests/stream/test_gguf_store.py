"""GGUF files as stores: every expert and every other tensor is what the file has; packed stores keep that."""

from pathlib import Path
from typing import Any

import pytest
import torch
from stored_models import check_experts, expected_experts

from amoeba.integrations.experts_module import experts_modules
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts
from amoeba.stream.store import GgufStore, PackedStore, aligned_buffer, open_store
from amoeba.stream.store.packing import pack
from gguf_models import ARCHITECTURES, gguf, write_gguf
from tiny_models import build

SIZES: dict[str, Any] = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": 512}


def values(store: Any, layer: int, expert: int) -> list[torch.Tensor]:
    entry, blob = store.layers[layer], aligned_buffer(store.expert_bytes(layer))
    store.read(layer, expert, blob)
    weights = entry.weights(blob[None])
    weights = dequantise_experts(weights) if isinstance(weights, QuantisedExperts) else weights
    return [tensor[0].float() for tensor in weights.tensors() if tensor is not None]


def through_gguf(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    number = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().contiguous().numpy(), number), number))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_all_numbers_of_a_file_in_bf16_are_those_of_the_model(model_type, tmp_path):
    model = build(model_type, **SIZES).to(torch.bfloat16)
    with open_store(write_gguf(tmp_path / "model.gguf", model)) as store:
        assert isinstance(store, GgufStore)
        check_experts(store, model)
        inside = tuple(experts_modules(model))
        expected = {name: each for name, each in model.state_dict().items() if not name.startswith(inside)}
        if model.config.tie_word_embeddings:
            del expected["lm_head.weight"]
        rest = dict(store.rest_tensors())
        assert rest.keys() == expected.keys()
        assert all(torch.equal(rest[name].to(each.dtype), each) for name, each in expected.items())
        assert store.rest_bytes == sum(each.nbytes for each in rest.values())


@pytest.mark.parametrize(
    ("model_type", "width"), [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")]
)
def test_experts_in_mxfp4_keep_their_bits(model_type, width, tmp_path):
    model = build(model_type, **SIZES | {"hidden_size": 64, width: 32})
    kinds = {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4", "rest": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", model.to(torch.bfloat16), kinds)
    with open_store(path) as store:
        for layer, (gate_up, down, *biases) in enumerate(expected_experts(model).values()):
            assert store.layers[layer].format.name == "mxfp4"
            found = values(store, layer, 3)
            assert torch.equal(found[0], through_gguf(gate_up[3], "MXFP4"))
            assert torch.equal(found[1], through_gguf(down[3], "MXFP4"))
            expected = [bias[3].float() for bias in biases if bias is not None]
            assert all(map(torch.equal, found[2:], expected))
            assert len(found) == 2 + len(expected)
        name = "model.layers.1.self_attn.o_proj.weight"
        assert torch.equal(store.read_rest(name), through_gguf(model.state_dict()[name], "Q8_0").bfloat16())


def test_experts_in_fp16_and_fp32_set_the_dtype_of_the_model(tmp_path):
    model = build("qwen3_moe", **SIZES)
    for kinds, dtype in (("F16", torch.float16), ("F32", torch.float32)):
        with open_store(
            write_gguf(tmp_path / f"{kinds}.gguf", model, {"gate": kinds, "up": kinds, "down": kinds})
        ) as store:
            assert {entry.dtype for entry in store.layers} == {dtype}
            _, down, *_ = next(iter(expected_experts(model).values()))
            assert torch.equal(values(store, 0, 1)[1], down[1].to(dtype).float())
    mixed = write_gguf(tmp_path / "mixed.gguf", model, {"gate": "F16", "up": "F16", "down": "BF16"})
    with open_store(mixed) as store:  # neither holds the other's numbers
        assert store.layers[0].dtype == torch.float32


def test_a_split_file_is_read_like_a_whole_one(tmp_path):
    model = build("qwen3_moe", **SIZES).to(torch.bfloat16)
    whole, parts = (write_gguf(tmp_path / f"{count}.gguf", model, parts=count) for count in (1, 3))
    assert len({path.name for path in tmp_path.glob("*.gguf")}) == 4
    with open_store(whole) as one, open_store(parts) as other:
        assert all(map(torch.equal, values(one, 1, 5), values(other, 1, 5)))


def test_a_packed_store_of_a_file_has_its_experts_its_rest_and_its_tokenizer(tmp_path):
    model = build("gpt_oss", **SIZES | {"hidden_size": 64, "intermediate_size": 64}).to(torch.bfloat16)
    kinds = {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4", "rest": "Q8_0"}
    path, out = write_gguf(tmp_path / "model.gguf", model, kinds), tmp_path / "model.store"
    report = pack(path, out)
    assert report.numbers == "mxfp4"
    assert pack(path, out).resumed_layers == 2
    assert {"config.json", "tokenizer.json"} <= {each.name for each in out.iterdir()}
    with open_store(path) as source, PackedStore(out, verify="always") as store:
        assert store.layers == source.layers
        assert all(map(torch.equal, values(source, 1, 2), values(store, 1, 2)))
        rest, expected = dict(store.rest_tensors()), dict(source.rest_tensors())
        assert rest.keys() == expected.keys()
        assert all(torch.equal(rest[name], expected[name]) for name in expected)


def test_tensors_of_other_shapes_or_missing_ones_are_named(tmp_path: Path):
    model = build("qwen3_moe", **SIZES).to(torch.bfloat16)
    path = write_gguf(tmp_path / "model.gguf", model, expert_feed_forward_length=40)
    with pytest.raises(ValueError, match=r"ffn_gate_exps.weight of shape \(6, 40, 32\); got \(6, 24, 32\)"):
        open_store(path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ValueError, match="gguf: expected"):
        open_store(path)


def test_blocks_keep_their_bytes_and_down_may_be_of_another_kind(tmp_path):
    model = build("qwen3_moe", **SIZES, hidden_size=256, moe_intermediate_size=256).to(torch.bfloat16)
    kinds = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K", "rest": "Q8_0"}
    path, out = write_gguf(tmp_path / "model.gguf", model, kinds), tmp_path / "model.store"
    pack(path, out)
    with open_store(path) as store, PackedStore(out, verify="always") as packed:
        assert packed.layers == store.layers
        assert store.layers[0].numbers == "q4_k+q6_k"
        assert store.layers[0].expert_bytes < 1.01 * (2 * 256 * 144 + 256 * 210) + 4096
        raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        stored = (raw[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
        gate, up, down = (torch.from_numpy(gguf.dequantize(each.data, each.tensor_type)) for each in stored)
        for each in (store, packed):
            found = values(each, 1, 4)
            assert torch.equal(found[0], torch.cat((gate[4], up[4])))
            assert torch.equal(found[1], down[4])


def test_kinds_that_cannot_be_together_become_numbers(tmp_path):
    model = build("qwen3_moe", **SIZES, hidden_size=256, moe_intermediate_size=256).to(torch.bfloat16)
    for kinds in ({"gate": "Q4_K", "up": "Q6_K"}, {"gate": "Q8_0", "up": "Q8_0", "down": "BF16"}):
        with open_store(write_gguf(tmp_path / "model.gguf", model, kinds)) as store:
            assert store.layers[0].numbers == "bfloat16"
            down = next(iter(expected_experts(model).values()))[1]
            assert torch.equal(values(store, 0, 2)[1], down[2].float())
