"""What each task computes, on fp64 tensors; nothing of it is shared with kernels or reference.

T tokens · K experts per token · E experts · H hidden · I intermediate · J = 2I · W ranks

    computation = Computation(graph, layer, tokens_W, epoch)
    values = [memory[region] for region in computation.reads(task)]
    results = computation.compute(task, values)                      # one for each of computation.writes(task)

The layer is SwiGLU, its router softmax, top-k, renormalised. What forward saved (x of the rows' senders, h, routing
weights) is there from the beginning; all else a task gets through the regions that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amoeba.tasks.graph import Graph, Kind, Task


class Region(NamedTuple):
    """Memory that is written by one task of a pass. heap: of two cells, which the passes use in turn."""

    rank: int
    name: str
    at: tuple[int, ...]
    heap: bool = False


_ONE_RESULT = {
    Kind.DOWN: "da",
    Kind.ROUTER_WEIGHTS: "d_gate",
    Kind.DOWN_BIAS: "d_down_bias",
    Kind.UP_BIAS: "d_gate_up_bias",
}


class Regions:
    """Of the tasks of one rank in one pass."""

    def __init__(self, graph: Graph, epoch: int) -> None:
        self.graph, self.rank, self.epoch = graph, graph.rank, epoch

    def reads(self, task: Task) -> list[Region]:
        graph, (kind, item, part) = self.graph, task
        if kind == Kind.DOWN:
            return self._dy_cells(item)
        if kind == Kind.ACTIVATE:
            of_bias = self._dy_cells(item) if graph.biases else []
            return [self._here("da", item, column) for column in range(graph.down_tiles)] + of_bias
        if kind == Kind.UP:
            return [self._here("dh", item)]
        if kind == Kind.DOWN_WEIGHTS:
            tiles = range(*graph.tile_range(item))
            return [self._here("scaled_a", tile) for tile in tiles] + [
                cell for tile in tiles for cell in self._dy_cells(tile)
            ]
        if kind == Kind.DOWN_BIAS:
            return [cell for tile in range(*graph.tile_range(item)) for cell in self._dy_cells(tile)]
        if kind in (Kind.UP_WEIGHTS, Kind.UP_BIAS):
            return [self._here("dh", tile) for tile in range(*graph.tile_range(item))]
        if kind == Kind.RETURN:
            return [region for tile in graph.tiles_returned(item, part) for region in self._dx(self.rank, tile)]
        if kind == Kind.COMBINE:
            found = [region for owner, tile in graph.tiles_combined(item) for region in self._dx(owner, tile)]
            for owner, block in graph.blocks_combined(item):
                found += [self._cell(self.rank, name, owner, block) for name in ("dx sums", "ds back")]
            return found
        if kind == Kind.ROUTER:
            return [self._here("dx of experts", item), self._here("d_weight", item)]
        if kind == Kind.ROUTER_WEIGHTS:
            return [self._here("d_logits", block) for block in range(graph.token_blocks)]
        return []

    def writes(self, task: Task) -> list[Region]:
        kind, item, part = task
        if kind == Kind.SEND:
            return [self._cell(item, "dy", self.rank, part)]
        if kind == Kind.ACTIVATE:
            return [self._here("dh", item), self._here("scaled_a", item), self._cell(self.rank, "ds", item)]
        if kind == Kind.UP:
            return [self._cell(self.rank, "dx", item, part)]
        if kind == Kind.RETURN:
            return [self._cell(item, name, self.rank, part) for name in ("dx sums", "ds back")]
        if kind == Kind.COMBINE:
            return [self._here("dx of experts", item), self._here("d_weight", item)]
        if kind == Kind.ROUTER:
            return [self._here("dx", item), self._here("d_logits", item)]
        if kind in (Kind.DOWN_WEIGHTS, Kind.UP_WEIGHTS):
            name = "d_down" if kind == Kind.DOWN_WEIGHTS else "d_gate_up"
            return [self._here(name, item, tile) for tile in self.graph.bundled(task)]
        return [self._here(_ONE_RESULT[kind], item, part)]

    def _here(self, name: str, *at: int) -> Region:
        return Region(self.rank, name, at)

    def _cell(self, rank: int, name: str, *at: int) -> Region:
        return Region(rank, name, (self.epoch % 2, *at), heap=True)

    def _dx(self, owner: int, tile: int) -> list[Region]:
        columns = [self._cell(owner, "dx", tile, column) for column in range(self.graph.up_tiles)]
        return [*columns, self._cell(owner, "ds", tile)]

    def _dy_cells(self, tile: int) -> list[Region]:
        return [self._cell(self.rank, "dy", *cell) for cell in self.graph.sources(tile)]


class OrderOnly(Regions):
    """Tasks that wait for each other but touch no memory: for the order alone."""

    def reads(self, task: Task) -> list[Region]:
        return []

    def writes(self, task: Task) -> list[Region]:
        return []

    def compute(self, task: Task, values: list[Tensor]) -> Sequence[Tensor]:
        return []


class Layer(NamedTuple):
    gate_up_EJH: Tensor
    down_EHI: Tensor
    gate_EH: Tensor
    owner_E: tuple[int, ...]
    gate_up_bias_EJ: Tensor | None = None
    down_bias_EH: Tensor | None = None


class Tokens(NamedTuple):
    """What one rank comes with. expert_TK: chosen_TK, with -1 where a slot was dropped; weight_TK: of chosen_TK."""

    x_TH: Tensor
    dy_TH: Tensor
    chosen_TK: Tensor
    expert_TK: Tensor
    weight_TK: Tensor


class Computation(Regions):
    """The tasks of one rank in one pass."""

    def __init__(self, graph: Graph, layer: Layer, tokens_W: Sequence[Tokens], epoch: int) -> None:
        super().__init__(graph, epoch)
        self.tokens = tokens_W[graph.rank]
        rows = graph.rows
        owned = [expert for expert, owner in enumerate(layer.owner_E) if owner == graph.rank]
        self.gate_up_EJH, self.down_EHI, self.gate_EH = layer.gate_up_EJH[owned], layer.down_EHI[owned], layer.gate_EH
        named = [(*rows.received[row.received], row.slot) for row in rows.rows]
        hidden = self.tokens.x_TH.shape[1]
        self.x_NH = _stacked([tokens_W[source].x_TH[token] for source, token, _ in named], (0, hidden))
        self.weight_N = _stacked([tokens_W[source].weight_TK[token, slot] for source, token, slot in named], (0,))
        products = [self.x_NH[tile.first : tile.end] @ self.gate_up_EJH[tile.expert].T for tile in rows.tiles]
        self.down_bias_EH = None
        if graph.biases:
            assert layer.gate_up_bias_EJ is not None and layer.down_bias_EH is not None
            bias_EJ, self.down_bias_EH = layer.gate_up_bias_EJ[owned], layer.down_bias_EH[owned]
            products = [h + bias_EJ[tile.expert] for h, tile in zip(products, rows.tiles, strict=True)]
        self.h_tiles = products  # as forward saved it, a row tile each
        self._compute: dict[Kind, Callable[[Task, Sequence[Tensor]], tuple[Tensor, ...]]] = {
            Kind.SEND: self._send,
            Kind.DOWN: self._down,
            Kind.ACTIVATE: self._activate,
            Kind.UP: self._up,
            Kind.DOWN_WEIGHTS: self._down_weights,
            Kind.UP_WEIGHTS: self._up_weights,
            Kind.RETURN: self._return,
            Kind.COMBINE: self._combine,
            Kind.ROUTER: self._router,
            Kind.ROUTER_WEIGHTS: self._router_weights,
            Kind.DOWN_BIAS: self._down_bias,
            Kind.UP_BIAS: self._up_bias,
        }

    def compute(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self._compute[task.kind](task, values)

    # --- one method for each kind ---

    def _send(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        block = self.graph.tiling.sent
        tokens = self.graph.rows.sent[task.item][task.part * block : (task.part + 1) * block]
        return (self.tokens.dy_TH[list(tokens)],)

    def _dy(self, tile: int, cells: Sequence[Tensor]) -> Tensor:
        """dy of a tile's rows, from own tokens and from the cells that `_dy_cells` names."""
        graph, rows = self.graph, self.graph.rows
        cell_of = dict(zip(graph.sources(tile), cells, strict=True))
        found = []
        for row in range(rows.tiles[tile].first, rows.tiles[tile].end):
            received = rows.rows[row].received
            source, token = rows.received[received]
            if source == self.rank:
                found.append(self.tokens.dy_TH[token])
            else:
                block, within = divmod(received - rows.first_from[source], graph.tiling.sent)
                found.append(cell_of[source, block][within])
        return torch.stack(found)

    def _down(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        expert = self.graph.rows.tiles[task.item].expert
        return (self._dy(task.item, values) @ self.down_EHI[expert, :, self._columns(task)],)

    def _activate(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        expert, first, end = self.graph.rows.tiles[task.item]
        gate, up = self.h_tiles[task.item].chunk(2, dim=1)
        columns, cells = values[: self.graph.down_tiles], values[self.graph.down_tiles :]
        da, scale = torch.cat(list(columns), dim=1), self.weight_N[first:end, None]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        a = silu * up
        dgate = scale * da * up * (sigmoid + silu * (1 - sigmoid))
        dup = scale * da * silu
        ds = (da * a).sum(1)
        if self.down_bias_EH is not None:
            ds = ds + self._dy(task.item, cells) @ self.down_bias_EH[expert]
        return torch.cat((dgate, dup), dim=1), scale * a, ds

    def _up(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        expert = self.graph.rows.tiles[task.item].expert
        return (values[0] @ self.gate_up_EJH[expert, :, self._columns(task)],)

    def _down_weights(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        intermediate = self.down_EHI.shape[2]
        tiles = range(*self.graph.tile_range(task.item))
        scaled_a, dy = values[: len(tiles)], self._dy_of_tiles(tiles, values[len(tiles) :])
        at = self._matrix_tiles(task, intermediate)
        return tuple(_product(dy, scaled_a, height, width, self.down_EHI) for height, width in at)

    def _dy_of_tiles(self, tiles: range, values: Sequence[Tensor]) -> list[Tensor]:
        """values: their cells, one tile's after the other's."""
        cells, dy = list(values), []
        for tile in tiles:
            count = len(self.graph.sources(tile))
            dy.append(self._dy(tile, cells[:count]))
            del cells[:count]
        return dy

    def _down_bias(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        tiles = range(*self.graph.tile_range(task.item))
        scales = [self.weight_N[self.graph.rows.tiles[tile].first : self.graph.rows.tiles[tile].end] for tile in tiles]
        found = [scale[:, None] * dy for scale, dy in zip(scales, self._dy_of_tiles(tiles, values), strict=True)]
        return (self._sum_of_rows(task, found, self.graph.sizes.hidden),)

    def _up_bias(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self._sum_of_rows(task, values, self.graph.sizes.width),)

    def _sum_of_rows(self, task: Task, tiles: Sequence[Tensor], width: int) -> Tensor:
        """Of a bias's columns; zeros for an expert without rows."""
        rows = torch.cat(list(tiles)) if tiles else self.gate_EH.new_zeros(0, width)
        return rows[:, self._columns(task)].sum(0)

    def _up_weights(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        rows = self.graph.rows
        tiles = (rows.tiles[tile] for tile in range(*self.graph.tile_range(task.item)))
        x = [self.x_NH[tile.first : tile.end] for tile in tiles]
        at = self._matrix_tiles(task, self.gate_up_EJH.shape[2])
        return tuple(_product(values, x, height, width, self.gate_up_EJH) for height, width in at)

    def _return(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        graph = self.graph
        dx_of, ds_of = self._by_slot([(self.rank, tile) for tile in graph.tiles_returned(task.item, task.part)], values)
        places = graph.returned_rows(task.item, task.part)
        sums = self.tokens.x_TH.new_zeros(len(places), graph.sizes.hidden)
        ds = self.tokens.x_TH.new_zeros(len(places), graph.sizes.top_k)
        for line, received in enumerate(places):
            for slot in range(graph.sizes.top_k):
                if (self.rank, received, slot) in dx_of:
                    sums[line] += dx_of[self.rank, received, slot]
                    ds[line, slot] = ds_of[self.rank, received, slot]
        return sums, ds

    def _combine(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        graph, tokens = self.graph, self.graph.tokens_of(task.item)
        tiles, cells = graph.tiles_combined(task.item), graph.blocks_combined(task.item)
        loaded = len(tiles) * (graph.up_tiles + 1)
        dx_of, ds_of = self._by_slot(tiles, values[:loaded])
        dx = self.tokens.x_TH.new_zeros(len(tokens), graph.sizes.hidden)
        ds = self.tokens.x_TH.new_zeros(len(tokens), graph.sizes.top_k)
        for owner, _, token, slot in graph.loaded(task.item):
            there = graph.all_rows[owner]
            received = there.first_from[self.rank] + graph.rows.sent[owner].index(token)
            dx[token - tokens.start] += dx_of[owner, received, slot]
            ds[token - tokens.start, slot] = ds_of[owner, received, slot]
        for index, (owner, block) in enumerate(cells):
            sums, back = values[loaded + 2 * index : loaded + 2 * index + 2]
            sent = graph.rows.sent[owner][block * graph.tiling.sent : (block + 1) * graph.tiling.sent]
            for line, token in enumerate(sent):
                if token in tokens:
                    dx[token - tokens.start] += sums[line]
                    ds[token - tokens.start] += back[line]  # 0 for slots of other owners
        return dx, ds

    def _by_slot(
        self, tiles: Sequence[tuple[int, int]], values: Sequence[Tensor]
    ) -> tuple[dict[tuple[int, int, int], Tensor], dict[tuple[int, int, int], Tensor]]:
        """dx and ds of the rows of these (owner, row tile), by (owner, received there, slot)."""
        dx_of, ds_of = {}, {}
        each = self.graph.up_tiles + 1
        for index, (owner, tile) in enumerate(tiles):
            *columns, ds = values[index * each : (index + 1) * each]
            dx = torch.cat(columns, dim=1)
            there = self.graph.all_rows[owner]
            for line, row in enumerate(range(there.tiles[tile].first, there.tiles[tile].end)):
                name = (owner, *there.rows[row])
                dx_of[name], ds_of[name] = dx[line], ds[line]
        return dx_of, ds_of

    def _router(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        dx, d_weight = values
        block = slice(self.graph.tokens_of(task.item).start, self.graph.tokens_of(task.item).stop)
        weight = self.tokens.weight_TK[block]
        d_chosen = weight * (d_weight - (weight * d_weight).sum(1, keepdim=True))
        d_logits = dx.new_zeros(len(dx), len(self.gate_EH)).scatter_(1, self.tokens.chosen_TK[block], d_chosen)
        return dx + d_logits @ self.gate_EH, d_logits

    def _router_weights(self, task: Task, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x_TH = self.tokens.x_TH[:, self._columns(task)]
        return (torch.cat(list(values)).T @ x_TH if values else x_TH.new_zeros(len(self.gate_EH), x_TH.shape[1]),)

    def _columns(self, task: Task) -> slice:
        tiling = self.graph.tiling
        widths = {
            Kind.DOWN: tiling.down_columns,
            Kind.UP: tiling.up_columns,
            Kind.ROUTER_WEIGHTS: tiling.router_columns,
            Kind.DOWN_BIAS: tiling.bias_columns,
            Kind.UP_BIAS: tiling.bias_columns,
        }
        block = widths[task.kind]
        return slice(task.part * block, (task.part + 1) * block)

    def _matrix_tiles(self, task: Task, width: int) -> list[tuple[slice, slice]]:
        tiling = self.graph.tiling
        places = (divmod(tile, -(-width // tiling.weight_columns)) for tile in self.graph.bundled(task))
        return [
            (
                slice(line * tiling.weight_rows, (line + 1) * tiling.weight_rows),
                slice(column * tiling.weight_columns, (column + 1) * tiling.weight_columns),
            )
            for line, column in places
        ]


def _product(left: Sequence[Tensor], right: Sequence[Tensor], height: slice, width: slice, like: Tensor) -> Tensor:
    """Σ leftᵀ · right over the row tiles of an expert; zeros where it has none."""
    if not left:
        return torch.zeros_like(like[0, height, width])
    return torch.cat(list(left))[:, height].T @ torch.cat(list(right))[:, width]


def _stacked(found: list[Tensor], empty: tuple[int, ...]) -> Tensor:
    return torch.stack(found) if found else torch.empty(empty, dtype=torch.float64, device="cpu")
