"""Training of stored bf16 experts on a CPU: gradients of weights and biases against fp64, in the stored layout.

T tokens · K experts per token · E experts · H hidden · I intermediate · R LoRA rank
"""

import gc
import shutil
import weakref
from dataclasses import dataclass

import pytest
import torch
from test_node import GPT_OSS, LARGEST_ERROR, ROUTINGS, WEIGHTS, check
from test_node import Layer as NodeLayer
from torch import Tensor

from amoeba import ExpertWeights, Routing, experts
from amoeba.backends import cpu_fused
from amoeba.core.config import Activation
from amoeba.core.problem import Needs
from amoeba.core.weights import LORA_NAMES, LoraFactors
from amoeba.cpu.node_passes import NodeExperts, NodeFactors, backward, forward
from amoeba.cpu.numa import WorkerPool
from amoeba.cpu.weights import PackedWeights, StoredWeights
from selection import each_value_once

pytestmark = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)


def plain(weight: Tensor) -> Tensor:
    return weight


def turned(weight: Tensor) -> Tensor:
    """Stored as (E, in, out)."""
    return weight.mT.contiguous().mT


def experts_last(weight: Tensor) -> Tensor:
    """Dense, but contiguous along neither of its inner dimensions."""
    return weight.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def part_of_more(weight: Tensor) -> Tensor:
    """Rows that lie apart."""
    wide = torch.full((*weight.shape[:2], weight.shape[2] + 7), torch.nan, dtype=weight.dtype)
    wide[..., 3:-4] = weight
    return wide[..., 3:-4]


@dataclass
class Layer(NodeLayer):
    """The same with weights that train, as they are stored."""

    ranks: tuple[int, int, int] = (0, 0, 0)
    bias: bool = True

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (WEIGHTS if self.bias else WEIGHTS[:2])}

    def node(self, store=plain) -> NodeExperts:
        stored = (StoredWeights(store(weight)) for weight in (self.gate_up, self.down))
        return NodeExperts(*stored, self.gate_up_bias, self.down_bias, self.activation)

    def run(self, workers: WorkerPool, needs: Needs | None = None, *, store=plain, save="h") -> dict[str, Tensor]:
        mine = self.node(store)
        needs = needs or Needs(*[True] * 4, *[self.bias] * 2, *[True] * 6)
        factors = NodeFactors.pack(mine, self.lora, workers) if self.lora.tensors() else None
        y_TH, cache = forward(mine, factors, self.x_TH, self.expert_TK, self.weight_TK, workers, save=save)
        gradients = backward(mine, factors, cache, self.dy_TH, workers, needs)
        named = dict(zip(Needs._fields, gradients, strict=True))
        return {"output": y_TH} | {name: gradient for name, gradient in named.items() if gradient is not None}

    def expected(self, *trained: str) -> dict[str, Tensor]:
        return super().expected(*(trained or self.weights))


@each_value_once("path")
@pytest.mark.parametrize("store", [plain, turned])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(hidden=63, intermediate=199),
        Layer(hidden=1, intermediate=1, experts=1, top_k=1, tokens=1),
        Layer(tokens=300, top_k=4, experts=4),  # K = E
        Layer(tokens=760, top_k=1, experts=1, hidden=70, intermediate=40),  # more rows than are packed at a time
        Layer(tokens=33, hidden=330, intermediate=300),  # more panels than are packed at a time, and than a job has
        Layer(tokens=130, top_k=3, bias=False, ranks=(5, 5, 5)),
        Layer(activation=GPT_OSS, intermediate=31),
        Layer(activation=Activation("relu2", gated=False), intermediate=72),
    ],
    ids=lambda layer: f"T{layer.tokens}-E{layer.experts}-H{layer.hidden}-I{layer.intermediate}-R{layer.ranks}",
)
def test_every_gradient_agrees_with_fp64(path: str, layer: Layer, store, workers: WorkerPool) -> None:
    alone = layer.hidden == 1  # roundings of a single number have no others to average over
    check(layer.run(workers, store=store), layer.expected(), "bf16", looser=4 if alone else 1)


