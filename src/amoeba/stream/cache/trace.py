"""Which experts were chosen, pass by pass: a compact file that is written while a model generates.

with TraceWriter(path, [LayerShape(experts=128, top_k=8)] * 48) as writer:
    for layer, expert_TK in enumerate(of_this_pass):
        writer.add(layer, expert_TK)     # rows of ids, T tokens x K, for every layer in turn
trace = read_trace(path)
trace.passes[0].distinct(layer)          # the experts that the pass needs

The file is one line of JSON, padded, then the passes: the number of tokens (uint32) and, layer after layer, T·K ids
(uint16), all little-endian. What an interrupted run leaves behind can be read, but for a last pass that is not whole.
An id outside [0, experts) is a sentinel and is stored as 65535.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from amoeba.core.errors import bad_value

FORMAT, VERSION = "amoeba routing trace", 1
NO_EXPERT = 0xFFFF
_TOKENS = struct.Struct("<I")
_TOKENS_DIGITS = 12  # room in the first line for a count that is known at the end


class LayerShape(NamedTuple):
    """What a trace has to know of a layer. expert_bytes: of one expert's weights, 0 if unknown."""

    experts: int
    top_k: int
    expert_bytes: int = 0


class Pass(NamedTuple):
    """One forward pass: several tokens in a prefill or a batch, one in decoding."""

    tokens: int
    ids: array[int]  # T·K of each layer
    starts: tuple[int, ...]  # of each layer, in a pass of one token; the end is the last

    def of_layer(self, layer: int) -> array[int]:
        """Token by token."""
        return self.ids[self.tokens * self.starts[layer] : self.tokens * self.starts[layer + 1]]

    def distinct(self, layer: int) -> list[int]:
        """The experts that this pass needs of a layer, each once, in the order in which they come."""
        found = dict.fromkeys(self.of_layer(layer))
        found.pop(NO_EXPERT, None)
        return list(found)


class Trace(NamedTuple):
    layers: tuple[LayerShape, ...]
    passes: list[Pass]
    complete: bool = True  # False where the writer was interrupted

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.passes)


