"""Codes and scales in slots on a device give the numbers of the same quantised experts resident.

On a machine without a GPU a simulated device stands for it, whose copies come late, and Triton's interpreter computes.
"""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from simulated_device import SimulatedDevice
from test_captured_experts import Captured, routed_as
from test_gpu_streamed_experts import (
    DEVICE,
    DTYPES,
    E,
    assert_as_resident,
    by_triton,
    device,
    factors,
    gradients,
    routed,
    routed_wide,
    weights_of,
    wide,
)

import amoeba
from amoeba import ExpertWeights, experts
from amoeba.backends import quantised_triton, sorted_rows
from amoeba.core.problem import Problem
from amoeba.core.weights import LORA_NAMES
from amoeba.kernels.decode import Like, quantised_configuration
from amoeba.precision.formats import FP8_128, MXFP4, MXFP8, NVFP4, OF_BLOCKS, Format, fp8_blocks
from amoeba.precision.quantised import quantise
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts, quantise_experts
from amoeba.stream import attaching
from amoeba.stream.gpu.memory import DeviceMemory
from amoeba.stream.placement import MOST_IDS, MemoryStore
from selection import quick

FP8 = fp8_blocks(16, 16)  # of which these small experts have several
Q8_0, Q4_K, Q6_K = (OF_BLOCKS[name] for name in ("q8_0", "q4_k", "q6_k"))
FORMATS = {each.name: each for each in (FP8, MXFP8, MXFP4, NVFP4, Q8_0, Q4_K)}

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


def quantised(format: Format, dtype: torch.dtype = torch.float32, bias: bool = True) -> QuantisedExperts:
    return as_in_files(quantise_experts(weights_of(dtype, bias), format))


def as_in_files(experts: QuantisedExperts) -> QuantisedExperts:
    """With another type for down next to Q4_K, as files in Q4_K_M have it."""
    if experts.format is not Q4_K:
        return experts
    down = quantise(dequantise_experts(experts).down_EHI, Q6_K)
    biases = experts.stored_gate_up_bias, experts.stored_down_bias
    return experts.holding(experts.gate_up_EJH.matrix, down, *biases, experts.activation, experts.dtype)


def memory_of(resident: QuantisedExperts, slots: int, host_slots: int = 0) -> DeviceMemory:
    """With slots that hold NaN."""
    found = DeviceMemory(MemoryStore(resident), device(), [slots], [host_slots], MOST_IDS)
    for tensor in found.layers[0].slots.tensors():
        if tensor is not None:
            tensor[..., None].view(torch.uint8).fill_(255)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()  # before copies, which are in another stream
    return found


@quick(lambda name, slots: DEVICE.type == "cuda" or (name, slots) in ((FP8.name, 3), ("mxfp4", 1), ("nvfp4", 3)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 3, E])
@pytest.mark.parametrize("name", FORMATS)
def test_outputs_are_those_of_resident_codes(name: str, slots: int, dtype: torch.dtype) -> None:
    resident = quantised(FORMATS[name], dtype)
    with closing(memory_of(resident, slots, 0 if slots == 1 else 2)) as memory, torch.no_grad():
        for tokens in (
            (0, 1, 3, 7, 1, 66) if DEVICE.type == "cuda" else (0, 1, 66) if slots == 3 and name == FP8.name else (1, 7)
        ):
            x_TH, routing = routed(tokens, dtype, sentinels=tokens in (7, 66))
            expected = by_triton(x_TH, routing, resident)
            for again in range(2 if tokens < 66 else 1):
                y_TH = experts(x_TH, routing, memory.layers[0])
                assert_as_resident(y_TH, expected, slots, again)


@quick(lambda name, slots: DEVICE.type == "cuda" or (name, slots) == ("nvfp4", 3))
@pytest.mark.parametrize("slots", [1, 3, E])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_decoded_by_expert_give_the_bits_of_resident_codes(name, slots, monkeypatch):
    monkeypatch.setattr(quantised_triton, "DECODE_TOKENS", 3)
    monkeypatch.setattr(sorted_rows, "forward", None)  # nothing is sorted
    tiles, asked = quantised_configuration.by_expert, []
    monkeypatch.setattr(
        quantised_configuration, "by_expert", lambda problem, like: asked.append(like) or tiles(problem, like)
    )
    dtype = torch.float16  # which the interpreter multiplies, too
    resident, lora = quantised(FORMATS[name], dtype), factors(dtype)
    with closing(memory_of(resident, slots)) as memory, torch.no_grad():
        x_TH, routing = routed(9, dtype, sentinels=True)
        for each in (None, lora):
            asked.clear()
            y_TH = experts(x_TH, routing, memory.layers[0], lora=each)
            assert set(asked) == {Like(9, E)}, "tiles are those of all experts"
            assert y_TH.count_nonzero() > 0 and torch.equal(y_TH, by_triton(x_TH, routing, resident, lora=each))


