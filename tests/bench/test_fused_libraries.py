"""SonicMoE and Liger beside ours: the libraries themselves are stood in for by plain torch behind their names."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from amoeba.bench import peers
from amoeba.bench.implementations import implementations
from amoeba.bench.suite import Plan, run_suite
from amoeba.bench.workload import Shape, make_workload
from amoeba.commands.bench_run import make_document

CPU = torch.device("cpu")
TINY = Shape("tiny", 12, 64, 32, 4, 2)
BOTH = ["sonicmoe", "liger"]


def metadata(expert_TK, experts, count_E, offset, token, place, back):
    assert expert_TK.dtype == torch.int32
    flat = expert_TK.flatten()
    place.copy_(flat.argsort(stable=True))
    back.copy_(place.long().argsort())
    token.copy_(place // expert_TK.shape[1])
    count_E.copy_(torch.bincount(flat, minlength=experts))
    offset.copy_(F.pad(count_E.cumsum(0), (1, 0)))


def by_expert(rows, weight_ONE, offset):
    """SonicMoE's weights: the experts are the last dimension of a view of a contiguous stack."""
    assert weight_ONE.permute(2, 0, 1).is_contiguous()
    parts = rows.split(offset.diff().tolist())
    return torch.cat([part @ weight_ONE[..., e].T for e, part in enumerate(parts)])


class Up:
    @staticmethod
    def apply(x_TH, w_JHE, bias, offset, rows, top_k, token, place, back, offset_T, varies, activation, infers):
        assert bias is None and offset_T is None and not varies and activation == "swiglu"
        assert infers == (not torch.is_grad_enabled())
        u_NJ = by_expert(x_TH[token.long()], w_JHE, offset)
        return (F.silu(u_NJ[:, ::2]) * u_NJ[:, 1::2]).detach(), None if infers else u_NJ


class Down:
    @staticmethod
    def apply(a_NI, u_NJ, w_HIE, bias, weight_TK, offset, tokens, top_k, token, place, back, offset_T, varies, kind):
        assert weight_TK.dtype == torch.float32
        if u_NJ is not None:
            a_NI = F.silu(u_NJ[:, ::2]) * u_NJ[:, 1::2]
        y_NH = by_expert(a_NI, w_HIE, offset)
        y_TKH = y_NH[back.long()].unflatten(0, (tokens, top_k))
        return (y_TKH.float() * weight_TK[..., None]).sum(1).to(a_NI.dtype)


class Liger:
    @staticmethod
    def apply(x_TH, gate_up_EJH, down_EHI, expert_TK, weight_TK):
        assert expert_TK.dtype == torch.int32
        y_TH = torch.zeros(x_TH.shape, dtype=torch.float32)
        for e in range(gate_up_EJH.shape[0]):
            token, slot = torch.where(expert_TK == e)
            gate, up = F.linear(x_TH[token], gate_up_EJH[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, down_EHI[e])
            y_TH = y_TH.index_add(0, token, y.float() * weight_TK[token, slot, None].float())
        return y_TH.to(x_TH.dtype)


@pytest.fixture
def libraries(monkeypatch):
    """Both, on what passes for a GPU."""
    functional = SimpleNamespace(TC_topk_router_metadata_triton=metadata, _UpProjection=Up, _DownProjection=Down)
    modules = {
        "sonicmoe": ModuleType("sonicmoe"),
        "sonicmoe.functional": functional,
        "sonicmoe.enums": SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu")),
        "liger_kernel": ModuleType("liger_kernel"),
        "liger_kernel.ops": SimpleNamespace(LigerFusedMoEFunction=Liger),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "is_nvidia_gpu", lambda device: True)
    return SimpleNamespace(**{name.replace(".", "_"): module for name, module in modules.items()})


@pytest.mark.parametrize("measured", ["training", "forward"])
def test_both_are_checked_and_timed_next_to_ours(libraries, measured):
    (report,) = run_suite(Plan([TINY], CPU, [torch.bfloat16], [measured], repeats=1, peers=BOTH, ours=["eager"]))
    timed = {each.implementation: each for each in report.measurements if each.status == "timed"}
    assert set(timed) == {"amoeba eager", "SonicMoE", "Liger"}
    expected = {"output"} if measured == "forward" else {"output", "x", "weight", "gate_up", "down"}
    for name in ("SonicMoE", "Liger"):
        assert set(timed[name].errors) == expected
        assert not timed[name].ours and name in timed["amoeba eager"].times_faster_than


def test_a_copy_of_the_weights_does_not_count_as_kept_for_backward(libraries):
    (report,) = run_suite(Plan([TINY], CPU, [torch.bfloat16], ["training"], repeats=1, peers=["sonicmoe"], ours=[]))
    kept = next(each.kept_bytes for each in report.measurements if each.implementation == "SonicMoE")
    copy = TINY.experts * 2 * TINY.intermediate * TINY.hidden * 2
    assert kept < copy


def left_out_of(shape=TINY, dtype=torch.bfloat16, peers=BOTH):
    workload = make_workload(shape, CPU, dtype, training=False)
    found, left_out = implementations(workload, training=False, peers=peers, ours=[])
    assert {each.name for each in found if not each.ours}.isdisjoint(left_out)
    return left_out


def test_without_the_libraries_the_reason_is_said(libraries, monkeypatch):
    for name in ("sonicmoe", "sonicmoe.functional", "liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    left_out = left_out_of()
    assert "cannot be imported" in left_out["SonicMoE"] and "github.com/Dao-AILab/sonic-moe" in left_out["SonicMoE"]
    assert "pip install liger-kernel" in left_out["Liger"]


def test_another_version_of_it_is_left_out_and_not_a_crash(libraries):
    del libraries.sonicmoe_functional._UpProjection
    del libraries.liger_kernel_ops.LigerFusedMoEFunction
    left_out = left_out_of()
    assert (
        left_out["SonicMoE"].startswith("cannot be set up: AttributeError: ")
        and "_UpProjection" in left_out["SonicMoE"]
    )
    assert "LigerFusedMoEFunction" in left_out["Liger"]


def test_what_they_are_not_for(libraries, monkeypatch):
    decode, lora = Shape("decode", 1, 64, 32, 4, 2, forward_only=True), Shape("lora", 12, 64, 32, 4, 2, rank=4)
    assert left_out_of(peers=["liger"])["SonicMoE"] == "was not asked for"
    assert "many tokens" in left_out_of(decode)["SonicMoE"]
    assert "Liger" not in left_out_of(decode)
    assert {left_out_of(lora)[name] for name in ("SonicMoE", "Liger")} == {"its experts take no factors"}
    assert "bf16 and fp16" in left_out_of(dtype=torch.float32)["Liger"]
    monkeypatch.undo()
    assert "NVIDIA GPU" in left_out_of()["SonicMoE"]


def test_the_document_has_the_versions_of_the_peers_that_are_installed(tmp_path, monkeypatch):
    folder = tmp_path / "liger_kernel-1.2.3.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: liger-kernel\nVersion: 1.2.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = make_document("amoeba bench")["peer_versions"]
    assert found["liger-kernel"] == "1.2.3"
    assert "sonic-moe" not in found