class TraceWriter:
    """Appends pass after pass. What is there when the process is interrupted or killed is a trace."""

    def __init__(self, path: str | Path, layers: Sequence[LayerShape]) -> None:
        self.path, self.layers, self.tokens = Path(path), tuple(layers), 0
        check_layers(self.layers)
        self._pending: list[bytes] = []
        self._pending_tokens = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._file.write(_first_line(self.layers, None))
        self._file.flush()

    def add(self, layer: int, ids: Iterable[int]) -> None:
        """The ids of all tokens of this pass, token by token, layers in order from 0. The last layer ends the pass."""
        shape = self.layers[layer]
        found = array("H", (each if 0 <= each < shape.experts else NO_EXPERT for each in ids))
        tokens, rest = divmod(len(found), shape.top_k)
        if layer != len(self._pending) or rest or (layer and tokens != self._pending_tokens):
            raise bad_value(
                "trace",
                f"layer {len(self._pending)} with {self._pending_tokens or 'T'} x {shape.top_k} ids",
                f"layer {layer} with {len(found)} ids",
                "add each layer of a pass once, in order, with the same tokens; abandon() drops a pass half-way",
            )
        self._pending_tokens = tokens
        self._pending.append(_little_endian(found).tobytes())
        if len(self._pending) == len(self.layers):
            self._file.write(_TOKENS.pack(tokens) + b"".join(self._pending))
            self._file.flush()  # a process that is killed leaves what it had
            self.tokens += tokens
            self.abandon()

    def abandon(self) -> None:
        """Forgets the layers of a pass that was not finished."""
        self._pending, self._pending_tokens = [], 0

    def close(self) -> None:
        if not self._file.closed:
            self.abandon()
            self._file.seek(0)
            self._file.write(_first_line(self.layers, self.tokens))
            self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Recorder:
    """The routing of every pass into a trace file, while a model runs: `memory.record(Recorder(path, shapes))`. How
    many experts a token goes to is learnt from the first pass, which is kept until it is whole. A pass that was broken
    off is left out."""

    def __init__(self, path: str | Path, layers: Sequence[LayerShape]) -> None:
        """layers: top_k of these is not looked at."""
        self.path = Path(path)
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            got = "a folder" if self.path.is_dir() else "a name in a folder that is not there"
            raise bad_value("--record", "the name of a file to write", f"{path}, {got}", "name a file")
        self._layers = tuple(layers)
        self._pending: list[tuple[list[int], int]] = []  # of the pass that is under way: ids and tokens
        self._writer: TraceWriter | None = None

    def add(self, layer: int, ids: list[int], tokens: int) -> None:
        if layer != len(self._pending):  # the pass before was broken off
            self.abandon()
        if not tokens or layer != len(self._pending):
            return
        self._pending.append((ids, tokens))
        if len(self._pending) < len(self._layers):
            return
        if self._writer is None:
            shapes = [
                shape._replace(top_k=len(ids) // tokens)
                for shape, (ids, tokens) in zip(self._layers, self._pending, strict=True)
            ]
            self._writer = TraceWriter(self.path, shapes)
        for number, (found, _) in enumerate(self._pending):
            self._writer.add(number, found)
        self.abandon()

    def abandon(self) -> None:
        self._pending = []

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_trace(path: str | Path) -> Trace:
    """ValueError for what is no trace; a last pass that is not whole is left out, and `complete` is False."""
    path = Path(path)
    with path.open("rb") as file:
        line = file.readline(1 << 20)
        layers, tokens = _read_first_line(path, line)
        passes = list(_read_passes(path, file.read(), layers))
    return Trace(layers, passes, complete=tokens == sum(each.tokens for each in passes))


def starts_of(layers: Sequence[LayerShape]) -> tuple[int, ...]:
    return (0, *accumulate(layer.top_k for layer in layers))


def _read_passes(path: Path, content: bytes, layers: Sequence[LayerShape]) -> Iterator[Pass]:
    starts, fewest = starts_of(layers), min(layer.experts for layer in layers)
    at = 0
    while at + _TOKENS.size <= len(content):
        (tokens,) = _TOKENS.unpack_from(content, at)
        begin = at + _TOKENS.size
        at = begin + 2 * tokens * starts[-1]
        if at > len(content):
            return
        found = Pass(tokens, _little_endian(array("H", content[begin:at])), starts)
        if tokens and max(found.ids) >= fewest:  # a layer with more experts than another, or a sentinel
            for index, layer in enumerate(layers):
                wrong = next((each for each in found.distinct(index) if each >= layer.experts), None)
                if wrong is not None:
                    raise _no_trace(path, f"expert {wrong} in layer {index}, of {layer.experts}")
        yield found


def _first_line(layers: Sequence[LayerShape], tokens: int | None) -> bytes:
    """As long with the number of tokens as without."""
    shown = ("null" if tokens is None else str(tokens)).rjust(_TOKENS_DIGITS)
    shapes = json.dumps([layer._asdict() for layer in layers], separators=(",", ":"))
    return f'{{"format":"{FORMAT}","version":{VERSION},"tokens":{shown},"layers":{shapes}}}\n'.encode()


def _read_first_line(path: Path, line: bytes) -> tuple[tuple[LayerShape, ...], int | None]:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise ValueError
        version, tokens = header["version"], header["tokens"]
        layers = tuple(LayerShape(**layer) for layer in header["layers"])
    except (ValueError, KeyError, TypeError):
        raise _no_trace(path, f"a file that begins with {line[:40]!r}") from None
    if version != VERSION:
        raise bad_value(str(path), f"a trace of version {VERSION}", version, "record it again, or update aMoEba")
    check_layers(layers)
    return layers, tokens


def check_layers(layers: Sequence[LayerShape]) -> None:
    if not layers:
        raise bad_value("trace", "at least one layer", "none", "give the shape of each layer with experts")
    for index, layer in enumerate(layers):
        if not 1 <= layer.top_k <= layer.experts < NO_EXPERT or layer.expert_bytes < 0:
            wanted = f"1 <= top_k <= experts < {NO_EXPERT}, expert_bytes >= 0"
            raise bad_value(f"layer {index} of a trace", wanted, layer, "check what wrote it")


def _no_trace(path: Path, got: str) -> ValueError:
    remedy = "name a file that TraceWriter or `amoeba generate --record` wrote"
    return bad_value(str(path), "a routing trace", got, remedy)


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids
