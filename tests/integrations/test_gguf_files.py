"""Headers of GGUF files: what they say of a model, and files that are refused by name with nothing computed."""

import contextlib
import random
import struct
import sys
from pathlib import Path

import pytest
import torch

from amoeba.core.errors import BadValue
from amoeba.integrations.gguf_families import config_of
from amoeba.integrations.gguf_files import read_header, tokenizer_of
from amoeba.integrations.model_folder import check_model, load_config
from gguf_models import ARCHITECTURES, CHAT, UNLIKE, gguf, write_gguf
from tiny_models import build, byte_tokenizer

SIZES = {
    "vocab_size": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
    "bos_token_id": None,
    "max_position_embeddings": 512,
}
# What a file does not say, and this model does not use.
UNSAID = {
    "intermediate_size",
    "architectures",
    "dtype",
    "initializer_range",
    "rope_parameters",
    "layer_types",
    "mlp_layer_types",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("qwen3_moe", norm_topk_prob=True, **SIZES).to(torch.bfloat16)
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", model)


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(BadValue) as caught:
        read_header(path)
    return str(caught.value)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_the_configuration_is_that_of_the_model(model_type, tmp_path):
    changes = UNLIKE.get(model_type, {})
    model = build(model_type, **SIZES, **changes).to(torch.bfloat16)
    header = read_header(write_gguf(tmp_path / "model.gguf", model))
    found = config_of(header)
    assert type(found) is type(model.config)
    expected = {key: value for key, value in model.config.to_dict().items() if key not in UNSAID}
    assert {key: found.to_dict().get(key) for key in expected} == expected
    for name, value in model.config.rope_parameters.items():
        assert found.rope_parameters[name] == pytest.approx(value), name
    assert found.dtype == torch.bfloat16
    assert tokenizer_of(header)("Über")["input_ids"] == byte_tokenizer()("Über")["input_ids"]


def test_the_tokenizer_and_its_chat_template_are_in_the_file(file):
    found, expected = tokenizer_of(read_header(file)), byte_tokenizer()
    text = "Über 12 bytes\n<end>"
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.decode(found(text)["input_ids"]) == text
    assert (found.eos_token_id, found.pad_token_id, found.chat_template) == (256, 256, CHAT)


def test_a_tokenizer_next_to_the_file_is_taken(file, tmp_path):
    copy = tmp_path / "model.gguf"
    copy.write_bytes(file.read_bytes())
    byte_tokenizer().save_pretrained(tmp_path)
    assert tokenizer_of(read_header(copy)).chat_template is None


def test_another_way_of_splitting_text_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", build("qwen3_moe", **SIZES), **{"tokenizer.ggml.pre": "odd"})
    with pytest.raises(BadValue, match=r"splits text as odd\. Put the model's tokenizer\.json"):
        tokenizer_of(read_header(path))


def test_without_a_transformers_that_reads_tokenizers_one_lies_next_to_the_file(file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.gguf.gguf_tokenizer_mapping", None)
    with pytest.raises(
        BadValue, match=r"expected transformers 5\.18 or newer.*tokenizer_config\.json next to the file"
    ):
        tokenizer_of(read_header(file))
    (tmp_path / "model.gguf").symlink_to(file)
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(tokenizer_of(read_header(tmp_path / "model.gguf"))) == len(byte_tokenizer())


def test_parts_of_a_split_file_belong_together(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", build("qwen3_moe", **SIZES), parts=2)
    second = path.with_name("model-00002-of-00002.gguf")
    assert read_header(path).tensors == read_header(second).tensors
    first, other = path.read_bytes(), second.read_bytes()
    path.write_bytes(other)
    with pytest.raises(BadValue, match=r"part 2 of 2|tensors, as it says"):
        read_header(path)
    path.write_bytes(first)
    second.unlink()
    with pytest.raises(BadValue, match=r"all parts of a GGUF file; got no file .*00002-of-00002"):
        check_model(str(path))


def test_files_of_other_kinds_and_versions_are_named(file, tmp_path):
    data, path = file.read_bytes(), tmp_path / "other.gguf"
    assert "expected a GGUF file; got a file of another kind" in refusal(path, b"PK" + data[2:])
    assert "expected GGUF version 2 or 3; got version 4" in refusal(path, data[:4] + struct.pack("<I", 4) + data[8:])
    assert "got a big-endian file" in refusal(path, data[:4] + struct.pack(">I", 3) + data[8:])
    assert "other.gguf" in refusal(path, b"")


def test_architectures_and_types_that_are_not_served_are_named(file, tmp_path):
    data, path = file.read_bytes(), tmp_path / "other.gguf"
    path.write_bytes(data.replace(b"qwen3moe", b"qwen9moe"))
    with pytest.raises(BadValue, match=r"a GGUF file of one of .*gpt-oss.*; got qwen9moe in"):
        check_model(str(path))
    llama4 = write_gguf(tmp_path / "4.gguf", build("mixtral", **SIZES), **{"general.architecture": "llama4"})
    with pytest.raises(BadValue, match=r"got llama4 in .*whose experts take rows times their routing weights"):
        check_model(str(llama4))
    dense = write_gguf(tmp_path / "dense.gguf", build("mixtral", **SIZES, **UNLIKE["mixtral"]), expert_count=None)
    with pytest.raises(BadValue, match=r"a model with experts; got a dense one \(llama\)"):
        load_config(str(dense))
    at = data.index(b"blk.0.ffn_down_exps.weight") + len("blk.0.ffn_down_exps.weight") + 4 + 3 * 8
    assert data[at : at + 4] == struct.pack("<I", gguf.GGMLQuantizationType.BF16)
    said = refusal(path, data[:at] + struct.pack("<I", gguf.GGMLQuantizationType.IQ2_XS) + data[at + 4 :])
    assert "got blk.0.ffn_down_exps.weight in IQ2_XS. Take another file of the same model" in said


def test_a_missing_value_is_named(file, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(file.read_bytes().replace(b"qwen3moe.expert_count", b"qwen3moe.expert_cOunt"))
    with pytest.raises(BadValue, match=r"a number qwen3moe\.expert_count; got None"):
        load_config(str(path))


def test_a_file_that_was_cut_short_is_refused_wherever_it_ends(file, tmp_path):
    data, path = file.read_bytes(), tmp_path / "model.gguf"
    for size in [*range(4, 400, 7), *range(400, len(data), 5003), len(data) - 1]:
        assert "a complete GGUF file; got a damaged one" in refusal(path, data[:size]), size


def test_damaged_headers_never_do_more_than_be_refused(file, tmp_path):
    """With lengths and counts of any size, nothing is allocated that is not in the file."""
    data, path = file.read_bytes(), tmp_path / "model.gguf"
    header = data.index(b"output_norm.weight") + 100
    generator = random.Random(0)
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(generator.choice((1, 1, 8))):
            place = generator.randrange(4, header)
            width = generator.choice((1, 8))
            damaged[place : place + width] = generator.choice((b"\xff", b"\0", b"\x7f", b"\x01")) * width
        path.write_bytes(damaged)
        with contextlib.suppress(BadValue):  # any other error fails the test
            read_header(path)
            load_config(str(path))
