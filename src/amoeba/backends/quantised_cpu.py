"""`cpu` for quantised experts: the C++ core reads eight or four bits per number and dequantises them itself.

T tokens · K experts per token · N = T·K routed rows · E experts

Few rows without gradients are decoded from the codes where they lie: sums and scales in fp32, no weight is rounded.
All else is `cpu_fused` in bf16 where the CPU multiplies it: a training step with LoRA factors at Qwen3-30B's sizes,
512 tokens, takes 291 ms so, and 1006 by torch's products (ten cores of a Xeon with AMX, 2026-11-17). Elsewhere one
expert after the other is dequantised, as in `eager` and to the same bits, but by the core, and so are the products
where they are computed in fp32. With VNNI in 512 bits e2m1 and ggml's blocks are multiplied in whole numbers where no
gradient is taken, rows in 8 bits with a scale for each 32 columns: 88 to 119 G products a second and core at 32 rows an
expert. With rows in 16 bits it was 43 to 73, and a third of that with dequantised experts (Xeon without bf16 that
others used, 2026-11-19). The error of a layer is then 1 %, as llama.cpp has it; few rows and gradients are not
rounded so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amoeba.backends import cpu, cpu_decode, read_quantised
from amoeba.backends.backend import Request
from amoeba.backends.cpu import CoreGroups, CoreRows
from amoeba.backends.torch_rows import Groups, TorchRows
from amoeba.core.problem import Problem, Save
from amoeba.cpu.core import load_core, why_no_core
from amoeba.cpu.pointers import CPU
from amoeba.precision.quantised_experts import QuantisedExperts, ReadInBlocks
from amoeba.system.cpu_features import compute_dtype

# Up to this many routed rows in any routing, and up to this many per visited expert, a pass without gradients
# decodes. Decoding, sorting and `eager`, ms, in fp32, by rows per expert (Neoverse-N1, two cores that others
# used, too, by turns, 2026-11-17):
#                          1               2               4               8               16
#   H=512 I=256 E=32       4.2/19/85       6.8/25/236      12/29/434       22/33/346       41/43/73
#   H=2048 I=768 E=16      33/139/376      52/168/521      98/201/860      188/234/646     355/340/544
# and of MXFP4 later that day, with neighbours again:
#   H=512 I=256 E=32       2.5/26/55       3.2/25/         4.7/26/         8.7/28/63       17/33/
#   H=2048 I=768 E=16      32/159/575      69/196/         90/142/         145/191/1130    302/298/
# An expert that gets all rows takes as long as 15 groups of four rows to be dequantised by torch.
DECODE_ROWS = 64
DECODE_ROWS_PER_EXPERT = 8


class QuantisedCpuBackend(cpu.CpuBackend):
    summary, kinds = "the C++ core, which reads quantised weights", (QuantisedExperts,)
    operator_name = "quantised_cpu"

    def why_not(self, request: Request) -> str | None:
        dtype = request.weights.dtype
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the C++ core takes fp32 and bf16; x is {dtype}"
        return read_quantised.why_not(request.weights) or why_no_core()

    def decodes(self, problem: Problem) -> bool:
        most, experts = DECODE_ROWS, problem.weights.num_experts
        if most < problem.rows <= DECODE_ROWS_PER_EXPERT * experts:
            visited = {e for e in problem.expert_TK.flatten().tolist() if 0 <= e < experts}
            most = DECODE_ROWS_PER_EXPERT * len(visited)
        return cpu_decode.serves(problem, most)

    def sorted_rows(self, problem: Problem, save: Save = "h") -> tuple[Problem, type[TorchRows]]:
        weights = read_quantised.read_by_core(problem.weights)
        codes = (read_quantised.scaled_codes(each) for each in (weights.gate_up_EJH, weights.down_EHI))
        whole = save == "nothing" and all(map(load_core().multiplies_whole, codes))
        return problem._replace(weights=weights), WholeRows if whole else CodedRows


class CodedRows(CoreRows):
    @staticmethod
    def groups_of(offs_E: Tensor, rows: int) -> Groups:
        return CodedGroups(offs_E, rows)


class CodedGroups(CoreGroups):
    """Products with one dequantised expert after the other: by the core in fp32, by torch where it multiplies bf16."""

    def multiply_rows(
        self,
        rows: Tensor,
        matrix_EIO: Tensor | ReadInBlocks,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        if isinstance(matrix_EIO, Tensor):  # a factor of LoRA
            return super().multiply_rows(rows, matrix_EIO, out=out, bias_EO=bias_EO, index_N=index_N)
        if compute_dtype(rows.dtype, rows.device) != torch.float32:
            return Groups.multiply_rows(self, rows, matrix_EIO, out=out, bias_EO=bias_EO, index_N=index_N)  # type: ignore[arg-type]
        core, rows_NI = load_core(), rows if index_N is None else rows.index_select(0, index_N)
        for e, part, target in self.each(rows_NI, out):
            offs = torch.full((1,), part.shape[0], dtype=torch.int32, device=CPU)
            bias = None if bias_EO is None else bias_EO[e : e + 1].to(torch.float32).contiguous()
            wide = target.dtype == torch.float32
            product = target if wide else torch.empty(target.shape, dtype=torch.float32, device=CPU)
            part = part.to(torch.float32).contiguous()
            core.multiply_rows(offs, part, matrix_EIO[e][None], out=product, bias_EO=bias)
            if not wide:
                target.copy_(product)
        return None


class WholeRows(CoreRows):
    """Of passes without gradients: rows meet codes in whole numbers, without a dequantised expert."""

    @staticmethod
    def groups_of(offs_E: Tensor, rows: int) -> Groups:
        return WholeGroups(offs_E, rows)


class WholeGroups(CoreGroups):
    def multiply_rows(
        self,
        rows: Tensor,
        matrix_EIO: Tensor | ReadInBlocks,
        *,
        out: Tensor,
        bias_EO: Tensor | None = None,
        index_N: Tensor | None = None,
    ) -> None:
        if isinstance(matrix_EIO, Tensor):  # a factor of LoRA
            return super().multiply_rows(rows, matrix_EIO, out=out, bias_EO=bias_EO, index_N=index_N)
        bias = None if bias_EO is None else bias_EO.to(torch.float32).contiguous()
        wide = out.dtype == torch.float32
        product = out if wide else torch.empty(out.shape, dtype=torch.float32, device=CPU)
        rows, codes = rows.to(torch.float32).contiguous(), read_quantised.scaled_codes(matrix_EIO)
        load_core().multiply_whole(self.offs_E, rows, codes, out=product, bias_EO=bias, index_N=index_N)
        if not wide:
            out.copy_(product)
        return None


BACKEND = QuantisedCpuBackend()
