"""Who takes part in the benchmark of LoRA experts: those of ours that were asked for, and kt-kernel where it is."""

import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from amoeba.bench.implementations import implementations
from amoeba.bench.suite import Plan, run_suite
from amoeba.bench.workload import SHAPES, Shape, make_workload
from amoeba.commands import bench_layers as bench_command
from amoeba.commands.bench_layers import choose_ours, choose_peers, command_line
from amoeba.commands.output import Output
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.proof.reference import experts as reference
from selection import quick

CPU = torch.device("cpu")
TINY = Shape("tiny", 12, 64, 32, 4, 2, rank=4)


class PlainLayer:
    """The part of kt-kernel's wrapper that the benchmark uses, computed by the reference."""

    made: ClassVar[list["PlainLayer"]] = []

    def __init__(self, **sizes) -> None:
        self.sizes = SimpleNamespace(**sizes)
        self.made.append(self)

    def init_lora_weights(self, **tensors) -> None:
        self.gradients = {name[5:]: tensors.pop(name) for name in list(tensors) if name.startswith("grad_")}
        assert all(factor.dtype == torch.bfloat16 for factor in tensors.values())
        self.lora = LoraFactors(
            **{name: factor.double() for name, factor in tensors.items()},
            scaling=self.sizes.lora_alpha / self.sizes.lora_rank,
        )

    def load_weights(self, order) -> None:
        assert torch.equal(order, torch.arange(self.sizes.num_experts))
        gate_up = torch.cat([self.gate_proj, self.up_proj], 1)
        self.weights = ExpertWeights(gate_up.double(), self.down_proj.double())

    def forward(self, x_TH, expert_TK, weight_TK, save_for_backward):
        self.given = x_TH.double(), expert_TK, weight_TK.double()
        return reference.experts_forward(*self.given, self.weights, self.lora).bfloat16()

    def backward(self, dy_TH):
        found = reference.experts_backward(dy_TH.double(), *self.given, self.weights, self.lora)
        for name, gradient in self.gradients.items():
            gradient.copy_(found[name])
        return found["x"].bfloat16(), found["weight"].float()


@pytest.fixture
def kt_kernel(monkeypatch):
    package, sft, amx, base = (ModuleType(name) for name in ("kt_kernel", "sft", "amx", "base"))
    amx.AMXSFTMoEWrapper = PlainLayer
    base.KExpertsSFTBuffer = SimpleNamespace(clear_cache=lambda: None)
    names = {"kt_kernel": package, "kt_kernel.sft": sft, "kt_kernel.sft.amx": amx, "kt_kernel.sft.base": base}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    PlainLayer.made.clear()
    return PlainLayer


@quick(lambda measured: measured == "training")
@pytest.mark.parametrize("measured", ["training", "forward"])
def test_kt_kernel_is_checked_and_timed_next_to_ours(kt_kernel, measured):
    (report,) = run_suite(
        Plan([TINY], CPU, [torch.bfloat16], [measured], repeats=1, peers=["kt_kernel"], ours=["eager"])
    )
    timed = {m.implementation: m for m in report.measurements if m.status == "timed"}
    assert set(timed) == {"amoeba eager", "kt-kernel bf16", "kt-kernel int8"}
    assert [layer.sizes.method for layer in kt_kernel.made] == ["AMXBF16_SFT", "AMXINT8_SFT"]
    expected = {"output"} if measured == "forward" else {"output", "x", "weight", *TINY_FACTORS}
    assert set(timed["kt-kernel bf16"].errors) == expected
    assert timed["kt-kernel bf16"].worst_error < 6e-3
    assert "kt-kernel bf16" in timed["amoeba eager"].times_faster_than


TINY_FACTORS = make_workload(TINY, CPU, torch.bfloat16, training=False).lora.tensors()


def test_without_kt_kernel_the_reason_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "kt_kernel", None)
    workload = make_workload(TINY, CPU, torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=False, peers=["kt_kernel"])
    assert not [each for each in found if each.name.startswith("kt-kernel")]
    assert "pip install kt-kernel" in left_out["kt-kernel bf16"]


def test_of_ours_only_those_that_were_asked_for():
    workload = make_workload(TINY, CPU, torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=True, peers=["loop"], ours=["eager", "in float32"])
    assert [each.name for each in found if each.ours] == ["amoeba eager", "amoeba in float32"]
    assert left_out["amoeba cpu-bf16"] == left_out["amoeba cpu"] == "was not asked for"
    assert [each.name for each in found if not each.ours] == ["torch loop", "torch loop in float32"]


def test_the_command_line_says_who_took_part():
    words = command_line(Plan([SHAPES["lora_small"]], CPU, [torch.bfloat16], ["training"], 3, ["loop"], ["cpu-bf16"]))
    assert words.endswith("--peer loop --ours cpu-bf16")
    assert choose_peers(["kt_kernel"]) == ("kt_kernel",)
    with pytest.raises(ValueError, match="kt_kernel"):
        choose_peers(["kt"])


def test_a_name_of_ours_that_nobody_has_is_said(kt_kernel):
    workload = make_workload(TINY, CPU, torch.bfloat16, training=False)
    found, left_out = implementations(workload, training=True, peers=[])
    named = {name.removeprefix("amoeba ") for name in (*(each.name for each in found), *left_out) if "amoeba" in name}
    assert choose_ours(sorted(named)) == tuple(sorted(named)), "whatever a table shows can be asked for"
    assert choose_ours([]) is None
    with pytest.raises(ValueError, match=r"cpu-bf17.*Leave it out"):
        choose_ours(["cpu-bf17"])


@quick(lambda verbose: verbose)
@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_shows_the_seconds_of_each_part_of_a_check(capsys, verbose):
    output = Output()
    output.verbose = verbose
    shape = Shape("plain", 12, 64, 32, 4, 2)
    bench_command.run(Plan([shape], CPU, [torch.float32], ["training"], 1, ["eager"], ["eager"]), None, output, None)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    parts = [line.split("  [")[0] for line in lines if line.startswith("transformers eager: ")]
    expected = ["its first forward", "its first backward", "comparing", "its peak memory"] if verbose else []
    assert parts == [f"transformers eager: {part}" for part in expected]
    assert all(line.endswith(" s]") == verbose for line in lines)
