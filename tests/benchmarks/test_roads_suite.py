"""`python -m benchmarks roads`: the commands over places and formats of the experts, and how their cells are judged.

Without a GPU one is simulated for what asks whether steps and passes can be captured: a step that would be captured
runs as it is, so a cell's path is what a GPU would get.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amoeba import ExpertWeights, Request, Routing
from amoeba.commands.bench_run import make_document
from amoeba.cpu import placements as cpu_placements
from amoeba.decoding import decoder
from amoeba.integrations import fused_attention
from amoeba.jobs.generate import token_steps
from amoeba.jobs.sharded_model import load_share
from amoeba.jobs.train import fast_paths
from amoeba.parallel import Ranks
from amoeba.parallel.sharded import ShardedExperts
from amoeba.parallel.sharded_backend import RanksBackend
from benchmarks import roads as suite
from benchmarks.roads import DOCUMENTED, FORMATS, SIZES, Cell, Outcome, RoadsReport, choose_cells, judged, walk
from noted_output import NotedOutput
from selection import each_value_once, quick
from stand_in_graphs import captures_run_again

DOCS = Path(__file__).parents[2] / "docs"
TINY = SIZES["tiny"]
ON_CPU = not torch.cuda.is_available()
needs_engine = pytest.mark.skipif(cpu_placements._why_not() is not None, reason=str(cpu_placements._why_not()))
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roads")
    suite.prepare(folder, TINY, FORMATS, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return folder


Walked = Callable[..., Cell]


@pytest.fixture
def walked(folder: Path) -> Walked:
    shutil.rmtree(folder / "runs", ignore_errors=True)

    def run(*words: str, gpu: bool | None = None) -> Cell:
        (found,) = walk([Cell(*words)], folder, TINY, gpu=gpu)
        return found

    return run


@pytest.mark.parametrize("documented", DOCUMENTED, ids=lambda each: each.sentence[:40])
def test_the_documentation_has_every_sentence(documented: suite.Documented) -> None:
    page = " ".join((DOCS / documented.page).read_text().split())
    assert documented.sentence in page


class TestHere:
    """On this machine as it is."""

    @quick(lambda words: words[0] in ("prompts", "finetune resumed") or words[1] == "cpu")
    @pytest.mark.parametrize(
        "words",
        [
            ("generate", "resident", "mxfp4"),
            ("8 rows", "resident", "nvfp4"),
            ("prompts", "streamed", "fp8"),
            ("generate", "cpu", "fp8"),
            ("adapter", "resident", "mxfp8"),
            ("finetune resumed", "resident", "mxfp4"),
            ("train", "resident", "bf16"),
        ],
        ids=" ".join,
    )
    def test_green_cells(self, words: tuple[str, str, str], walked: Walked) -> None:
        found = walked(*words)
        assert found.state == "green", found.says
        assert found.tokens_per_second and found.seconds > 0
        if ON_CPU:
            assert found.path.endswith("native") or (found.path.endswith("plain") and found.pages)

    @pytest.mark.parametrize(
        ("words", "page"),
        [
            (("train", "streamed", "bf16"), "training.md"),
            (("train", "cpu", "bf16"), "training.md"),
            (("train", "resident", "mxfp4"), "precision.md"),
        ],
        ids=str,
    )
    def test_refused_cells(self, words: tuple[str, str, str], page: str, walked: Walked) -> None:
        found = walked(*words)
        assert found.state == "refused", found.says
        assert [each.split(":")[0] for each in found.pages] == [page]

    def test_a_resumed_run_with_another_loss_is_red(self, folder: Path) -> None:
        def run(words: list[str], ranks: int) -> Outcome:
            if "--resume" not in words:
                out = Path(words[words.index("--out") + 1])
                for name in (f"checkpoints/checkpoint-{TINY.steps}", "adapter"):
                    (out / name).mkdir(parents=True)
            loss = 2.0 if "--resume" in words else 1.0
            return Outcome(0, {"final_loss": loss, "tokens_per_second": 5.0}, "")

        (found,) = walk([Cell("finetune resumed", "cpu", "mxfp4")], folder, TINY, run, gpu=False)
        assert found.state == "red" and "final loss 2.0" in found.says[0]


@pytest.mark.skipif(not ON_CPU, reason="a GPU is there in earnest")
class TestWithASimulatedGpu:
    """What decides between paths thinks that there is one, and what is captured runs as it is."""

    @pytest.fixture(autouse=True)
    def a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(token_steps, "why_no_graphs", lambda device: None)
        monkeypatch.setattr(fast_paths, "_is_on_a_gpu", lambda trainer: True)
        monkeypatch.setattr(fused_attention, "why_not", lambda *heads: "there is no kernel for them here")
        captures_run_again(monkeypatch)

    @pytest.fixture
    def seen(self, walked: Walked, monkeypatch: pytest.MonkeyPatch) -> Walked:
        """With budgets for memory, as on this machine."""
        monkeypatch.setattr(suite, "half_of_experts", lambda model: pytest.fail("there is no --vram here"))
        return lambda *words: walked(*words, gpu=True)

    @each_value_once()
    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize(
        ("road", "path"),
        [
            ("generate", "captured"),
            ("8 rows", "continuous captured"),
            ("prompts", "continuous captured"),
            ("finetune", "captured"),
        ],
    )
    def test_resident_experts_take_the_fast_path_in_every_format(self, road, path, format, seen):
        found = seen(road, "resident", format)
        assert (found.state, found.path, found.says) == ("green", path, ())

    @pytest.mark.thorough
    def test_so_they_do_with_an_adapter_and_resumed(self, seen: Walked) -> None:
        for road in ("adapter", "finetune resumed"):
            found = seen(road, "resident", "mxfp4")
            assert (found.state, found.path, found.says) == ("green", "captured", ())

    @needs_engine
    @quick(lambda road: road != "generate")
    @pytest.mark.parametrize("road", ["generate", "adapter", "finetune"])
    def test_experts_on_the_cpu_say_what_the_host_waits_for(self, road, seen, monkeypatch):
        monkeypatch.setattr(fast_paths, "WORTH_COMPILING", 0.0)  # nor are layers compiled around them
        found = seen(road, "cpu", "bf16")
        assert found.state == "green" and found.path.split()[-1] == "plain"
        told = "its experts are computed on the CPU, and the host waits for their rows in every layer"
        assert set(found.says) == {told}

    @quick(lambda format: format == "mxfp4")
    @pytest.mark.parametrize("format", FORMATS)
    def test_captured_tokens_are_those_of_plain_steps(self, format, folder, monkeypatch):
        words = suite.words_of(Cell("generate", "resident", format), folder, TINY, False, folder)
        captured = suite.run_command(words, 1).document
        monkeypatch.setattr(token_steps, "why_no_graphs", lambda device: "not wanted")
        monkeypatch.setattr(decoder, "native_steps", lambda *_: "not wanted")
        plain = suite.run_command(words, 1).document
        assert (captured["steps"], plain["steps"]) == ("captured", "plain")
        assert captured["generated_ids"] == plain["generated_ids"]


class TestOverRanks:
    """torchrun takes a minute for each cell: what its commands would say, by what says it."""

    def test_quantised_experts_are_refused(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="quantised experts cannot be distributed yet") as refused:
            load_share(str(folder / "mxfp4"), None, Ranks())
        outcome = Outcome(2, {"error": str(refused.value)}, "")
        assert judged(Cell("generate", "ranks", "mxfp4"), outcome, gpu=True).state == "refused"

    @pytest.mark.parametrize("count", [1, 2])
    def test_steps_are_plain_where_there_are_others(self, count: int) -> None:
        local = ExpertWeights(torch.zeros(2, 8, 4), torch.zeros(2, 4, 4))
        sharded = object.__new__(ShardedExperts)
        others = {"local": local, "local_backend": "auto", "ranks": SimpleNamespace(count=count), "tokens": "same"}
        sharded.__dict__.update(others, owners=SimpleNamespace(num_experts=2))
        routing = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
        said = RanksBackend().why_waits(Request(torch.zeros(1, 4), routing, sharded), trains=False)
        if count == 1:
            assert said is None
            return
        made = document(steps_reason=f"its experts {said}")
        found = judged(Cell("generate", "ranks", "bf16"), Outcome(0, made, ""), gpu=True)
        assert (found.state, found.path) == ("green", "plain")


def document(**changes: Any) -> dict[str, Any]:
    return {"generation_tokens_per_second": 3.0, "steps": "plain", "steps_reason": "its experts rest"} | changes


@pytest.mark.parametrize(
    ("outcome", "state", "path"),
    [
        (Outcome(0, document(steps="compiled"), ""), "green", "compiled"),
        (Outcome(0, document(), ""), "red", "plain"),
        (Outcome(0, document(batching="continuous", steps="captured"), ""), "green", "continuous captured"),
        (Outcome(0, document(steps="captured", generation_tokens_per_second=None), ""), "red", "captured"),
        (Outcome(0, {"tokens_per_second": 1.0}, "each step uses: fused loss, CUDA graph"), "green", "captured"),
        (
            Outcome(0, {"tokens_per_second": 1.0}, "each step uses: CUDA graph\nlaunching kernels one by one"),
            "red",
            "plain",
        ),
        (Outcome(0, {"tokens_per_second": 1.0}, "no CUDA graph: several ranks share each batch"), "green", "plain"),
        (Outcome(0, {"tokens_per_second": 1.0}, "no CUDA graph: RuntimeError: no"), "red", "plain"),
        (Outcome(2, {"error": "quantised experts cannot be distributed yet"}, ""), "refused", ""),
        (Outcome(2, {"error": "something else"}, ""), "red", ""),
        (Outcome(70, {"error": "quantised experts cannot be distributed yet"}, ""), "red", ""),
        (Outcome(1, {}, "Traceback\nValueError"), "red", ""),
    ],
)
def test_how_a_cell_is_judged_on_a_gpu(outcome: Outcome, state: str, path: str) -> None:
    found = judged(Cell("generate", "resident", "bf16"), outcome, gpu=True)
    assert (found.state, found.path) == (state, path)


def test_cells_are_chosen_by_name() -> None:
    assert len(choose_cells([], [], [])) == 7 * 4 * 5
    assert choose_cells(["train"], ["ranks"], ["fp8"]) == [Cell("train", "ranks", "fp8")]
    with pytest.raises(ValueError, match=r"--place: expected one of resident.*got moon"):
        choose_cells([], ["moon"], [])


def test_the_table_has_speeds_paths_and_notes_and_the_document_all_of_it() -> None:
    page = "generate.md: something"
    cells = [
        Cell("generate", "resident", "bf16", "green", 1026.4, "captured"),
        Cell("generate", "resident", "fp8", "green", 12.8, "plain", ("something",), (page,)),
        Cell("train", "ranks", "fp8", "red", says=("it broke",)),
    ]
    output, report = NotedOutput(), RoadsReport(TINY, "cuda", cells)
    suite.show(report, output)
    assert output.tables[0].columns == ["road", "experts", "bf16", "fp8"]
    assert output.tables[0].rows == [
        ["generate", "resident", "1026 captured", "12.8 plain [1]"],
        ["train", "ranks", "", "RED"],
    ]
    assert any(re.search(r"\[1\] docs/generate.md: something", line) for line in output.lines)
    assert any("RED train, ranks, fp8: it broke" in line for line in output.lines)
    kept = json.loads(json.dumps(make_document("python -m benchmarks roads", roads=[report])))["roads"][0]["cells"]
    assert kept == json.loads(json.dumps([asdict(cell) for cell in cells]))


@pytest.mark.thorough  # starts a process
def test_cells_that_a_process_leaves_behind_are_red(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SIZES["tiny"].__class__(**vars(TINY) | {"name": "unknown"})
    found = list(suite.walk_apart([Cell("generate", "resident", "bf16")], folder, broken))
    assert [cell.state for cell in found] == ["red"] and "KeyError" in found[0].says[0]
