"""A model whose experts are larger than its budget on a GPU: the tokens of the same model resident.

On a machine without a GPU a simulated device stands for it (see simulated_device.py) and Triton's interpreter computes
the experts; the rest of the model is then on the CPU.
"""

from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_device import LiveDevice, LiveGraph, SimulatedDevice
from stored_models import SIZES, TOP_K, outcome_of, save
from torch import Tensor
from transformers import AutoModelForCausalLM

import amoeba
from amoeba.decoding import decoder
from amoeba.decoding.decoder import why_not
from amoeba.decoding.step import Step
from amoeba.jobs.generate import token_steps
from amoeba.kernels import expert_request
from amoeba.stream import attaching
from amoeba.stream.cache.trace import read_trace
from amoeba.stream.gpu.fast_path import serving_library
from amoeba.stream.gpu.tiers import LayerTiers
from amoeba.stream.store import open_store
from amoeba.stream.store.packing import pack
from called import call
from selection import quick
from tiny_models import EXPERTS, LAYERS

ON_GPU = torch.cuda.is_available()
NEW_TOKENS = 4
DTYPES = [torch.float32, *([torch.bfloat16] if ON_GPU else [])]

# With a GPU all of this runs on it: `pytest -m gpu` has it too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(attaching, "gpu", lambda: SimulatedDevice(inline=True))


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> dict[torch.dtype, tuple[Path, Path]]:
    found = {}
    for dtype in DTYPES:
        folder = tmp_path_factory.mktemp("models")
        save(folder / "model", "qwen3_moe", dtype=dtype, norm_topk_prob=True, **SIZES)
        found[dtype] = folder / "model", Path(pack(folder / "model", folder / "store").store)
    return found


def vram(path: Path, slots: int) -> int:
    """So much that every layer gets this many slots."""
    with open_store(path) as store:
        rest = sum(entry.size for entry in store.rest.values())
        return rest + slots * sum(LayerTiers.slot_bytes(entry) for entry in store.layers)


def resident(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="amoeba").eval()
    return model.to("cuda" if ON_GPU else "cpu")


def outcome(model: Any, lengths: tuple[tuple[int, int], ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 250, size, generator=generator, dtype=torch.int64) for size in lengths]
    return outcome_of(model, [ids.to(model.device) for ids in prompts], 16 if ON_GPU else NEW_TOKENS)


# the interpreter takes its time
LENGTHS = ((1, 1), (1, 7), (1, 300), (8, 1), (8, 7), (8, 40)) if ON_GPU else ((1, 7), (2, 33))


@quick(lambda slots: ON_GPU)  # below: what is generated, and captured steps
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, TOP_K, EXPERTS])
def test_tokens_and_logits_are_those_of_the_resident_model(slots: int, dtype: torch.dtype, stores) -> None:
    if slots < TOP_K and dtype != torch.float32:
        pytest.skip("another order of summation, which in bf16 may choose another token")
    folder, packed = stores[dtype]
    expected = outcome(resident(folder), LENGTHS)
    with amoeba.stream.attach(packed, vram=vram(packed, slots), ram="1MiB") as streamed:
        assert streamed.memory.slots == (slots,) * LAYERS
        found, report = outcome(streamed.model, LENGTHS), streamed.report()
    for ours, theirs in zip(found, expected, strict=True):
        if theirs.dtype == torch.int64 or (ON_GPU and slots >= TOP_K):
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    if slots == EXPERTS:
        assert report.requested - report.hits == LAYERS * EXPERTS
    assert report.host_hits > 0 or slots == EXPERTS


def test_generate_says_what_it_chose_and_gives_the_resident_tokens(stores, tmp_path) -> None:
    folder, packed = stores[torch.float32]

    def generated(path: Path, *more: str) -> dict[str, Any]:
        asked = ["generate", str(path), "abc", "--max-new-tokens", "4", "--temperature", "0", "--json", *more]
        done = call(*asked)
        return done.document

    expected = generated(folder)
    trace = tmp_path / "routing.trace"
    found = generated(packed, "--vram", str(vram(packed, 3)), "--ram", "1MiB", "--record", str(trace))
    assert found["generated_ids"] == expected["generated_ids"]
    assert found["placement"] == "streamed-gpu"
    streaming = found["streaming"]
    assert streaming["slots"] == [3] * LAYERS and streaming["vram_bytes"] == vram(packed, 3)
    recorded = read_trace(trace)
    assert recorded.tokens == streaming["tokens"] and [layer.top_k for layer in recorded.layers] == [TOP_K] * LAYERS
    assert sum(streaming["host_slots"]) > 0 and streaming["host_bytes_per_token"] > 0
    assert [part["name"] for part in streaming["parts"]] == ["prefill", "decode"]
    assert all(0 < part["link_seconds"] <= part["floor_seconds"] <= part["seconds"] for part in streaming["parts"])
    assert streaming["link"]["source"] in ("measured now", "measured before", "seen in this run")