@pytest.mark.parametrize("store", [plain, turned, experts_last, part_of_more])
def test_storage_changes_no_bit_and_gradients_come_back_in_it(path: str, store, workers: WorkerPool) -> None:
    layer = Layer(hidden=63, intermediate=72)
    expected, found = layer.run(workers), layer.run(workers, store=store)
    for name in expected:
        if store is plain or name != "down":  # stored the other way round, the routing weight is rounded into a
            assert torch.equal(found[name], expected[name]), name
    for name in ("gate_up", "down"):
        assert found[name].stride() == torch.empty_like(store(layer.weights[name])).stride(), name
    check(found, layer.expected(), "bf16")


@pytest.mark.parametrize("store", [plain, turned])
def test_stored_weights_give_the_bits_of_packed_ones(path: str, store, workers: WorkerPool) -> None:
    layer = Layer(tokens=150, ranks=(3, 3, 3), hidden=130, intermediate=72)
    weights = PackedWeights.pack(layer.gate_up), PackedWeights.pack(layer.down)
    frozen = NodeExperts(*weights, layer.gate_up_bias, layer.down_bias, layer.activation)
    factors = NodeFactors.pack(frozen, layer.lora, workers)
    y_TH, cache = forward(frozen, factors, layer.x_TH, layer.expert_TK, layer.weight_TK, workers, save="h")
    expected = backward(
        frozen, factors, cache, layer.dy_TH, workers, Needs(True, True, **dict.fromkeys(LORA_NAMES, True))
    )
    found = layer.run(workers, store=store)
    assert torch.equal(found["output"], y_TH)
    for name, gradient in zip(Needs._fields, expected, strict=True):
        assert gradient is None or torch.equal(found[name], gradient), name


@pytest.mark.parametrize("only", ["x", "weight", *WEIGHTS])
def test_one_gradient_alone(path: str, only: str, workers: WorkerPool) -> None:
    layer = Layer()
    alone = layer.run(workers, Needs(**{name: name == only for name in Needs._fields}))  # type: ignore[arg-type]
    assert alone.keys() == {"output", only}
    assert torch.equal(alone[only], layer.run(workers)[only])


def test_neither_threads_nor_repetition_nor_what_is_kept_change_a_bit(path: str, workers: WorkerPool) -> None:
    layer = Layer(tokens=600, top_k=3, hidden=130, intermediate=72)
    first = layer.run(WorkerPool(1))
    for other, save in ((workers, "h"), (workers, "h"), (WorkerPool(5), "h"), (workers, "inputs")):
        again = layer.run(other, save=save)
        for name in first:
            assert torch.equal(first[name], again[name]), name


@each_value_once("path")
@pytest.mark.parametrize("expert_TK", ROUTINGS.values(), ids=ROUTINGS)
def test_any_routing(path: str, expert_TK: Tensor, workers: WorkerPool) -> None:
    layer = Layer(tokens=len(expert_TK), expert_TK=expert_TK)
    check(layer.run(workers), layer.expected(), "bf16")


def test_gradients_that_are_streamed_past_the_caches_are_whole(path: str, workers: WorkerPool) -> None:
    layer = Layer(tokens=9, experts=3, top_k=1, hidden=2048, intermediate=1024)
    assert layer.down.nbytes > 8 << 20, "the core streams above this size"
    layer.expert_TK[:] = 1
    check(layer.run(workers), layer.expected(), "bf16")


@pytest.mark.thorough  # every run: test_sums.py, and test-other-cpus for AVX2
@pytest.mark.usefixtures("older_instructions")
def test_older_instruction_sets_agree_too() -> None:
    threads = WorkerPool(2)
    for store in (plain, turned):
        layer = Layer(hidden=63, intermediate=199, ranks=(5, 5, 5))
        check(layer.run(threads, store=store), layer.expected(), "bf16")


def test_packed_weights_are_frozen(workers: WorkerPool) -> None:
    layer = Layer(bias=False)
    weights = (PackedWeights.pack(layer.weights[name]) for name in ("gate_up", "down"))
    frozen = NodeExperts(*weights, None, None, layer.activation)
    _, cache = forward(frozen, None, layer.x_TH, layer.expert_TK, layer.weight_TK, workers, save="h")
    with pytest.raises(ValueError, match="frozen"):
        backward(frozen, None, cache, layer.dy_TH, workers, Needs(True, True, gate_up=True))


