"""Operators whose results for a row depend on that row alone: not on its batch, nor on its place in it.

    with ExactOperators():              # what torch is asked for inside has one order of summation
        logits_TV = model_part(x_TH)

Outside, torch picks another kernel, and so another order, for one row than for a hundred, and computes the end of a
buffer without vectors. Inside, on a CPU,

products      are summed by the C++ core in fp32, by one kernel for each layout of the weights
sums, norms   are added up by the core, one vector of a row after the other
exponentials  sigmoids and reciprocal roots are the core's; whatever else differs between vectors and single numbers
              goes through whole vectors, in pieces that one thread computes
top k         of equal numbers the first ones
attention     is two such products, with exact zeros where a query does not look: padding changes nothing

On a GPU products, sums and attention are those of `kernels.exact`, and torch computes single elements one by one.
Results are rounded to their dtype once. Backward is torch's. What is not known to be exact raises ValueError.

B rows · T tokens · L keys · Q query heads · G key and value heads · D of a head · E matrices ·
M rows, K summed, N columns of each
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.core import operators
from amoeba.core.errors import bad_value
from amoeba.core.operators import Operand
from amoeba.core.torch_internals import (
    TorchDispatchMode,
    dispatch_modes,
    enter_dispatch_mode,
    has_dispatch_mode,
    is_view,
    leave_dispatch_mode,
    only_dispatch_mode,
    tree_leaves,
    writes_to_arguments,
)
from amoeba.cpu.core import EXACT_FUNCTIONS, ExactFunction, load_core
from amoeba.cpu.pointers import place_of

PIECE = 1 << 14  # elements: torch gives no part of so few to another thread
WHOLE = 128  # a multiple of the vectors of every CPU, as torch unrolls its loops over them
ALIGNED = 64  # bytes
CHUNK = 1 << 24  # scores of attention at a time
QUERIES = 64  # at a time on a CPU: keys that none of them sees are left out
DTYPES = torch.float32, torch.bfloat16, torch.float16


def kernels_on(device: torch.device) -> Any:
    """`amoeba.kernels.exact` for a GPU; None where the C++ core computes."""
    if device.type != "cuda":
        return None
    from amoeba.kernels import exact

    return exact


def product(
    a_EMK: Tensor, b_EKN: Tensor, *, bias_N: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """a @ b + bias, summed in fp32 and rounded once. Zeros in a add nothing where b is contiguous along N."""
    for each in (a_EMK, b_EKN):
        if each.dtype not in DTYPES or each.device.type not in ("cpu", "cuda"):
            got = f"{each.dtype} on {each.device}"
            raise bad_value("exact mode", "fp32, bf16 or fp16 on a CPU or GPU", got, "convert or move the model")
    if (kernels := kernels_on(a_EMK.device)) is not None:
        return kernels.product(a_EMK, b_EKN, bias_N=bias_N, dtype=dtype)
    (count, rows, depth), columns = a_EMK.shape, b_EKN.shape[2]
    out = torch.empty(count * rows, columns, dtype=torch.float32, device=a_EMK.device)
    if depth == 0 or out.numel() == 0:
        out.zero_()
    else:
        offs_E = torch.arange(1, count + 1, dtype=torch.int32, device=out.device) * rows
        matrix = b_EKN.detach()
        matrix = matrix if matrix.dtype == torch.bfloat16 else matrix.float()
        matrix = matrix if 1 in matrix.stride()[1:] else matrix.contiguous()
        load_core().multiply_rows_exactly(offs_E, a_EMK.detach().reshape(count * rows, depth), matrix, out=out)
    out = out.view(count, rows, columns)
    return (out if bias_N is None else out + bias_N.float()).to(dtype)


def row_sum(x: Tensor) -> Tensor:
    """Over the last dimension, in fp32."""
    if (kernels := kernels_on(x.device)) is not None:
        return kernels.row_sum(x)
    x_ND = x.detach().float().reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()
    return load_core().row_sums(x_ND).view(x.shape[:-1])


def in_pieces(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """function(*given), a function of single elements, so that each is computed in a whole vector."""
    if given[0].is_cuda:  # computed one by one there
        return function(*given)
    shape = given[0].shape
    if any(each.shape != shape for each in given):
        shape = torch.broadcast_shapes(*(each.shape for each in given))
    count = shape.numel()
    padded = -(-count // WHOLE) * WHOLE
    flat = [(each if each.shape == shape else each.expand(shape)).reshape(-1) for each in given]
    if padded > count:
        flat = [torch.cat((each, each.new_zeros(padded - count))) for each in flat]
    flat = [each.clone() if place_of(each) % ALIGNED else each for each in flat]
    if 0 < padded <= PIECE:
        return function(*flat)[:count].view(shape)
    pieces = [function(*each) for each in zip(*(each.split(PIECE) for each in flat), strict=True)]
    if not pieces:
        return function(*flat).view(shape)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:count].view(shape)


def value(function: ExactFunction, x: Tensor) -> Tensor:
    """Of each element, in fp32 and rounded to the dtype of x."""
    if x.is_cuda:
        return _TORCH[function](x)
    return load_core().values(function, x.detach().float().contiguous()).to(x.dtype)


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "rsqrt": torch.rsqrt,
}


def log_softmax(x: Tensor) -> Tensor:
    """Over the last dimension, in fp32."""
    if (kernels := kernels_on(x.device)) is not None:
        return kernels.softmax(x, log=True)
    x = x.float() - x.float().amax(-1, keepdim=True)
    return x - in_pieces(torch.log, row_sum(value("exp", x)))[..., None]


# --- attention


def attention(
    q_BQTD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    seen_B1TL: Tensor,
    *,
    scale: float,
    sink_Q: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """y_BQTD. seen_B1TL: which keys each query sees; all others add exact zeros."""
    bounds = None if kernels_on(q_BQTD.device) is None else _bounds_of(seen_B1TL)
    with OUTSIDE:
        return _Attention.apply(q_BQTD, k_BGLD, v_BGLD, sink_Q, seen_B1TL, bounds, scale, softcap or 0.0)


def _bounds_of(seen_B1TL: Tensor) -> Tensor:
    """The layers of a pass have one mask, with which its bounds are kept."""
    from amoeba.kernels.exact_attention import seen_bounds

    version = -1 if seen_B1TL.is_inference() else seen_B1TL._version
    known, bounds = getattr(seen_B1TL, _BOUNDS, (None, None))
    if bounds is None or known != version or version < 0:
        bounds = seen_bounds(seen_B1TL)
        setattr(seen_B1TL, _BOUNDS, (version, bounds))
    return bounds


_BOUNDS = "_amoeba_bounds"


def _scores(
    multiply: Any, element: Any, q: Tensor, k: Tensor, sink: Tensor | None, seen: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """exp(score - largest) of (B, G, R, T, L), and what the sink adds to their sum. Written once for both passes."""
    groups, keys = k.shape[1:3]
    q = q.unflatten(1, (groups, -1))
    s = multiply(q.flatten(0, 1).flatten(1, 2), k.flatten(0, 1).mT).view(*q.shape[:-1], keys) * scale
    if softcap:
        s = element(torch.tanh, s / softcap) * softcap
    s = s.masked_fill(~seen[:, :, None], -torch.inf)
    most = s.detach().amax(-1, keepdim=True)
    of_sink = None if sink is None else sink.float().view(1, groups, -1, 1, 1)
    if of_sink is not None:
        most = torch.maximum(most, of_sink.detach())
    most = most.masked_fill(most == -torch.inf, 0)  # padding sees nothing
    exponential = torch.exp if element is _at_once else functools.partial(value, "exp")
    return exponential(s - most), None if of_sink is None else exponential(of_sink - most)


def _attended(
    multiply: Any, element: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seen: Tensor, *numbers: float
) -> Tensor:
    p, of_sink = _scores(multiply, element, q, k, sink, seen, *numbers)
    p_EML, v_ELD = p.flatten(0, 1).flatten(1, 2), v.flatten(0, 1)
    total = multiply(p_EML, v_ELD.new_ones(*v_ELD.shape[:2], 1)).view(*p.shape[:-1], 1)
    total = total if of_sink is None else total + of_sink
    y = multiply(p_EML, v_ELD).view(*p.shape[:-1], -1) / total.masked_fill(total == 0, 1)
    return y.flatten(1, 2)


def _parts(q: Tensor, k: Tensor, seen: Tensor) -> Iterator[tuple[slice, int]]:
    """Of the queries, and how many keys these need: on a CPU none behind the last that they see, which add zeros."""
    step = max(1, CHUNK // (q.shape[0] * q.shape[1] * k.shape[2]))
    if seen.is_cuda:  # where the host would wait for it
        yield from ((slice(first, first + step), k.shape[2]) for first in range(0, q.shape[2], step))
        return
    step = min(step, QUERIES)
    for first in range(0, q.shape[2], step):
        slots = seen[:, :, first : first + step].flatten(0, 2).any(0).nonzero()
        yield slice(first, first + step), int(slots[-1]) + 1 if len(slots) else 1


def _attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    seen: Tensor,
    bounds: Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    if bounds is not None:
        from amoeba.kernels import exact_attention

        return exact_attention.attention(q, k, v, sink, seen, bounds, scale, softcap)
    y = q.new_empty((*q.shape[:3], v.shape[-1]))
    v = v if v.stride(-1) == 1 else v.contiguous()  # zeros of what is not seen add nothing then
    for part, end in _parts(q, k, seen):
        some = q[:, :, part], k[:, :, :end], v[:, :, :end], sink, seen[:, :, part, :end]
        y[:, :, part] = _attended(product, in_pieces, *some, scale, softcap)
    return y, q.new_empty(0, dtype=torch.float32)


operators.define_forward(
    "exact_attention",
    (
        *(Operand(name, "Tensor") for name in ("q", "k", "v")),
        Operand("sink", "Tensor?"),
        Operand("seen", "Tensor"),
        Operand("bounds", "Tensor?"),
        Operand("scale", "float"),
        Operand("softcap", "float"),
    ),
    results=("y", "logsumexp"),
    forward=_attention_forward,
    fake=lambda q, k, v, *_: (
        q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
        if q.is_cuda
        else q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3] if q.is_cuda else 0, dtype=torch.float32),
    ),
)


class _Attention(operators.reverse_only("amoeba::exact_attention")):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        run = torch.ops.amoeba.exact_attention if has_dispatch_mode() else _attention_forward
        y, logsumexp = run(*given)
        of_kernels = given[5] is not None
        ctx.save_for_backward(*given[:5], *((given[5], y, logsumexp) if of_kernels else ()))
        ctx.numbers = given[6:]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *given, seen = saved = ctx.saved_tensors
        if len(saved) > 5:
            return _by_kernels(dy, *saved, *ctx.numbers)
        wide = [each.detach().float().requires_grad_() for each in given if each is not None]
        found = [torch.zeros_like(each) for each in wide]
        q, k, v = wide[:3]
        sink = wide[3] if len(wide) > 3 else None
        for part, end in _parts(q, k, seen):
            with torch.enable_grad():
                some = q[:, :, part], k[:, :, :end], v[:, :, :end], sink, seen[:, :, part, :end]
                y = _attended(torch.bmm, _at_once, *some, *ctx.numbers)
            for total, more in zip(found, torch.autograd.grad(y, wide, dy[:, :, part].float()), strict=True):
                total += more
        gradients = [total.to(each.dtype) for total, each in zip(found, given, strict=False)]
        return (*gradients, *[None] * (8 - len(gradients)))


def _by_kernels(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    seen: Tensor,
    bounds: Tensor,
    y: Tensor,
    logsumexp: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor | None, ...]:
    from amoeba.kernels.exact_attention_backward import attention_backward

    dq, dk, dv, delta = attention_backward(dy, q, k, v, y, logsumexp, seen, bounds, scale, softcap)
    dsink = None
    if sink is not None:
        p_BQT = torch.exp(sink.float()[None, :, None] - logsumexp)
        dsink = -(p_BQT * delta).sum((0, 2)).to(sink.dtype)
    return dq, dk, dv, dsink, None, None, None, None


def _at_once(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


# --- what torch is asked for

# operators of amoeba
OURS = {
    "exact",
    "quantised_exact",
    "exact_attention",
    "exact_rms_norm",
    "fused_router",
    "count_choices",
    "attach_balance",
}
# Of torch: what moves elements, compares them, or has one right result for each.
_SAME = frozenset(
    """
    _to_copy copy clone contiguous cat stack embedding index index_select index_put index_copy index_fill gather
    scatter masked_select take where masked_fill fill zero full_like zeros_like ones_like empty_like new_empty
    new_zeros new_ones new_full lift lift_fresh _unsafe_view constant_pad_nd repeat roll flip tril triu sort
    argsort max min amax amin argmax argmin any all eq ne lt le gt ge isnan isinf isfinite equal mul div neg abs
    sign maximum minimum clamp clamp_min clamp_max relu threshold logical_not logical_and logical_or floor ceil
    round trunc detach is_nonzero _local_scalar_dense item nll_loss_forward nll_loss2d_forward repeat_interleave
    unbind split select_scatter slice_scatter square
    """.split()  # noqa: SIM905
)


class ExactOperators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would wrap each call; nothing compiles inside

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _rule(function)(self, function, args, kwargs or {})


class _Outside:
    """`with OUTSIDE:` for operators of ours, which ExactOperators would pass on: it does not see what happens inside.
    Another mode that looks on does."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def __enter__(self) -> None:
        mode = only_dispatch_mode()
        left = isinstance(mode, ExactOperators)
        if left:
            leave_dispatch_mode()
        self._modes.append(mode if left else None)

    def __exit__(self, *_: Any) -> None:
        if (mode := self._modes.pop()) is not None:
            enter_dispatch_mode(mode)

    @property
    def _modes(self) -> list[TorchDispatchMode | None]:
        modes: list[TorchDispatchMode | None] | None = getattr(self._thread, "modes", None)
        if modes is None:
            modes = self._thread.modes = []
        return modes


