"""Routing traces: written while generating, read back, and as an interrupted process leaves them."""

import json
import random
from array import array

import pytest

from amoeba.stream.cache.trace import NO_EXPERT, LayerShape, Recorder, TraceWriter, read_trace

LAYERS = (LayerShape(16, 2, 4096), LayerShape(300, 3), LayerShape(1, 1))


def ids_of(layer: LayerShape, tokens: int, dice: random.Random) -> list[int]:
    return [dice.randrange(layer.experts) for _ in range(tokens * layer.top_k)]


def write(path, tokens_of_passes=(5, 1, 1, 0, 2)):
    dice = random.Random(0)
    added = [[ids_of(layer, tokens, dice) for layer in LAYERS] for tokens in tokens_of_passes]
    with TraceWriter(path, LAYERS) as writer:
        for of_pass in added:
            for layer, ids in enumerate(of_pass):
                writer.add(layer, ids)
    return added


def test_a_trace_is_read_as_it_was_written(tmp_path):
    added = write(tmp_path / "new" / "run.trace")
    trace = read_trace(tmp_path / "new" / "run.trace")
    assert trace.layers == LAYERS and trace.complete and trace.tokens == 9
    assert [each.tokens for each in trace.passes] == [5, 1, 1, 0, 2]
    found = [[each.of_layer(layer).tolist() for layer in range(3)] for each in trace.passes]
    assert found == added
    assert trace.passes[0].distinct(0) == list(dict.fromkeys(added[0][0]))


def test_the_file_is_two_bytes_per_selection_after_a_line_of_json(tmp_path):
    write(tmp_path / "trace")
    first, rest = (tmp_path / "trace").read_bytes().split(b"\n", 1)
    assert json.loads(first)["tokens"] == 9
    assert len(rest) == 5 * 4 + 9 * 6 * 2
    assert rest[:4] == b"\x05\x00\x00\x00", "little-endian"


def test_ids_that_belong_to_nobody_are_kept_and_not_requested(tmp_path):
    with TraceWriter(tmp_path / "trace", [LayerShape(4, 2)]) as writer:
        writer.add(0, [3, -1, 4, 0])
    (only,) = read_trace(tmp_path / "trace").passes
    assert only.of_layer(0) == array("H", [3, NO_EXPERT, NO_EXPERT, 0])
    assert only.distinct(0) == [3, 0]


def test_an_interrupted_run_leaves_a_trace_without_the_pass_it_was_in(tmp_path):
    def generate() -> None:
        with TraceWriter(tmp_path / "trace", LAYERS[:2]) as writer:
            writer.add(0, [1, 2])
            writer.add(1, [3, 4, 5])
            writer.add(0, [6, 7])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate()
    trace = read_trace(tmp_path / "trace")
    assert trace.complete and trace.tokens == 1
    assert trace.passes[0].ids.tolist() == [1, 2, 3, 4, 5]


def test_a_killed_run_leaves_every_pass_that_was_finished(tmp_path):
    writer = TraceWriter(tmp_path / "trace", LAYERS[:1])
    assert read_trace(tmp_path / "trace") == (LAYERS[:1], [], False)
    for _ in range(3):
        writer.add(0, [1, 2])
    trace = read_trace(tmp_path / "trace")  # nobody closed it
    assert (len(trace.passes), trace.complete) == (3, False)
    writer.close()
    writer.close()
    assert read_trace(tmp_path / "trace").complete


