"""`collective`: torch's all_to_all, over gloo or NCCL, on any device.

The host has to know how many rows go where, so on a GPU each pass waits for it once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from amoeba.parallel.ranks import Ranks
from amoeba.parallel.transports.transport import Route, Transport


class Collective(Transport):
    name, summary = "collective", "torch's all_to_all, by gloo or NCCL"

    def why_not(self, ranks: Ranks, device: torch.device) -> str | None:
        if not dist.is_available():
            return "needs a torch that was built with torch.distributed"
        return None

    def send_rows(self, ranks: Ranks, route: Route, rows_TH: Tensor, what: str) -> Tensor:
        return ranks.exchange(rows_TH.index_select(0, route.token_S), route.sent, route.received, what)

    def return_rows(self, ranks: Ranks, route: Route, rows_RH: Tensor, what: str) -> Tensor:
        back_SH = ranks.exchange(rows_RH, route.received, route.sent, what)
        wide = torch.promote_types(rows_RH.dtype, torch.float32)
        total_TH = back_SH.new_zeros((route.num_tokens, rows_RH.shape[1]), dtype=wide)
        # a token occurs once in one rank's part: no two additions meet, and their order is that of the ranks
        parts = zip(back_SH.split(route.sent), route.token_S.split(route.sent), strict=True)
        for part_SH, token_S in parts:
            total_TH.index_add_(0, token_S, part_SH.to(wide))
        return total_TH.to(rows_RH.dtype)


TRANSPORT = Collective()