OUTSIDE = _Outside()


def looks_on() -> bool:
    """Whether exact mode is on here."""
    return any(isinstance(mode, ExactOperators) for mode in dispatch_modes())


def _plain(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _by_elements(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    places = [place for place, each in enumerate(args) if isinstance(each, Tensor)]
    if not any(args[place].is_floating_point() for place in places):
        return function(*args, **kwargs)

    def run(*tensors: Tensor) -> Tensor:
        given = list(args)
        for place, each in zip(places, tensors, strict=True):
            given[place] = each
        return function(*given, **kwargs)

    return in_pieces(run, *(args[place] for place in places))


def _summed(x: Tensor, dims: Sequence[int] | None, keepdim: bool, dtype: torch.dtype | None, mean: bool) -> Tensor:
    dims = sorted(dim % x.dim() for dim in (dims or range(x.dim())))
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    total = row_sum(x.permute(*rest, *dims).flatten(len(rest)) if dims else x[..., None])
    if mean:
        total = total / max(1, x.numel() // max(1, total.numel()))
    if keepdim:
        total = total.reshape([1 if dim in dims else size for dim, size in enumerate(x.shape)])
    return total.to(dtype or x.dtype)


def _sum(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, mean: bool = False
) -> Tensor:
    if not x.is_floating_point():
        return torch.mean(x, dim, keepdim, dtype=dtype) if mean else torch.sum(x, dim, keepdim, dtype=dtype)
    return _summed(x, [dim] if isinstance(dim, int) else dim, keepdim, dtype, mean)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return product(a[None], b[None], dtype=a.dtype)[0]


def _added(x: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta x + alpha a b; the sum is rounded once."""
    batch = a.dim() == 3
    if x.shape == b.shape[-1:] and alpha == beta == 1 and not batch and x.stride() == (1,):
        return product(a[None], b[None], bias_N=x.detach(), dtype=a.dtype)[0]
    total = product(a if batch else a[None], b if batch else b[None])
    total = (total if batch else total[0]) * alpha
    return (total + x.float() * beta).to(a.dtype)


def _softmax(x: Tensor, dim: int, to_float: bool = False, *, log: bool = False) -> Tensor:
    last = x.movedim(dim, -1)
    if log:
        found = log_softmax(last)
    elif (kernels := kernels_on(x.device)) is not None:
        found = kernels.softmax(last)
    else:
        weight = value("exp", last.float() - last.float().amax(-1, keepdim=True))
        found = weight / row_sum(weight)[..., None]
    return found.movedim(-1, dim).to(torch.float32 if to_float else x.dtype)


def _norm(
    x: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if ord != 2:
        raise bad_value("exact mode", "norms of order 2", ord, "this model cannot be exact")
    return (
        _summed(x.float().square(), [dim] if isinstance(dim, int) else dim, keepdim, None, False)
        .sqrt()
        .to(dtype or x.dtype)
    )


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    mean = _summed(x.float(), dims, True, None, True)
    scale = 1 / (_summed((x.float() - mean).square(), dims, True, None, True) + eps).sqrt()
    y = (x.float() - mean) * scale
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype), mean, scale


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = 1 / (_summed(x.float().square(), dims, True, None, True) + eps).sqrt()
    y = x.float() * scale
    return (y if weight is None else y * weight.float()).to(x.dtype), scale


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    most = x.float().amax(dim, keepdim=True)
    weight = value("exp", x.float() - most)
    total = in_pieces(torch.log, _summed(weight, [dim] if isinstance(dim, int) else dim, True, None, False)) + most
    return (total if keepdim else total.squeeze(dim)).to(x.dtype)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    kernels = kernels_on(x.device)
    if kernels is not None and largest and kernels.why_not_top_k(x, k, dim) is None:
        return kernels.top_k(x, k)
    values, places = x.sort(dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


def _with_alpha(sign: int) -> Callable[..., Tensor]:
    def run(x: Tensor, y: Any, *, alpha: float = 1) -> Tensor:
        factor = sign * alpha
        return torch.add(x, y) if factor == 1 else torch.sub(x, y) if factor == -1 else torch.add(x, y * factor)

    return run


_RULES: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "bmm": lambda a, b: product(a, b, dtype=a.dtype),
    "mv": lambda a, b: _mm(a, b[:, None])[:, 0],
    "dot": lambda a, b: _mm(a[None], b[:, None])[0, 0],
    "addmm": _added,
    "baddbmm": _added,
    "addmv": lambda x, a, b, **scales: _added(x.view(-1, 1), a, b[:, None], **scales)[:, 0],
    "sum": _sum,
    "mean": functools.partial(_sum, mean=True),
    "_softmax": _softmax,
    "_log_softmax": functools.partial(_softmax, log=True),
    "logsumexp": _logsumexp,
    "linalg_vector_norm": _norm,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    **{name: functools.partial(value, name) for name in EXACT_FUNCTIONS},
    "topk": _topk,
    "add": _with_alpha(1),
    "sub": _with_alpha(-1),
}


@functools.cache
def _rule(function: Any) -> Callable[..., Any]:
    """What computes an operator of torch instead."""
    space, name = function._schema.name.split("::")
    if space == "amoeba":
        return _plain if name in OURS else _integers_alone
    writes = writes_to_arguments(function)
    in_place = writes and name.endswith("_")
    base = name.rstrip("_") if in_place else name
    if space != "aten" or (writes and not in_place):
        return _integers_alone
    if base in _RULES:
        found = _by_rule(_RULES[base])
    elif base in _SAME or (is_view(function) and not writes):
        return _plain
    elif torch.Tag.pointwise in function.tags:
        found = _by_elements
    elif torch.Tag.nondeterministic_seeded in function.tags or base in ("bernoulli", "native_dropout"):
        return _random
    else:
        return _decomposed
    if not in_place:
        return found
    return lambda mode, function, args, kwargs: args[0].copy_(found(mode, function, args, kwargs))


def _by_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda mode, function, args, kwargs: rule(*args, **kwargs)


def _decomposed(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    with mode:
        found = function.decompose(*args, **kwargs)
    return _integers_alone(mode, function, args, kwargs) if found is NotImplemented else found


def _integers_alone(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    if not any(isinstance(each, Tensor) and each.is_floating_point() for each in tree_leaves((args, kwargs))):
        return function(*args, **kwargs)
    expected, remedy = "operators that compute each row by itself", "this model cannot be exact; leave exact mode off"
    raise bad_value("exact mode", expected, function._schema.name, remedy)


def _random(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    remedy = "set its dropout and jitter to 0, or call model.eval()"
    raise bad_value("exact mode", "no random numbers in the model", function._schema.name, remedy)
