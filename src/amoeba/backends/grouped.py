"""`grouped`: torch's grouped matrix product over the sorted rows. On a GPU it needs no host synchronisation.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I or I · R LoRA rank

Row buffers carry one spare row at the end, which stands for sentinels (see `sum_rows`). Rows past offs_E[-1] are left
uninitialised by the product and never read. The product wants rows of a multiple of 16 bytes; LoRA factors of
another rank are padded with zeros to the next one, for the length of a pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from amoeba.backends import low_rank, sorted_rows
from amoeba.backends.backend import PassesBackend, Request
from amoeba.backends.experts_operator import SavedRows
from amoeba.backends.low_rank import ByToken, Rows
from amoeba.backends.torch_rows import RowsInTorch
from amoeba.core.problem import Gradients, Needs, Problem, Save, Saved
from amoeba.core.weights import ExpertWeights, LoraFactors
from amoeba.cpu.pointers import place_of
from amoeba.system.cpu_features import has_bf16_instructions


class GroupedBackend(PassesBackend):
    name, summary, kinds = "grouped", "torch's grouped matrix product on sorted rows", (ExpertWeights,)
    traced = SavedRows()

    def preference(self, device: torch.device) -> int:
        return 20 if device.type == "cpu" else 30

    def why_not(self, request: Request) -> str | None:
        weights = request.weights
        assert isinstance(weights, ExpertWeights)
        if not hasattr(F, "grouped_mm"):
            return f"needs torch.nn.functional.grouped_mm (torch >= 2.10), this is torch {torch.__version__}"
        if weights.device.type == "cuda":
            if weights.dtype != torch.bfloat16:
                return f"torch's grouped product without host synchronisation is bf16 only; these are {weights.dtype}"
            if torch.cuda.get_device_capability(weights.device) < (9, 0):
                return "torch's grouped product synchronises with the host below compute capability 9.0"
        elif weights.device.type != "cpu":
            return f"not tested on {weights.device.type}"
        elif weights.dtype == torch.bfloat16 and not has_bf16_instructions():
            return "torch's bf16 product is emulated on this CPU; eager computes it in fp32"
        elif weights.dtype not in (torch.float32, torch.bfloat16):
            return f"torch's grouped product on a CPU takes fp32 and bf16; these weights are {weights.dtype}"
        return _misaligned(weights)

    def forward(self, problem: Problem, save: Save) -> tuple[Tensor, Saved | None]:
        return sorted_rows.forward(_with_whole_ranks(problem), save, GroupedRows)

    def backward(self, problem: Problem, saved: Saved | None, dy_TH: Tensor, needs: Needs) -> Gradients:
        found = sorted_rows.backward(_with_whole_ranks(problem), saved, dy_TH, needs, GroupedRows)
        return found if problem.lora is None else found._replace(**_with_own_ranks(found, problem.lora))


def _misaligned(weights: ExpertWeights) -> str | None:
    """Rows of x, h and a are operands too, so every width counts, however the weights are stored."""
    size = weights.dtype.itemsize
    for name, width in (("H", weights.hidden), ("I", weights.intermediate), ("J", weights.gate_up_EJH.shape[1])):
        if width * size % 16:
            return f"torch's grouped product needs rows of a multiple of 16 bytes, {name} = {width} is {width * size}"
    for name, tensor in (("gate_up", weights.gate_up_EJH), ("down", weights.down_EHI)):
        _, row, column = tensor.stride()
        rows_apart = row >= tensor.shape[2] if column == 1 else row == 1 and column >= tensor.shape[1]
        if not rows_apart or any(stride * size % 16 for stride in tensor.stride() if stride != 1):
            needs = "torch's grouped product needs rows of a multiple of 16 bytes that do not overlap"
            return f"{needs}, {name} has strides {tensor.stride()}"
        if tensor.device.type == "cuda" and tensor.storage_offset() * size % 16:
            needs = "torch's grouped product on a GPU needs memory that begins at a multiple of 16 bytes"
            return f"{needs}, {name} begins at element {tensor.storage_offset()} of its storage"
    return None


class GroupedRows(RowsInTorch):
    spare = 1

    def hidden(self) -> Tensor:
        problem, weights, offs_E = self.problem, self.problem.weights, self.layout.offs_E
        x_NH = self.gather(problem.x_TH)
        h_NJ = F.grouped_mm(x_NH, weights.gate_up_EJH.transpose(1, 2), offs=offs_E)
        if weights.gate_up_bias_EJ is not None:
            h_NJ += bias_of_row(weights.gate_up_bias_EJ, self.rows, offs_E)
        low_rank.add_to_h(problem, self, x_NH, h_NJ)
        return h_NJ

    def down(self, a_NI: Tensor) -> Tensor:
        problem, weights, rows = self.problem, self.problem.weights, self.rows
        y_NH = F.grouped_mm(a_NI, weights.down_EHI.transpose(1, 2), offs=self.layout.offs_E)
        low_rank.add_to_y(problem, self, a_NI, y_NH)
        if weights.down_bias_EH is not None:
            bias_NH = bias_of_row(weights.down_bias_EH, rows, self.layout.offs_E)
            y_NH[:rows] += self.scale_N[:, None].to(y_NH.dtype) * bias_NH
        return y_NH

    def rows_gradient(self, dh_NJ: Tensor) -> Tensor:
        return F.grouped_mm(dh_NJ, self.problem.weights.gate_up_EJH, offs=self.layout.offs_E)

    def add_through_bias(self, ds_N: Tensor, dy: Rows) -> None:
        assert isinstance(dy, Tensor)
        bias_NH = bias_of_row(self.problem.weights.down_bias_EH, self.rows, self.layout.offs_E)
        ds_N += (dy * bias_NH).sum(-1, dtype=ds_N.dtype)

    def bias_gradient(self, grad: Rows, bias_EO: Tensor, *, weighted: bool) -> Tensor:
        scale_N = self.scale_N if weighted else None
        return sum_per_expert(self._sorted(grad), self.layout.offs_E, scale_N, self.problem.x_TH.dtype)

    def multiply(self, rows: Rows, matrix_EIO: Tensor) -> Tensor:
        rows_NI = self.gather(rows.rows_TW) if isinstance(rows, ByToken) else rows
        rows_NI = rows_NI if rows_NI.stride(1) == 1 else rows_NI.contiguous()
        return F.grouped_mm(rows_NI, matrix_EIO, offs=self.layout.offs_E)

    def add_product(self, rows_NI: Tensor, matrix_EIO: Tensor, out_NO: Tensor) -> None:
        added = self.multiply(rows_NI, matrix_EIO)
        out_NO[: added.shape[0]] += added[: out_NO.shape[0]]

    def weight_gradient(self, grad: Rows, rows: Rows, weight_EOI: Tensor) -> Tensor:
        return weight_gradient(self._sorted(grad), self._sorted(rows), self.layout.offs_E, weight_EOI)

    def _sorted(self, rows: Rows) -> Tensor:
        """The N rows, without a spare one."""
        rows_NW = self.gather(rows.rows_TW) if isinstance(rows, ByToken) else rows
        rows_NW = rows_NW if rows_NW.shape[0] == self.rows else rows_NW[: self.rows]
        return rows_NW if rows_NW.stride(1) == 1 else rows_NW.contiguous()


def _with_whole_ranks(problem: Problem) -> Problem:
    """LoRA factors as the product takes them: ranks of a multiple of 16 bytes, rows without gaps."""
    if problem.lora is None:
        return problem
    unit = 16 // problem.x_TH.dtype.itemsize
    factors: dict[str, Tensor] = {}
    for name, factor in problem.lora.tensors().items():
        missing = -factor.shape[1 if name.endswith("a") else 2] % unit
        if missing:
            factors[name] = F.pad(factor, (0, 0, 0, missing) if name.endswith("a") else (0, missing))
        else:
            apart = factor.stride(2) == 1 and factor.stride(1) >= factor.shape[2]
            whole = apart and factor.stride(1) % unit == 0 and place_of(factor) % 16 == 0
            factors[name] = factor if whole else factor.clone(memory_format=torch.contiguous_format)
    return problem._replace(lora=LoraFactors(**factors, scaling=problem.lora.scaling))


def _with_own_ranks(gradients: Gradients, lora: LoraFactors) -> dict[str, Tensor]:
    """The gradients of padded factors as those of the factors themselves, in their layout."""
    found: dict[str, Tensor] = {}
    for name, factor in lora.tensors().items():
        gradient = getattr(gradients, name)
        if gradient is not None and (gradient.shape != factor.shape or gradient.stride() != factor.stride()):
            found[name] = torch.empty_like(factor).copy_(gradient[:, : factor.shape[1], : factor.shape[2]])
    return found


def weight_gradient(grad_NO: Tensor, rows_NI: Tensor, offs_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Σ over each expert's rows of gradᵀ · row, in the stored layout of the weight."""
    if weight_EOI.stride(-1) != 1:  # stored as (E, I, O)
        return F.grouped_mm(rows_NI.t(), grad_NO, offs=offs_E).transpose(1, 2)
    return F.grouped_mm(grad_NO.t(), rows_NI, offs=offs_E)