class RepeatedSteps:
    """Stands for CUDA's graphs where there is no GPU: a captured step is called again at each replay, by the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.replays = LiveDevice(inline=True), 0
        monkeypatch.setattr(attaching, "gpu", self.gpu)
        monkeypatch.setattr(token_steps, "why_plain", why_not)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
        monkeypatch.setattr(torch.cuda, "current_stream", torch.cuda.Stream)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: LiveGraph(self.device))
        prepare, call = Step.prepare, Step.__call__

        def prepared(step: Step, capture: bool) -> None:
            prepare(step, capture=True)
            step._graph.replay = lambda: self.device.enqueue_call(lambda: self.run(step))

        def called(step: Step) -> None:
            call(step)
            self.device.record(self.device.compute).wait()

        monkeypatch.setattr(Step, "prepare", prepared)
        monkeypatch.setattr(Step, "__call__", called)

    def gpu(self) -> LiveDevice:
        if self.device.closed:
            self.device = LiveDevice(inline=True)
        return self.device

    def run(self, step: Step) -> None:
        self.replays += 1
        with step._replays.capturing(), ExitStack() as stack:
            step._enter(stack, compiled=False, fused=True)
            step._run()


def count_launches(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """From now on: of requests alone, and of routers that request."""
    found, launch = SimpleNamespace(requests=0, both=0), expert_request.request_experts

    def launched(*given: Any, router: Any = None, **options: Any) -> None:
        found.requests, found.both = found.requests + (router is None), found.both + (router is not None)
        launch(*given, router=router, **options)

    monkeypatch.setattr(expert_request, "request_experts", launched)
    return found


@quick(lambda miss: ON_GPU or miss == "move")  # on the CPU: test_computed_misses.py
@pytest.mark.parametrize("miss", ["move", "cpu"])
def test_captured_steps_give_the_resident_tokens(miss: str, stores, monkeypatch) -> None:
    folder, packed = stores[torch.float32]
    repeated = None if ON_GPU else RepeatedSteps(monkeypatch)

    def generated(model: Any, kind: str) -> list[list[int]]:
        model.generation_config.update(eos_token_id=None, do_sample=False)
        steps = token_steps.choose_steps(model, {"do_sample": False}, batch=1, prompt_tokens=3, new_tokens=NEW_TOKENS)
        assert steps.kind == kind, steps.reason
        if steps.decoder is not None:
            return list(steps.decoder.generate([[5, 6, 7]], NEW_TOKENS))
        ids = torch.tensor([[5, 6, 7]], device=model.device)
        found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS)
        return found[0, 3:, None].tolist()

    with monkeypatch.context() as plain:
        plain.setattr(token_steps, "why_plain", lambda model: "plain")
        plain.setattr(decoder, "native_steps", lambda *_: "plain")
        expected = generated(resident(folder), "plain")
    has_all = miss != "move"  # in host memory
    given = {"vram": vram(packed, TOP_K), "ram": "auto" if has_all else "1MiB"}
    with amoeba.stream.attach(packed, **given, miss=miss) as streamed:
        launches = count_launches(monkeypatch)
        assert generated(streamed.model, "captured") == expected
        assert launches.requests == LAYERS and launches.both >= 2 * LAYERS  # the rehearsal launches both
        report = streamed.report()
        assert report.requested > report.hits and report.miss == miss
        if miss == "cpu" and serving_library() is not None:
            assert report.computed > 0 and "computed by the CPU" in str(report)
            assert "not their bits" in str(streamed.memory)
    assert repeated is None or repeated.replays == NEW_TOKENS - 1
    if has_all:
        return
    with amoeba.stream.attach(packed, vram=vram(packed, TOP_K - 1), ram="1MiB") as streamed:
        assert generated(streamed.model, "plain") == expected


@pytest.mark.parametrize(("given", "said"), [({"miss": "guess"}, "one of move, cpu, auto"), ({"miss": "cpu"}, "vram")])
def test_ways_to_serve_misses_that_are_not_there_are_refused(given: dict, said: str, stores) -> None:
    _, packed = stores[torch.float32]
    with pytest.raises(ValueError, match=f"miss: expected .*{said}"):
        amoeba.stream.attach(packed, ram="1MiB", **given)
    found = call("generate", packed, "a", "--ram", "1MiB", "--miss", given["miss"], code=2)
    assert "miss" in found.output


def test_budgets_that_are_too_small_are_refused_with_what_is_enough(stores, monkeypatch) -> None:
    _, packed = stores[torch.float32]
    with pytest.raises(ValueError, match=r"vram: expected at least .* for one expert per layer"):
        amoeba.stream.attach(packed, vram=vram(packed, 1) - 1, ram="1MiB")
    with pytest.raises(ValueError, match=r"ram: expected at least .* through which experts are read"):
        amoeba.stream.attach(packed, vram=vram(packed, 1), ram=4096)
    for name, asked_before in (("vram", 1), ("ram", 3)):
        found = iter([1 << 40] * asked_before + [1])
        monkeypatch.setattr(attaching, "available_memory", lambda device, found=found: next(found))
        with pytest.raises(ValueError, match=f"^{name}: expected no more than the 1 B that are free"):
            amoeba.stream.attach(packed, vram=vram(packed, 1), ram="1MiB")


def test_a_gpu_that_is_full_gives_back_what_was_pinned(stores, monkeypatch) -> None:
    _, packed = stores[torch.float32]
    device = SimulatedDevice(inline=True)
    monkeypatch.setattr(attaching, "gpu", lambda: device)
    monkeypatch.setattr(LayerTiers, "weights", property(lambda self: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        amoeba.stream.attach(packed, vram=vram(packed, 1), ram="1MiB")
    assert device.closed


def test_experts_that_are_all_on_the_gpu_take_no_pinned_memory(stores) -> None:
    _, packed = stores[torch.float32]
    with amoeba.stream.attach(packed, vram=vram(packed, EXPERTS)) as streamed:
        assert streamed.memory.slots == (EXPERTS,) * LAYERS and streamed.memory.pool.host_bytes == 0
    with amoeba.stream.attach(packed, vram=vram(packed, EXPERTS - 1)) as streamed:
        assert streamed.memory.host_slots == (EXPERTS,) * LAYERS
