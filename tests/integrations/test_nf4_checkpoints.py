"""NF4 checkpoints of bitsandbytes: codes are read as codes, resident, streamed and packed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from amoeba import lora, stream
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.model_folder import load_model
from amoeba.integrations.nf4_files import read_nf4
from amoeba.jobs.convert.merge import write_plain
from amoeba.plan.model import read_facts
from amoeba.precision.blocks import NF4, dequantise_blocks
from amoeba.stream.store import open_store
from amoeba.stream.store.packing import pack
from selection import quick
from tiny_models import randomise, save_byte_tokenizer, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")
FACTS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
ONE_FILE = "model.safetensors"


def as_bitsandbytes(name: str, weight: Tensor, nested: bool, block: int = 64) -> tuple[dict[str, Tensor], Tensor]:
    """Its tensors, and the numbers that they stand for, by the words of its documentation."""
    table = torch.tensor(NF4)
    blocks = weight.float().reshape(-1, block)
    absmax = blocks.abs().amax(1)
    codes = (blocks[..., None] / absmax[:, None, None] - table).abs().argmin(-1)
    pairs = codes.flatten().to(torch.uint8).view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    found = {name: (pairs[:, :1] << 4 | pairs[:, 1:]), f"{name}.quant_map": table}
    scales = absmax
    if nested:
        offset = float(absmax.mean())
        of_scales = torch.linspace(-1, 1, 256)
        groups = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        largest = groups.abs().amax(1)
        stored = (groups[..., None] / largest[:, None, None] - of_scales).abs().argmin(-1)
        scales = (of_scales[stored] * largest[:, None] + offset).flatten()[: len(absmax)]
        found |= {f"{name}.nested_quant_map": of_scales, f"{name}.nested_absmax": largest}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        absmax = stored.flatten()[: len(absmax)].to(torch.uint8)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    found |= {f"{name}.absmax": absmax, f"{name}.quant_state.bitsandbytes__nf4": text}
    return found, (table[codes] * scales[:, None]).view(weight.shape)


def write(folder: Path, nested: bool = True, stacked: bool = False, **sizes: int) -> Any:
    """The model with its codes as numbers, in fp32. stacked: all experts of a parameter in one tensor."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "vocab_size": 257, "head_dim": 16} | sizes
    config = tiny_config(Qwen3MoeConfig, "qwen3_moe", eos_token_id=256, pad_token_id=256, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = randomise(AutoModelForCausalLM.from_config(config)).eval()
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    tensors = load_file(folder / ONE_FILE)
    if stacked:
        tensors = {name: each for name, each in tensors.items() if ".experts." not in name}
        tensors |= {name: each for name, each in model.state_dict().items() if ".experts." in name}
    found: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        quantised = name.endswith(("proj.weight", "_proj"))
        stored, numbers[name] = as_bitsandbytes(name, tensor, nested) if quantised else ({name: tensor}, tensor)
        found |= stored
    save_file({name: each.contiguous() for name, each in found.items()}, folder / ONE_FILE, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"quantization_config": FACTS}))
    return type(model).from_pretrained(None, config=config, state_dict=numbers).float().eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 9, 27, 80, 4, 9]]), use_cache=False).logits


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@quick(lambda nested, stacked: nested != stacked or nested)
@pytest.mark.parametrize(("nested", "stacked"), [(True, False), (False, False), (True, True)])
def test_codes_are_the_numbers_that_they_stand_for(nested: bool, stacked: bool, tmp_path: Path) -> None:
    twin = write(tmp_path / "model", nested, stacked)
    expected = logits(twin)
    model = load_model(str(tmp_path / "model"), torch.float32)
    placed = [placed_in(module) for module in experts_modules(model).values()]
    assert all(each.format.name == "nf4" for each in placed)
    matrix = placed[1].down_EHI.matrix.dequantise()
    assert torch.equal(matrix, twin.model.layers[1].mlp.experts.down_proj)
    assert same(logits(model), expected)
    pack(tmp_path / "model", tmp_path / "store")
    for source in ("model", "store"):
        with stream.attach(tmp_path / source, ram="1GiB", dtype=torch.float32) as streamed:
            assert same(logits(streamed.model), expected), source
    with open_store(tmp_path / "model") as store:
        assert store.left_out == ()
    with open_store(tmp_path / "store") as store:
        write_plain(store, tmp_path / "numbers", torch.float32)
    plain = load_model(str(tmp_path / "numbers"), None)
    assert torch.equal(plain.model.layers[1].mlp.experts.down_proj, twin.model.layers[1].mlp.experts.down_proj)
    facts = read_facts(str(tmp_path / "model"))
    assert facts.numbers == "nf4" and facts.rest_numbers == sum(
        each.numel() for name, each in twin.named_parameters() if ".experts." not in name
    )