def sum_per_expert(rows_NW: Tensor, offs_E: Tensor, scale_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sums the rows of each expert without atomics: one product with the one-hot matrix of the layout.

    In that product 0 · NaN would reach every expert: what is not finite is left out, and a second product tells whose
    sums it belongs to. Rows past the last expert's are uninitialised.
    """
    wide = torch.promote_types(rows_NW.dtype, torch.float32)
    experts = torch.arange(offs_E.shape[0], dtype=torch.int64, device=rows_NW.device)
    own_EN = experts[:, None] == expert_of_row(rows_NW.shape[0], offs_E)
    share_EN = own_EN.to(wide)
    if scale_N is not None:
        share_EN = torch.where(own_EN, scale_N.to(wide), share_EN)
    strange_NW = ~rows_NW.isfinite()
    total_EW = share_EN @ rows_NW.to(wide).masked_fill(strange_NW, 0)
    met_EW = own_EN.to(wide) @ strange_NW.to(wide)
    return total_EW.masked_fill_(met_EW > 0, float("nan")).to(dtype)


def expert_of_row(rows: int, offs_E: Tensor) -> Tensor:
    """Expert of each sorted row; E for rows past the last expert's."""
    row_N = torch.arange(rows, device=offs_E.device, dtype=torch.int32)
    return torch.searchsorted(offs_E, row_N, right=True)


def bias_of_row(bias_EW: Tensor, rows: int, offs_E: Tensor) -> Tensor:
    """Each sorted row's bias; rows past the last expert's get some bias or other, and are never read."""
    return bias_EW[expert_of_row(rows, offs_E).clamp_(max=offs_E.shape[0] - 1)]


BACKEND = GroupedBackend()