def test_a_file_cut_anywhere_gives_whole_passes_or_an_error(tmp_path):
    write(tmp_path / "trace")
    whole, content = read_trace(tmp_path / "trace"), (tmp_path / "trace").read_bytes()
    header = content.index(b"\n") + 1
    counts = []
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        if length < header - 1:  # without the end of the line it is whole still
            with pytest.raises(ValueError, match=r"cut: expected a routing trace; got "):
                read_trace(tmp_path / "cut")
        else:
            found = read_trace(tmp_path / "cut")
            assert found.passes == whole.passes[: len(found.passes)] and not found.complete
            counts.append(len(found.passes))
    assert sorted(counts) == counts and set(counts) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"[]\n", b"\xff\xfe\n", b'{"format":"amoeba routing trace"}\n', b"\x89PNG" + bytes(100)]
)
def test_what_is_no_trace_is_named(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.bin: expected a routing trace; got .*\. Name a file that"):
        read_trace(tmp_path / "x.bin")


def test_a_version_to_come_and_an_expert_that_is_not_there_are_errors(tmp_path):
    write(tmp_path / "trace")
    content = (tmp_path / "trace").read_bytes()
    (tmp_path / "later").write_bytes(content.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ValueError, match=r"later: expected a trace of version 1; got 2"):
        read_trace(tmp_path / "later")
    at = content.index(b"\n") + 5
    (tmp_path / "wrong").write_bytes(content[:at] + b"\x10\x00" + content[at + 2 :])
    with pytest.raises(ValueError, match=r"wrong: expected a routing trace; got expert 16 in layer 0, of 16"):
        read_trace(tmp_path / "wrong")


def test_an_expert_one_too_high_is_noticed_where_layers_are_alike(tmp_path):
    with TraceWriter(tmp_path / "trace", [LayerShape(4, 1)]) as writer:
        writer.add(0, [3])
    content = (tmp_path / "trace").read_bytes()
    (tmp_path / "wrong").write_bytes(content[:-2] + b"\x04\x00")
    with pytest.raises(ValueError, match="got expert 4 in layer 0, of 4"):
        read_trace(tmp_path / "wrong")


def test_a_recorded_pass_that_was_broken_off_is_left_out(tmp_path):
    recorder = Recorder(tmp_path / "trace", [LayerShape(16, 1), LayerShape(16, 1)])
    added = [(0, [1, 2]), (0, [3, 4]), (1, [5, 6]), (1, [7, 8]), (0, []), (1, []), (0, [9, 10]), (1, [11, 12])]
    for layer, ids in added:  # the first was broken off behind its first layer, another one ahead of its first
        recorder.add(layer, ids, len(ids) // 2)
    recorder.close()
    trace = read_trace(tmp_path / "trace")
    assert trace.layers == (LayerShape(16, 2), LayerShape(16, 2))
    assert [each.ids.tolist() for each in trace.passes] == [[3, 4, 5, 6], [9, 10, 11, 12]]


@pytest.mark.parametrize(
    ("layer", "ids"),
    [(1, [1, 2, 3]), (0, [1, 2, 3]), (2, [0])],
    ids=["out of order", "no whole tokens", "a layer left out"],
)
def test_layers_come_in_order_with_whole_tokens(tmp_path, layer, ids):
    with TraceWriter(tmp_path / "trace", LAYERS) as writer, pytest.raises(ValueError, match="trace: expected layer 0"):
        writer.add(layer, ids)


def test_all_layers_of_a_pass_have_the_same_tokens(tmp_path):
    with TraceWriter(tmp_path / "trace", LAYERS) as writer:
        writer.add(0, [1, 2, 3, 4])
        with pytest.raises(ValueError, match="expected layer 1 with 2 x 3 ids; got layer 1 with 3 ids"):
            writer.add(1, [1, 2, 3])
        writer.abandon()
        for layer, ids in enumerate([[1, 2], [3, 4, 5], [0]]):
            writer.add(layer, ids)
    assert read_trace(tmp_path / "trace").tokens == 1


@pytest.mark.parametrize("shape", [LayerShape(4, 5), LayerShape(4, 0), LayerShape(65535, 1), LayerShape(4, 1, -1)])
def test_shapes_that_cannot_be_are_errors(tmp_path, shape):
    with pytest.raises(ValueError, match="layer 1 of a trace: expected 1 <= top_k <= experts"):
        TraceWriter(tmp_path / "trace", [LAYERS[0], shape])
    assert not (tmp_path / "trace").exists()
