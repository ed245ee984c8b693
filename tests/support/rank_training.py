"""Training that tests have the processes of a group do, as in `rank_jobs`.

T tokens · K experts per token · E experts · H hidden · I intermediate
"""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from amoeba import ExpertWeights, Routing, experts
from amoeba.parallel import Owners, Ranks, ShardedExperts, own_parameter, shard_experts
from amoeba.parallel.mesh import make_mesh
from amoeba.parallel.processes import first_processes
from amoeba.parallel.sharded_backend import RANKS
from amoeba.parallel.shards import is_shard, local_part
from rank_jobs import E, H, I


def train_a_model(
    rank: int, count: int, steps: int, family: str = "qwen3_moe", precision: str = "bf16", placed_first: bool = False
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Losses of the global batch and norms of its gradient; the parameters that all ranks have, afterwards."""
    import amoeba
    from amoeba.parallel import add_up_gradients, clip_gradients
    from tiny_models import build

    model = build(family).train()
    if not placed_first:
        amoeba.set_precision(model, precision)
    if count > 1:
        ranks = Ranks(first_processes(count))
        make = functools.partial(shard_experts, ranks=ranks)
        amoeba.register_placement(replace(RANKS, name="these ranks", make=make))
        amoeba.place_experts(model, "these ranks" if count < dist.get_world_size() else "ranks")
    if placed_first:
        amoeba.set_precision(model, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    history = []
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, (4, 12), generator=generator)
        mine = ids.chunk(count)[rank]
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss / count
        loss.backward()
        if count > 1:
            add_up_gradients(model.parameters(), ranks)
            norm = clip_gradients(model.parameters(), 1.0, ranks)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach() if count == 1 else ranks.add_up(loss.detach(), "losses")
        history.append((whole.item(), norm.item()))
    shared = {name: p.detach() for name, p in model.named_parameters() if "experts" not in name}
    return history, shared


def replayed(rank: int, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of the global batch and gradients of what all ranks have, with experts that no router would choose."""
    import amoeba
    from amoeba.parallel import add_up_gradients
    from amoeba.replay import RoutingRecord, replaying
    from tiny_models import EXPERTS, LAYERS, build

    model = build("qwen3_moe").train()
    model.gradient_checkpointing_enable()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, model.config.vocab_size, (4, 12), generator=generator)
    experts_BSLK = torch.rand(4, 12, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :2]
    if count > 1:
        ranks = Ranks(first_processes(count))
        make = functools.partial(shard_experts, ranks=ranks)
        amoeba.register_placement(replace(RANKS, name="these ranks", make=make))
        amoeba.place_experts(model, "these ranks")
    mine = ids.chunk(count)[rank]
    records = [RoutingRecord(*each) for each in zip(mine, experts_BSLK.chunk(count)[rank], strict=True)]
    with replaying(model, records, mine):
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss / count
        loss.backward()
    if count > 1:
        add_up_gradients(model.parameters(), ranks)
        loss = ranks.add_up(loss.detach(), "losses")
    shared = {name: p.grad for name, p in model.named_parameters() if "experts" not in name}
    return loss.item(), shared


def fully_sharded(rank: int) -> list[tuple[list[float], float, float]]:
    """Of two by two ranks: two groups, in each of which experts are over two ranks, whose shares FSDP2 shards over the
    groups. Errors of gradients against one process with all tokens, and the norms of both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from amoeba.parallel import clip_gradients

    mesh, every = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep")), init_device_mesh("cpu", (4,))
    ep = Ranks(mesh["ep"].get_group(), 30.0)
    whole, layer, owners = RoutedLayer(), RoutedLayer(), Owners.even(E, 2)
    for name in ("gate_up", "down"):
        share = owners.take(getattr(whole.experts, name).detach(), ep.rank).clone()
        setattr(layer.experts, name, own_parameter(share))
    layer.experts.place = lambda local: ShardedExperts(local, owners, ep)
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    fully_shard(layer, mesh=every)
    for module in (layer, layer.experts):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    x = torch.randn(4, 7, H, generator=torch.Generator().manual_seed(5))
    results = []
    for _ in range(2):  # the second time the parameters have been sharded again
        for model, given in ((whole, x.reshape(-1, H)), (layer, x[rank])):
            model.zero_grad()
            (model(given).square().sum() / x.numel()).backward()
        expected = {"router.weight": whole.router.weight.grad}
        for name in ("gate_up", "down"):
            expected[f"experts.{name}"] = owners.take(getattr(whole.experts, name).grad, ep.rank)
        errors = []
        for name, parameter in layer.named_parameters():
            found = parameter.grad.full_tensor()
            errors.append(((found - expected[name]).norm() / expected[name].norm()).item())
        norm = clip_gradients(layer.parameters(), 1.0, Ranks(deadline=30.0)).item()
        results.append((errors, norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0).item()))
    return results


def train_fully_sharded(rank: int, steps: int, family: str, precision: str = "bf16") -> list[tuple[float, float]]:
    """`train_a_model` over two by two ranks: experts placed over two, their shares and all else sharded by FSDP2."""
    from amoeba.integrations.own_tensors import sharded_modules
    from amoeba.integrations.precision import set_precision
    from amoeba.jobs.sharded_model import shard_model
    from amoeba.jobs.train.trainer import shard_fully
    from amoeba.parallel import clip_gradients
    from tiny_models import build

    model, ranks = build(family).train(), Ranks(deadline=30.0)
    mesh = make_mesh(ranks, 2, "fsdp", torch.device("cpu"))
    numbers = sum(parameter.numel() for parameter in model.parameters())
    shard_model(model, mesh.experts)
    set_precision(model, precision)
    shard_fully(model, mesh)
    held = [t for _, placed in sharded_modules(model).values() for t in placed.tensors() if t is not None]
    assert all(is_shard(tensor) for tensor in held)  # and not still all of a share
    here = torch.tensor(sum(local_part(parameter).numel() for parameter in model.parameters()))
    assert ranks.add_up(here, "numbers") == numbers  # each of them on one rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    history = []
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, (4, 12), generator=generator)
        mine = ids.chunk(4)[rank]
        optimizer.zero_grad()
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss / 4
        loss.backward()
        norm = clip_gradients(model.parameters(), 1.0, ranks)
        optimizer.step()
        history.append((ranks.add_up(loss.detach(), "losses").item(), norm.item()))
    return history


class RoutedLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = torch.nn.Linear(H, E, bias=False), Weights()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        weight_TK, expert_TK = self.router(x_TH).softmax(-1).topk(2)
        return self.experts(x_TH, Routing(expert_TK, weight_TK))


class Weights(torch.nn.Module):
    """Makes its kind of weights of the parameters that it has in each pass: FSDP2 puts others in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = torch.nn.Parameter(torch.randn(E, 2 * I, H)), torch.nn.Parameter(torch.randn(E, H, I))
        self.place: Any = lambda local: local

    def forward(self, x_TH: torch.Tensor, routing: Routing) -> torch.Tensor:
        return experts(x_TH, routing, self.place(ExpertWeights(self.gate_up, self.down)))
