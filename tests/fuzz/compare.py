"""The verdict: what a call gave against the truth, the output and each gradient by its name.

    faults(case, made, found)      # [] or lines such as "gate_up: off by 3.1e-02, at most 1.0e-02"

Relative L2 with the tolerances of `amoeba verify`; where that is not enough, also what rounding alone may do to this
very case (truth.rounding_noise). An expert without rows, a token without experts and a slot that belongs to nobody have
zeros, exactly. A NaN or an infinity in an input shows up in all that depends on it, and in nothing that has to do with
other experts and other tokens than those that met it.
"""

import torch
from torch import Tensor

from amoeba.backends.quantised_cpu import DECODE_ROWS
from amoeba.cpu.core import load_core, why_no_core
from amoeba.proof import conformance
from amoeba.proof.conformance import TOLERANCE

from .case import RECIPES, Case
from .tensors import Made
from .truth import rounding_noise, truth

# So many times the noise that a few draws showed may be in a result.
NOISE_MARGIN = 8.0
# Codes of e4m3 are off by a sixteenth at most; sums over many of them by less.
RECIPE_TOLERANCE = 0.08
# Of rows in 8 bits, as in tests/cpu/test_core_blocks.py.
ROWS_IN_8_BITS = 2e-2


def faults(case: Case, made: Made, found: dict[str, Tensor]) -> list[str]:
    exact = truth(case, made)
    if set(found) - set(exact):
        raise AssertionError(f"gradients of {set(found) - set(exact)} without a truth")
    lines, doubtful = [], {}
    for name, tensor in found.items():
        fault = _of_form(case, made, name, tensor, exact[name]) or _of_zeros(case, made, name, tensor)
        if fault:
            lines.append(f"{name}: {fault}")
            continue
        got, right = tensor.detach().cpu().double(), exact[name]
        if case.nan != "none":
            if name != "output" and (case.has_kink or case.kind == "relu2"):
                continue  # the slope of a NaN at a kink, and NaN times the slope 0, are anybody's convention
            lost = ~right.isfinite()
            hidden = lost & got.isfinite()
            if hidden.any():
                lines.append(f"{name}: {int(hidden.sum())} of {int(lost.sum())} that are not finite were lost")
            spread = torch.tensor(True) if _leaks(case) else _meets_nan(case, made, name)
            rest = ~(lost | (~got.isfinite() & spread))
            got, right = got[rest], right[rest]
        if not got.isfinite().all():
            lines.append(f"{name}: {int((~got.isfinite()).sum())} of {got.numel()} are not finite")
            continue
        distance, allowed = float((got - right).norm()), tolerance(case, name, tensor, found) * float(right.norm())
        if distance > allowed:
            doubtful[name] = distance, allowed
    if doubtful:
        noise = rounding_noise(case, made)
        doubtful = {name: pair for name, pair in doubtful.items() if not pair[0] <= NOISE_MARGIN * noise[name]}
    for name, (distance, allowed) in doubtful.items():
        size = float(exact[name][exact[name].isfinite()].norm())
        lines.append(f"{name}: off by {distance:.1e} of {size:.1e}, at most {allowed:.1e}")
    return lines


def tolerance(case: Case, name: str, tensor: Tensor, found: dict[str, Tensor]) -> float:
    """A gradient comes in the dtype of its tensor, which may hold less than what it was computed in."""
    if case.placement in RECIPES:
        return RECIPE_TOLERANCE
    if _in_whole_numbers(case, found):
        return ROWS_IN_8_BITS
    if not case.packed:
        return max(TOLERANCE[case.computes_in], TOLERANCE[tensor.dtype])
    return conformance.tolerance(case.placement, torch.bfloat16, name)


def _in_whole_numbers(case: Case, found: dict[str, Tensor]) -> bool:
    """Codes of e2m1 meet many rows so on a CPU with VNNI, where no gradient is taken (backends/quantised_cpu.py)."""
    served = case.device == "cpu" and case.backend in ("auto", "cpu") and case.tokens * case.top_k > DECODE_ROWS
    if not served or case.placement not in ("mxfp4-weights", "nvfp4-weights") or found.keys() != {"output"}:
        return False
    return why_no_core() is None and load_core().in_whole_numbers


def _leaks(case: Case) -> bool:
    """With AMX, torch's own bf16 product may write the NaN of one row into its neighbour (oneDNN, odd depths)."""
    return case.device == "cpu" and case.backend == "eager" and case.computes_in == torch.bfloat16


def _meets_nan(case: Case, made: Made, name: str) -> Tensor:
    """Where a gradient may be NaN without need, for the experts or tokens that met one: (E, 1, 1), (E, 1) or (T, 1)."""
    expert_TK = made.expert_TK.cpu()
    bad_E = torch.zeros(case.experts, dtype=torch.bool)
    for key, tensor in made.tensors.items():
        if key not in ("x", "weight"):
            bad_E |= (~tensor.detach().cpu().isfinite()).flatten(1).any(1)
    per_token = (made.tensors["x"].detach(), made.tensors["weight"].detach(), made.dy_TH)
    bad_T = torch.stack([(~tensor.cpu().isfinite()).any(1) for tensor in per_token]).any(0)
    owned_TK = (expert_TK >= 0) & (expert_TK < case.experts)
    met_TK = owned_TK & bad_E[expert_TK.long().where(owned_TK, 0)]
    if name == "output" and case.bad == "nan":
        return torch.tensor(False)
    if name in ("output", "x", "weight"):  # a clamp or a relu makes a number of an infinity, and none of NaN
        return (bad_T | met_TK.any(1))[:, None]
    bad_E[expert_TK[owned_TK & bad_T[:, None]].long()] = True
    return bad_E.view(-1, *[1] * (made.tensors[name].dim() - 1))


def _of_form(case: Case, made: Made, name: str, found: Tensor, right: Tensor) -> str | None:
    if name == "output":
        dtype = torch.bfloat16 if case.mode == "autocast" else made.tensors["x"].dtype
        device = made.tensors["x"].device
    else:
        dtype, device = made.tensors[name].dtype, made.tensors[name].device
    if found.shape == right.shape and found.dtype == dtype and found.device == device:
        return None
    return f"{found.dtype} {tuple(found.shape)} on {found.device} instead of {dtype} {tuple(right.shape)} on {device}"


def _of_zeros(case: Case, made: Made, name: str, found: Tensor) -> str | None:
    expert_TK = made.expert_TK.cpu()
    owned_TK = (expert_TK >= 0) & (expert_TK < case.experts)
    if name == "weight":
        nothing, what = ~owned_TK, "slot that belongs to nobody"
    elif name in ("output", "x"):
        nothing, what = ~owned_TK.any(1), "token without experts"
    else:
        busy = set(expert_TK[owned_TK].tolist())
        nothing, what = torch.tensor([e not in busy for e in range(case.experts)]), "expert without rows"
    if found.detach().cpu()[nothing].count_nonzero():  # NaN counts
        return f"not zero for a {what}"
    return None
