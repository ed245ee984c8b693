"""Variants of Hopper's products, chosen by their sizes: the same bits on a GPU; elsewhere which one, and registers.

T tokens · K experts per token · N = T·K routed rows · E experts · H hidden · I intermediate · J = 2I
"""

import math

import pytest
import torch
from torch import Tensor

from amoeba.core.config import Activation
from amoeba.core.layout import build_layout
from amoeba.kernels.hopper import gemm
from amoeba.kernels.hopper.tile_order import BY_COLUMNS, FEW_ROWS, TALL

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
COUNTS = (0, 2, 64, 65, 127, 128, 129, 300, 0, 1)
K = 2


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a GPU of compute capability 9.x")
@pytest.mark.parametrize("order", [None, BY_COLUMNS, 2, TALL])
@pytest.mark.parametrize(("hidden", "inner"), [(512, 256), (768, 512), (320, 192), (320, 320)])
def test_each_variant_has_the_bits_of_the_plain_one(order, hidden, inner, device, monkeypatch):
    """order: of tiles, where it is not what their bytes ask for."""
    with monkeypatch.context() as patch:
        patch.setattr(gemm, "_chosen", lambda *sizes: {})
        plain = products(hidden, inner, device)
    if order is not None:
        monkeypatch.setattr(gemm, "order_of_product", lambda *sizes: order)
        monkeypatch.setattr(gemm, "KEPT_BYTES", 0)  # so that programs wait for one another
    for programs, block_m in ((None, gemm.BLOCK_M), (None, FEW_ROWS), (3, gemm.BLOCK_M), (3, FEW_ROWS)):
        if programs is not None:
            monkeypatch.setattr(gemm, "programs", lambda device: 3)
        found = products(hidden, inner, device, block_m)
        for name, one in plain.items():
            assert torch.equal(one.view(torch.int16), found[name].view(torch.int16)), (name, block_m)


def products(hidden: int, inner: int, device: torch.device, block_m: int = gemm.BLOCK_M) -> dict[str, Tensor]:
    """What a layer's products write, NaN where they write nothing."""
    from amoeba.kernels.hopper.gemm import multiply, tile_table, up

    owner_N = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    shuffled = owner_N[torch.randperm(len(owner_N), generator=torch.Generator().manual_seed(3))]
    layout = build_layout(shuffled.view(-1, K).to(device), len(COUNTS))
    order_N, offs_E, rows = layout.order_N.int(), layout.offs_E.int(), len(owner_N)
    table = tile_table(offs_E, rows, block_m=block_m)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        return (drawn * shape[-1] ** -0.5).to(device, torch.bfloat16)

    def unwritten(width: int) -> Tensor:
        return torch.full((rows + 64, width), math.nan, dtype=torch.bfloat16, device=device)

    x_TH, dh_NJ = normal(rows // K, hidden) * 9, normal(rows, 2 * inner)
    gate_up_EJH, down_EHI = normal(len(COUNTS), 2 * inner, hidden), normal(len(COUNTS), hidden, inner)
    made = {name: unwritten(width) for name, width in (("h", 2 * inner), ("a", inner), ("y", hidden), ("da", inner))}
    made |= {"dx": unwritten(hidden), "a alone": unwritten(inner)}
    silu = Activation()
    tall: dict[str, int] = {"block_m": block_m}
    up(x_TH, order_N, K, gate_up_EJH, table, silu, made["a"][:rows], h_NJ=made["h"][:rows], **tall)
    up(x_TH, order_N, K, gate_up_EJH, table, silu, made["a alone"][:rows], **tall)
    multiply(made["a"][:rows], down_EHI, table, made["y"][:rows], **tall)
    multiply(x_TH, down_EHI.transpose(1, 2), table, made["da"][:rows], order_N=order_N, top_k=K, **tall)
    multiply(dh_NJ, gate_up_EJH.transpose(1, 2), table, made["dx"][:rows], **tall)
    return made
