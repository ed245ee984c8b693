"""The seam is whole: a placement that is written entirely in this file works everywhere, and no file of src/ names it.

T tokens · K experts per token · E experts · H hidden

Experts are held as two half stacks behind a handle; each half computes the rows of its own experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import amoeba
from amoeba import Activation, ExpertWeights, PassesBackend, Placement, Request, Routing, experts, placements
from amoeba.backends import eager, registry
from amoeba.cli import app
from amoeba.core.placement import Tolerance
from amoeba.core.problem import Gradients, Needs, Problem, Save
from amoeba.core.weights import LORA_NAMES, ExpertsByHandle, LoraFactors
from amoeba.placements import placement_names
from amoeba.proof import conformance
from selection import each_value_once
from small_layer import Layer

SOURCE = Path(amoeba.__file__).parent


# --- the placement ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class HalvedExperts(ExpertsByHandle):
    lower: ExpertWeights
    upper: ExpertWeights

    placement = "halved"

    @property
    def num_experts(self) -> int:
        return self.lower.num_experts + self.upper.num_experts

    @property
    def hidden(self) -> int:
        return self.lower.hidden

    @property
    def intermediate(self) -> int:
        return self.lower.intermediate

    @property
    def dtype(self) -> torch.dtype:
        return self.lower.dtype

    @property
    def device(self) -> torch.device:
        return self.lower.device

    @property
    def activation(self) -> Activation:
        return self.lower.activation

    def takes(self, device: torch.device) -> bool:
        return device == self.device

    def to(self, dtype: torch.dtype) -> HalvedExperts:
        return HalvedExperts(self.lower.to(dtype), self.upper.to(dtype))


def halve(weights: ExpertWeights) -> HalvedExperts:
    middle = weights.num_experts // 2

    def part(rows: slice) -> ExpertWeights:
        tensors = (None if t is None else t.detach()[rows].clone() for t in weights.tensors())
        return ExpertWeights(*tensors, weights.activation)  # type: ignore[arg-type]

    return HalvedExperts(part(slice(middle)), part(slice(middle, None)))


class HalvesBackend(PassesBackend):
    name, summary, kinds = "halves", "one half after the other", (HalvedExperts,)

    def why_not(self, request: Request) -> str | None:
        return None

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, tuple | None]:
        found = [eager.BACKEND.forward(half, save) for half in _halves(problem)]
        y_TH = found[0][0] + found[1][0]
        return y_TH, tuple(saved for _, saved in found) if save == "h" else None

    def backward(self, problem: Problem, saved: tuple | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        pairs = zip(_halves(problem), saved or (None, None), strict=True)
        lower, upper = (eager.BACKEND.backward(half, kept, dy_TH, needs) for half, kept in pairs)
        joined = {name: torch.cat((a, b)) for name in LORA_NAMES if (a := getattr(lower, name)) is not None
                  if (b := getattr(upper, name)) is not None}  # fmt: skip
        return Gradients(
            None if lower.x is None else lower.x + upper.x,
            None if lower.weight is None else lower.weight + upper.weight,
            **joined,
        )


def _halves(problem: Problem) -> list[Problem]:
    """An id of the other half lies outside, and so is a sentinel here."""
    first, found = 0, []
    for weights in (problem.weights.lower, problem.weights.upper):
        last = first + weights.num_experts
        lora = problem.lora
        if lora is not None:
            gate_a, gate_b, up_a, up_b, down_a, down_b = (None if f is None else f[first:last] for f in lora.six())
            lora = LoraFactors(gate_a, gate_b, up_a, up_b, down_a, down_b, lora.scaling)
        outside_TK = (problem.expert_TK < first) | (problem.expert_TK >= last)
        expert_TK = (problem.expert_TK - first).masked_fill(outside_TK, -1)
        found.append(problem._replace(expert_TK=expert_TK, weights=weights, lora=lora))
        first = last
    return found


HALVED = Placement(
    "halved",
    "as two half stacks",
    make=halve,
    backends=(HalvesBackend(),),
    tolerances={torch.float32: Tolerance(), torch.bfloat16: Tolerance(1e-2, 2e-2)},
)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    """For the tests of this file alone."""
    before = dict(placements._placements), list(registry._backends)
    amoeba.register_placement(HALVED)
    yield
    placements._placements, registry._backends = before
    registry._sort_backends()


# --- and what it has to work in ---------------------------------------------------------------------------------------


def run(layer: Layer, weights, **options) -> dict[str, Tensor]:
    """The output and every gradient but those of the weights, which are frozen."""
    named = {name: t for name, t in layer.tensors.items() if name in ("x", "weight", *LORA_NAMES)}
    routing = Routing(layer.expert_TK, named["weight"])
    y_TH = experts(named["x"], routing, weights, lora=layer.lora(layer.tensors), **options)
    found = torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH)
    return {"output": y_TH.detach(), **dict(zip(named, found, strict=True))}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


def frozen(layer: Layer) -> ExpertWeights:
    return layer.weights({name: tensor.detach() for name, tensor in layer.tensors.items()})


@each_value_once()
@pytest.mark.parametrize("rank", [0, 3], ids=["", "lora"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_autograd_lora_and_recompute(rank: int, recompute: bool) -> None:
    layer = Layer(rank=rank, expert_TK=torch.tensor([[0, 3], [4, 1], [2, -1], [3, 2], [1, 0]]), tokens=5)
    expected = run(layer, frozen(layer), backend="eager")
    assert_same(run(layer, halve(frozen(layer)), recompute=recompute), expected)
    assert_same(run(layer, halve(frozen(layer)), backend="halves"), expected)


def test_the_choice_is_explained_and_others_are_refused_by_name() -> None:
    layer = Layer()
    request = Request(layer.tensors["x"], Routing(layer.expert_TK, layer.tensors["weight"]), halve(frozen(layer)))
    explanation = amoeba.explain(request)
    assert explanation.backend is not None and explanation.backend.name == "halves"
    assert str(explanation) == "halves, one half after the other"
    with pytest.raises(
        ValueError, match=r"one that supports halved weights \(HalvedExperts\); got cpu, which does not"
    ):
        run(layer, halve(frozen(layer)), backend="cpu")


def test_compile_and_checkpointing() -> None:
    torch.compiler.reset()
    layer = Layer(rank=3)
    weights, lora = halve(frozen(layer)), layer.lora(layer.tensors)
    counted = CompileCounterWithBackend("aot_eager")

    def layer_of(x: Tensor, weight: Tensor) -> Tensor:
        return experts(x * 2, Routing(layer.expert_TK, weight), weights, lora=lora) + 1

    compiled = torch.compile(layer_of, fullgraph=True, backend=counted)
    leaves = [layer.tensors[name] for name in ("x", "weight", *LORA_NAMES)]
    inputs = leaves[:2]
    expected = torch.autograd.grad(layer_of(*inputs), leaves, layer.dy_TH)
    for call in (compiled, lambda *given: checkpoint(layer_of, *given, use_reentrant=False)):
        for found, right in zip(torch.autograd.grad(call(*inputs), leaves, layer.dy_TH), expected, strict=True):
            assert torch.equal(found, right)
    assert counted.frame_count == 1


def test_verify_has_a_row_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    every = conformance.most_telling_first(conformance.cases(False))
    of_two_halves = [case for case in every if case.num_experts > 1]
    monkeypatch.setattr(conformance, "cases", lambda thorough: of_two_halves[:8])
    result = CliRunner().invoke(app, ["verify", "--device", "cpu", "--backend", "halved", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["backends"]
    checked = {row["dtype"]: row for row in rows if row["cases_checked"]}
    assert set(checked) == {"float32", "bfloat16"} and all(row["ok"] for row in checked.values())
    assert {"output", "x", "weight", "down_lora_b"} <= set(checked["float32"]["worst"])


def test_doctor_and_bench_know_it() -> None:
    from amoeba.bench.implementations import names_of_ours

    result = CliRunner().invoke(app, ["doctor"])
    assert "as two half stacks" in result.stdout
    assert "halved" in names_of_ours() and "halved" in placement_names()


def test_one_that_is_there_to_be_proven_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "_placements", dict(placements._placements))
    amoeba.register_placement(replace(HALVED, name="proven", offered=False))
    assert "proven" not in placement_names()
    assert "proven" in {placement.name for placement in placements.all_placements()}
    with pytest.raises(ValueError, match="placement: expected a name other than resident and auto; got auto"):
        amoeba.register_placement(replace(HALVED, name="auto"))


class TestTransformers:
    @pytest.fixture(autouse=True)
    def _needs_transformers(self) -> None:
        pytest.importorskip("transformers", reason="needs transformers: pip install 'amoeba-moe[hf]'")

    def test_placed_experts_give_the_same_logits_and_lora_gradients(self) -> None:
        from amoeba import lora
        from tiny_models import build, token_ids

        def trained(placement: str) -> dict[str, Tensor]:
            model = build("qwen3_moe")
            amoeba.place_experts(model, placement)
            lora.attach(model, r=3, alpha=6)
            generator = torch.Generator().manual_seed(0)
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            logits = model(input_ids=token_ids(), use_cache=False).logits
            logits.square().mean().backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            return {"logits": logits.detach(), **gradients}

        found = trained("halved")
        assert_same(found, trained("resident"))
        assert sum("lora" in name for name in found) >= 5

    def test_a_model_finds_its_experts_where_they_are_placed(self) -> None:
        from tiny_models import build, token_ids

        model = build("qwen3_moe")
        model.set_experts_implementation("eager")
        expected = model(input_ids=token_ids(), use_cache=False).logits
        amoeba.place_experts(model, "halved")
        torch.testing.assert_close(model(input_ids=token_ids(), use_cache=False).logits, expected)

    def test_saving_such_a_model_is_refused_and_merging_too(self) -> None:
        from amoeba import lora
        from tiny_models import build

        model = build("qwen3_moe")
        amoeba.place_experts(model, "halved")
        with pytest.raises(ValueError, match=r"experts as ordinary tensors.*as two half stacks"):
            model.state_dict()
        lora.attach(model, r=2)
        with pytest.raises(ValueError, match=r"experts as ordinary tensors.*as two half stacks"):
            lora.merge(model)

    def test_generate_takes_it_and_writes_the_same_text(self, tmp_path: Path) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        from amoeba.jobs.generate.generate import GenerationOptions, generate
        from tiny_models import randomise, save_byte_tokenizer, tiny_config

        torch.manual_seed(0)
        config = tiny_config(Qwen3MoeConfig, "qwen3_moe", vocab_size=257, eos_token_id=256, pad_token_id=256)
        randomise(Qwen3MoeForCausalLM(config)).save_pretrained(tmp_path)
        save_byte_tokenizer(tmp_path)
        texts = {}
        for placement in ("resident", "halved"):
            pieces: list[str] = []
            options = GenerationOptions(
                max_new_tokens=9, temperature=0, experts=placement, device=torch.device("cpu"), dtype=torch.float32
            )
            report = generate(tmp_path, "Once", options, pieces.append)
            texts[placement] = "".join(pieces)
            assert report.placement == placement
        assert report.backend == "halves"
        assert texts["halved"] == texts["resident"]


def test_no_file_of_the_package_names_it() -> None:
    words = ("halved", "HalvedExperts")
    assert not [path for path in SOURCE.rglob("*.py") if any(word in path.read_text() for word in words)]