@quick(lambda name, slots: DEVICE.type == "cuda" or (name, slots) == (FP8.name, 4))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 4, E])
@pytest.mark.parametrize("name", FORMATS)
def test_lora_gradients_are_those_next_to_resident_codes(name: str, slots: int, dtype: torch.dtype) -> None:
    resident = quantised(FORMATS[name], dtype)
    with closing(memory_of(resident, slots, 3)) as memory:
        for tokens, recompute in ((5, True),) if slots < E else ((9, False),):  # the interpreter takes its time
            x_TH, routing = routed(tokens, dtype, sentinels=tokens == 5)
            dy_TH = torch.randn(x_TH.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
            expected = gradients(resident, x_TH, routing, dy_TH, slots == 4, backend="triton", recompute=recompute)
            found = gradients(memory.layers[0], x_TH, routing, dy_TH, slots == 4, recompute=recompute)
            assert found.keys() == expected.keys() >= {"x", "weight", *LORA_NAMES}
            for each, tensor in expected.items():
                assert torch.equal(found[each], tensor), (each, tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_in_slots_have_the_tiles_of_all_experts(name: str) -> None:
    """Else the last bits could be others."""
    all_of_them = quantise_experts(ExpertWeights(torch.zeros(128, 8, 16), torch.zeros(128, 16, 4)), FORMATS[name])
    tensors = [None if tensor is None else tensor[:8] for tensor in all_of_them.tensors()]
    slots, differ = all_of_them.of(tensors, all_of_them.constants()), 0
    for tokens in (1, 2, 4, 8, 64):
        given = torch.zeros(tokens, 16), torch.zeros(tokens, 8, dtype=torch.int64), torch.zeros(tokens, 8)
        expected, like = quantised_configuration.configuration_of(Problem(*given, all_of_them)), Like(tokens, 128)
        assert quantised_configuration.configuration_of(Problem(*given, slots), like) == expected
        differ += quantised_configuration.configuration_of(Problem(*given, slots)) != expected
    assert differ


@quick(lambda name: DEVICE.type == "cuda" or name in ("mxfp4", "nvfp4"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_captured_passes_give_the_numbers_of_resident_codes(name: str, dtype: torch.dtype) -> None:
    resident = quantised(FORMATS[name], dtype, bias=False)
    with closing(Captured(resident, 4, 2, routed(1, dtype), miss="auto")) as captured, torch.no_grad():
        assert captured.memory.miss == "move"  # the CPU's core reads no codes
        for seed in range(2):
            x_TH, routing = routed_as(seed, dtype)
            for y_TH in captured(x_TH, routing):
                assert torch.equal(y_TH, by_triton(x_TH, routing, resident)), seed


@pytest.mark.parametrize(("name", "tokens"), [(FP8.name, 1), ("mxfp4", 2), ("nvfp4", 1)])
def test_an_adapter_next_to_codes_goes_with_its_experts(name: str, tokens: int) -> None:
    resident, lora = quantised(FORMATS[name]), factors(torch.float32)
    given = routed(tokens, sentinels=tokens == 2)
    with torch.no_grad(), closing(memory_of(resident, 4)) as memory:
        expected = by_triton(*given, resident, lora=lora)
        assert torch.equal(experts(*given, memory.layers[0], lora=lora), expected)
        assert memory.cache.counters.from_disk < E  # only those that were asked for
    with torch.no_grad(), closing(Captured(resident, E, 0, routed(tokens), 1, lora)) as captured:
        (y_TH,) = captured(*given)
        assert torch.equal(y_TH, expected)


def test_a_store_of_codes_streams_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")
    from transformers import AutoModelForCausalLM

    from amoeba.stream.gpu.tiers import LayerTiers
    from amoeba.stream.store import open_store
    from amoeba.stream.store.packing import pack
    from quantised_checkpoints import write_mxfp4
    from tiny_models import LAYERS, token_ids

    write_mxfp4(tmp_path)
    pack(tmp_path, tmp_path / "store")
    amoeba.register()
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attaching, "gpu", lambda: SimulatedDevice(inline=True))
    with open_store(tmp_path / "store") as store:
        vram = store.rest_bytes + 3 * sum(LayerTiers.slot_bytes(entry) for entry in store.layers)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", experts_implementation="amoeba")
    ids = token_ids()[:1, :2].to(DEVICE)
    with torch.no_grad(), amoeba.stream.attach(tmp_path / "store", vram=vram, ram="1MiB") as streamed:
        assert streamed.memory.slots == (3,) * LAYERS and ", as mxfp4, " in str(streamed.memory)
        found = [streamed.model(input_ids=each, use_cache=False).logits for each in (ids, ids[:, :1])]
        expected = [model.to(DEVICE)(input_ids=each, use_cache=False).logits for each in (ids, ids[:, :1])]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # on a CPU others compute the resident ones


def test_a_gguf_file_streams_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are in the slots, Q4_K and Q6_K of one expert; another layer has other types, as in Q4_K_M."""
    gguf_models = pytest.importorskip("gguf_models")
    from amoeba.integrations import gguf_files
    from amoeba.jobs.cpu_dtype import DtypeChoice
    from amoeba.jobs.placed_model import attach_in, load_placed
    from amoeba.stream.gpu.tiers import LayerTiers
    from amoeba.stream.store import open_store
    from tiny_models import LAYERS, build

    sizes = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256, "hidden_size": 256}
    model = build("qwen3_moe", **sizes, moe_intermediate_size=256, max_position_embeddings=512)
    kinds = {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K", "blk.1.ffn_down_exps.weight": "Q4_K"}
    path = gguf_models.write_gguf(tmp_path / "model.gguf", model.to(torch.bfloat16), kinds)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attaching, "gpu", lambda: SimulatedDevice(inline=True))
        monkeypatch.setattr(gguf_files.GgufHeader, "dtype", torch.float32)  # the interpreter does not multiply bf16
    with open_store(path) as store:
        vram = store.rest_bytes + 3 * sum(LayerTiers.slot_bytes(entry) for entry in store.layers)
    choice = DtypeChoice(None, None, "")
    resident, _ = load_placed(str(path), choice, "auto", trains=False, device=torch.device("cpu"))
    ids = torch.randint(0, 256, (1, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    streamed, _ = attach_in(choice, str(path), vram=vram, ram="1MiB")
    with streamed, torch.no_grad():
        assert [memory.slots.down_format for memory in streamed.memory.layers] == [Q6_K, None]
        assert streamed.memory.slots == (3,) * LAYERS and ", as q4_k+q6_k, " in str(streamed.memory)
        found = streamed.model(input_ids=ids, use_cache=False).logits
        expected = resident.to(DEVICE)(input_ids=ids, use_cache=False).logits
    assert (found - expected).norm() < (1e-4 if DEVICE.type == "cpu" else 1e-2) * expected.norm()


# --- on a GPU alone ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("format", [FP8_128, MXFP4, NVFP4, Q8_0, Q4_K], ids=lambda format: format.name)
@pytest.mark.parametrize(("count", "slots"), [(32, 9), (32, 20), (128, 8), (128, 40)])
def test_every_way_to_compute_gives_the_bits_of_resident_codes(count: int, slots: int, format: Format) -> None:
    """With 128 experts two to four tokens go by slot, with 32 by expert."""
    resident = as_in_files(quantise_experts(wide(count), format))
    with torch.no_grad(), closing(memory_of(resident, slots, 6)) as memory:
        for tokens in (1, 2, 4, 5, 8, 64, 65, 300):
            for seed in range(2):
                given = routed_wide(tokens, count, 8, seed)
                assert torch.equal(experts(*given, memory.layers[0]), by_triton(*given, resident)), (tokens, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("format", [FP8_128, MXFP4, NVFP4, Q8_0, Q4_K], ids=lambda format: format.name)
@pytest.mark.parametrize(("tokens", "slots", "host_slots"), [(1, 8, 0), (1, 9, 32), (4, 32, 0)])
def test_many_replays_give_the_bits_of_resident_codes(tokens: int, slots: int, host_slots: int, format: Format) -> None:
    resident = as_in_files(quantise_experts(wide(32), format))
    with torch.no_grad(), closing(Captured(resident, slots, host_slots, routed_wide(tokens, 32, 8, 0), 3)) as captured:
        for seed in range(40):
            given = routed_wide(tokens, 32, 8, seed)
            expected = by_triton(*given, resident)
            for y_TH in captured(*given):
                assert torch.equal(y_TH, expected), seed