def test_adapters_are_trained_on_the_codes(tmp_path: Path) -> None:
    """Gradients of every factor are those over the same numbers in fp32."""
    twin, grads = write(tmp_path), []
    for model in (load_model(str(tmp_path), torch.float32), twin):
        torch.manual_seed(0)
        lora.attach(model, r=2)
        factors = [each for name, each in model.named_parameters() if each.requires_grad]
        for factor in factors:
            torch.nn.init.normal_(factor, std=0.1)
        ids = torch.tensor([[3, 9, 27, 80, 4, 9]])
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append([each.grad for each in factors])
    assert len(grads[0]) == len(grads[1]) >= 8
    for found, expected in zip(*grads, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()


def spoil(folder: Path, change: Any) -> None:
    tensors = load_file(folder / ONE_FILE)
    change(tensors)
    save_file(tensors, folder / ONE_FILE, {"format": "pt"})


NAME = "model.layers.0.mlp.experts.1.up_proj.weight"


def other_state(**changes: Any) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{NAME}.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[name].tolist())) | changes
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


SPOILT = {
    "no numbers of scales": (lambda t: t.pop(f"{NAME}.nested_absmax"), "a tensor .*nested_absmax; got none"),
    "another table": (lambda t: t[f"{NAME}.quant_map"].mul_(2), "the numbers of NF4 in .*quant_map"),
    "blocks of 32": (other_state(blocksize=32), "NF4 with rows of whole blocks of 64; got .*blocks of 32"),
    "rows that share blocks": (other_state(shape=[128, 96]), r"rows of whole blocks of 64; got shape \(128, 96\)"),
    "no sizes": (other_state(shape=None), "shape and blocksize in .*bitsandbytes__nf4"),
    "codes alone": (lambda t: [t.pop(each) for each in list(t) if each.startswith(f"{NAME}.")], "without scales"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    return folder


@pytest.mark.parametrize("damage", SPOILT)
def test_what_is_damaged_or_of_another_layout_is_named(damage: str, whole: Path, tmp_path: Path) -> None:
    change, message = SPOILT[damage]
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path), torch.float32)
    with pytest.raises(ValueError, match=message):
        open_store(tmp_path)


def test_experts_that_are_numbers_stay_numbers(tmp_path: Path) -> None:
    """As transformers 5 leaves stacked experts: linears alone are in NF4."""
    twin = write(tmp_path)
    numbers = {name: each for name, each in twin.state_dict().items() if ".experts." in name}

    def of_linears_alone(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        tensors |= numbers

    spoil(tmp_path, of_linears_alone)
    model = load_model(str(tmp_path), torch.float32)
    assert all(placed_in(module) is None for module in experts_modules(model).values())
    assert same(logits(model), logits(twin))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_numbers_are_those_of_bitsandbytes(block: int, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes: pip install bitsandbytes")
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(0))
    options = {"blocksize": block, "quant_type": "nf4", "compress_statistics": nested}
    codes, state = functional.quantize_4bit(weight, **options)
    tensors = {"w": codes} | {f"w.{name}": each for name, each in state.as_dict(packed=True).items()}
    found = dequantise_blocks(read_nf4("w", tensors, tensors.__getitem__), "nf4")
    assert torch.equal(found, functional.dequantize_4bit(codes, state))