@pytest.mark.skipif(not cpu_fused._multiplies_bf16(), reason="this CPU has no bf16 products")
class TestBackend:
    """What the `cpu` backend makes of it."""

    def tensors(self, layer: Layer) -> tuple[dict[str, Tensor], LoraFactors | None]:
        named = {n: t.to(torch.bfloat16).clone().requires_grad_() for n, t in layer.weights.items()}
        named |= {"x": layer.x_TH.clone().requires_grad_(), "weight": layer.weight_TK.clone().requires_grad_()}
        factors = {n: t.clone().requires_grad_() for n, t in layer.lora.tensors().items()}
        return named | factors, LoraFactors(**factors, scaling=2.0) if factors else None

    def run(self, layer: Layer, named: dict[str, Tensor], lora: LoraFactors | None, **options) -> Tensor:
        weights = ExpertWeights(*(named.get(name) for name in WEIGHTS), layer.activation)
        return experts(named["x"], Routing(layer.expert_TK, named["weight"]), weights, lora=lora, **options)

    @pytest.mark.parametrize("rank", [0, 4])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_it_is_the_choice_for_training_and_gives_every_gradient(self, rank, recompute, monkeypatch) -> None:
        seen = []
        for name in ("forward", "backward"):
            original = getattr(cpu_fused, name)
            monkeypatch.setattr(cpu_fused, name, lambda *a, o=original, n=name: (seen.append(n), o(*a))[1])
        layer = Layer(tokens=300, ranks=(rank, rank, rank))
        for name, tensor in layer.weights.items():
            setattr(layer, name, tensor.to(torch.bfloat16).to(tensor.dtype))
        named, lora = self.tensors(layer)
        y_TH = self.run(layer, named, lora, backend="cpu", recompute=recompute)
        gradients = torch.autograd.grad(y_TH, list(named.values()), layer.dy_TH)
        assert seen == ["forward", "backward"]
        found = {"output": y_TH} | dict(zip(named, gradients, strict=True))
        expected = layer.expected()
        for name, tensor in found.items():
            error = float((tensor.detach().double() - expected[name]).norm() / expected[name].norm())
            assert error < LARGEST_ERROR["bf16"]["gradient"], f"{name}: {error:.1e}"

    def test_h_alone_is_kept_next_to_the_inputs(self) -> None:
        layer = Layer(tokens=300, ranks=(4, 4, 4))
        named, lora = self.tensors(layer)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
            self.run(layer, named, lora, backend="cpu")
        inputs = {t.data_ptr() for t in (*named.values(), layer.expert_TK)}
        own = [tuple(t.shape) for t in kept if t.data_ptr() not in inputs and t.numel()]
        assert own == [(600, 128)]

    def test_nothing_of_a_pass_stays_alive(self) -> None:
        layer = Layer(tokens=300)
        named, lora = self.tensors(layer)
        made = []
        original = StoredWeights.__post_init__

        def watched(self) -> None:
            original(self)
            made.append(weakref.ref(self))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StoredWeights, "__post_init__", watched)
            self.run(layer, named, lora, backend="cpu").sum().backward()
        gc.collect()
        assert made and all(reference() is None for reference in made)

    def test_decoding_stays_with_the_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_fused, "forward", lambda *_: pytest.fail("the fused pass was taken"))
        layer = Layer(tokens=8)
        named, lora = self.tensors(layer)
        with torch.no_grad():
            self.run(layer, named, lora, backend="cpu")

    def test_compiled(self) -> None:
        layer = Layer(tokens=150, ranks=(4, 4, 4))
        named, _ = self.tensors(layer)
        names = list(named)

        def step(*tensors: Tensor) -> Tensor:
            given = dict(zip(names, tensors, strict=True))
            factors = LoraFactors(**{n: given[n] for n in LORA_NAMES}, scaling=2.0)
            return self.run(layer, given, factors, backend="cpu")

        expected = torch.autograd.grad(step(*named.values()), list(named.values()), layer.dy_TH)
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*named.values()), list(named.values()), layer.dy_TH)
        for name, left, right in zip(names, expected, found, strict=True):
            assert torch.equal(left, right), name
