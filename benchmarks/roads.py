"""`python -m benchmarks roads`: every way through the commands, with every place and format of the experts, as a table.

    cells = choose_cells(["generate", "finetune"], ["resident"], ["bf16", "mxfp4"])
    prepare(folder, size, ["bf16", "mxfp4"], device)
    for found in walk(cells, folder, size): ...             # in this process, by the commands themselves

A cell is green, with its tokens/s and the path that it took; refused, in a sentence that a page of the documentation
has too; or red. A cell on a slower path than there is (plain steps) is green only if its reason is
documented as well. The cells of one place and format run in one process, those of ranks by torchrun.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from benchmarks import command
from benchmarks.random_models import KNOWN, QWEN3_30B, TINY, qwen3_moe

ROADS = ("generate", "8 rows", "prompts", "adapter", "finetune", "finetune resumed", "train")
PLACES = ("resident", "streamed", "cpu", "ranks")
FORMATS = ("bf16", "fp8", "mxfp8", "mxfp4", "nvfp4")
RANKS = 2
COLUMN_SECONDS = 900  # after which the cells of a place and format that are left are red


class Documented(NamedTuple):
    """words: of a message, as a regular expression. page: below docs/, which has the sentence."""

    words: str
    page: str
    sentence: str


def _same(sentence: str, page: str) -> Documented:
    return Documented(re.escape(sentence), page, sentence)


DOCUMENTED = (
    # a slower path, and why
    _same("its experts are computed on the CPU, and the host waits for their rows in every layer", "decoding.md"),
    _same("its experts are on several ranks, and the host watches over each exchange between them", "decoding.md"),
    Documented(
        r"tokens? may ask for \d+ experts of a layer, which has \d+ slots",
        "decoding.md",
        "tokens may ask for more experts of a layer than it has slots",
    ),
    _same("On a CPU, `transformers.Trainer` runs the steps", "training.md"),
    _same("several ranks share each batch", "training.md"),
    _same("its experts are streamed, and in training the host copies them group by group", "training.md"),
    Documented(
        "are computed one after another, and the host waits for the number of rows of each",
        "precision.md",
        "experts are computed one after another, and the host waits for the number of rows of each",
    ),
    # what is refused
    _same("quantised experts cannot be distributed yet", "howto/several-processes.md"),
    Documented(
        r"experts: expected resident or ranks|No such option: --v?ram",
        "training.md",
        "`amoeba train` updates the experts, so they are resident or on ranks",
    ),
    Documented(
        r"precision: expected one of bf16, fp8",
        "precision.md",
        "`mxfp4` is a format of frozen experts, not a recipe to train in",
    ),
)


@dataclass(frozen=True)
class Size:
    """config: of a Qwen3 MoE. length, batch, steps: of training. words: of a prompt."""

    name: str
    config: Mapping[str, int]
    length: int
    batch: int
    steps: int
    new_tokens: int
    words: int
    texts: int


SIZES = {
    "tiny": Size("tiny", TINY, length=32, batch=2, steps=4, new_tokens=6, words=2, texts=40),
    "qwen3_30b": Size(
        "qwen3_30b",
        QWEN3_30B | {"num_hidden_layers": 3},
        length=2048,
        batch=2,
        steps=12,
        new_tokens=200,
        words=24,
        texts=900,
    ),
}

State = Literal["green", "refused", "red"]


@dataclass(frozen=True)
class Cell:
    """path: what made it fast, or did not: captured, compiled, continuous, native, plain. says: reasons, in the
    command's own words. pages: of the documentation, one for each of them that has one."""

    road: str
    place: str
    format: str
    state: State = "red"
    tokens_per_second: float | None = None
    path: str = ""
    says: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    seconds: float = 0.0

    def shown(self, notes: Mapping[str, int]) -> str:
        numbers = "".join(f" [{notes[page]}]" for page in dict.fromkeys(self.pages) if page in notes)
        if self.state != "green":
            return f"{'refused' if self.state == 'refused' else 'RED'}{numbers}"
        speed = "" if self.tokens_per_second is None else three_digits(self.tokens_per_second)
        return f"{speed} {self.path}{numbers}".strip()


@dataclass
class RoadsReport:
    size: Size
    device: str
    cells: list[Cell] = field(default_factory=list)

    @property
    def red(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.state == "red"]


class Outcome(NamedTuple):
    """Of a command. document: the last line of stdout. said: on stderr."""

    code: int
    document: dict[str, Any]
    said: str


def choose_cells(roads: Sequence[str], places: Sequence[str], formats: Sequence[str]) -> list[Cell]:
    """Nothing named: all of them."""
    named = (("--road", roads, ROADS), ("--place", places, PLACES), ("--format", formats, FORMATS))
    for option, given, known in named:
        if unknown := [each for each in given if each not in known]:
            raise bad_value(option, f"one of {', '.join(known)}", ", ".join(unknown), "leave it out for all")
    chosen = [[each for each in known if not given or each in given] for _, given, known in named]
    return [Cell(road, place, format) for road, place, format in itertools.product(*chosen)]


def write_texts(folder: Path, size: Size) -> Any:
    """Texts to train on, prompts, and a tokenizer; returns the configuration of a model with this tokenizer."""
    from amoeba.data.tokenizer import train_tokenizer

    drawn = random.Random(0)
    texts = [" ".join(drawn.choices(KNOWN, k=40)) for _ in range(size.texts)]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.save_pretrained(folder / "bf16")
    pairs = [{"prompt": text[:40], "completion": text[40:]} for text in texts]
    (folder / "finetune.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prompts = [" ".join(text.split()[: size.words]) for text in texts[:8]]
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    return qwen3_moe(size.config, len(tokenizer))


def prepare(folder: Path, size: Size, formats: Iterable[str], device: torch.device) -> None:
    """A model with random weights in each format, an adapter for it, texts to train on, prompts."""
    from transformers import AutoModelForCausalLM

    from amoeba import lora
    from amoeba.jobs.convert.quantise import quantise_folder

    config = write_texts(folder, size)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "bf16")
    lora.attach(model, 4, 8, ["experts"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "_b" in name:  # which begin as zeros, so that nothing would be added
                parameter.normal_(std=0.02)
    lora.save(model, folder / "adapter")
    del model
    for format in set(formats) - {"bf16"}:
        quantise_folder(folder / "bf16", folder / format, format)


def walk(
    cells: Iterable[Cell],
    folder: Path,
    size: Size,
    run: Callable[[list[str], int], Outcome] | None = None,
    gpu: bool | None = None,
) -> Iterator[Cell]:
    """run: a command, in this many processes. gpu: whether the commands will find one."""
    run, gpu = run or run_command, torch.cuda.is_available() if gpu is None else gpu
    for cell in cells:
        began = time.perf_counter()
        found = _walked(cell, folder, size, run, gpu)
        yield replace(found, seconds=time.perf_counter() - began)


def _walked(cell: Cell, folder: Path, size: Size, run: Callable[[list[str], int], Outcome], gpu: bool) -> Cell:
    out, ranks = folder / "runs" / f"{cell.place}-{cell.format}", RANKS if cell.place == "ranks" else 1
    words = words_of(cell, folder, size, gpu, out)
    if not cell.road.startswith("finetune"):
        if cell.road == "train":
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        return judged(cell, run(words, ranks), gpu)
    whole = out.with_suffix(".json")  # what the run in `out` ended with, from beginning to end
    if cell.road == "finetune" or not whole.is_file():
        shutil.rmtree(out, ignore_errors=True)
        outcome = run(words, ranks)
        found = judged(cell, outcome, gpu)
        if found.state == "green":
            whole.write_text(json.dumps(outcome.document))
        if cell.road == "finetune" or found.state != "green":
            return found
    expected = json.loads(whole.read_text())["final_loss"]
    shutil.rmtree(out / "checkpoints" / f"checkpoint-{size.steps}")
    shutil.rmtree(out / "adapter")
    outcome = run(["finetune", "--resume", str(out), "--json"], ranks)
    found, loss = judged(cell, outcome, gpu), outcome.document.get("final_loss")
    if found.state == "green" and loss != expected:
        found = replace(found, state="red", says=(f"final loss {loss}, without the interruption {expected}",))
    return found


def words_of(cell: Cell, folder: Path, size: Size, gpu: bool, out: Path) -> list[str]:
    """The command, as a user would write it."""
    trains = cell.road == "train"
    model = folder / ("bf16" if trains else cell.format)
    words = {"resident": ["--experts", "resident"], "cpu": ["--experts", "cpu-bf16"], "ranks": ["--experts", "ranks"]}
    where = words.get(cell.place) or (["--vram", str(half_of_experts(model))] if gpu else ["--ram", "auto"])
    if trains or cell.road.startswith("finetune"):
        begin = ["train", "--model", str(model)] if trains else ["finetune", str(model), "--lora-rank", "8"]
        given = {
            "--data": folder / ("train.jsonl" if trains else "finetune.jsonl"),
            "--out": out.with_name(f"{out.name}-train") if trains else out,
            "--steps": size.steps,
            "--batch-size": size.batch,
            "--sequence-length": size.length,
            "--save-every": size.steps // 2,
            "--eval-every": size.steps,
            "--log-every": size.steps // 2,
            "--held-out": 0.05,
            "--learning-rate": 1e-4,
        }
        begin += [str(word) for pair in given.items() for word in pair]
        return [*begin, *where, *(["--precision", cell.format] if trains and cell.format != "bf16" else []), "--json"]
    prompts = folder / "prompts.txt"
    first = prompts.read_text().splitlines()[0]
    one = {"generate": [first], "adapter": [first, "--adapter", str(folder / "adapter")]}
    many = {"8 rows": ["--batch-size", "8"], "prompts": []}
    asked = one.get(cell.road) or ["--prompts", str(prompts), *many[cell.road]]
    end = ["--max-new-tokens", str(size.new_tokens), "--temperature", "0", "--json"]
    return ["generate", str(model), *asked, *where, *end]


def half_of_experts(model: Path) -> int:
    """A budget on a GPU in which half of each layer's experts have room."""
    from amoeba.stream.gpu.tiers import LayerTiers
    from amoeba.stream.store import open_store

    with open_store(model, direct=False) as store:
        rest = sum(entry.size for entry in store.rest.values())
        return rest + sum(-(-entry.experts // 2) * LayerTiers.slot_bytes(entry) for entry in store.layers)


def judged(cell: Cell, outcome: Outcome, gpu: bool) -> Cell:
    if outcome.code != 0:
        said = str(outcome.document.get("error") or outcome.said.strip().splitlines()[-1:] or "no message")
        pages, unknown = _pages([said])
        refused = outcome.code == 2 and not unknown
        return replace(cell, state="refused" if refused else "red", says=(said,), pages=tuple(pages))
    path, reasons = _path(outcome, gpu)
    pages, unknown = _pages(reasons)
    document = outcome.document
    rates = (f"{name}tokens_per_second" for name in ("generation_", "generated_", ""))
    rate = next((document[name] for name in rates if document.get(name)), None)
    state: State = "red" if unknown or rate is None else "green"
    return replace(cell, state=state, tokens_per_second=rate, path=path, says=tuple(reasons), pages=tuple(pages))


def _path(outcome: Outcome, gpu: bool) -> tuple[str, list[str]]:
    """In a word, and the reasons why it is not the fastest there is."""
    document, said = outcome.document, outcome.said
    if "steps_reason" not in document:
        if not gpu:
            return "plain", ["On a CPU, `transformers.Trainer` runs the steps"]
        uses = next((line for line in said.splitlines() if "each step uses:" in line), "")
        compiled = ["compiled"] if "compiled decoder layers" in uses else []
        failed = "launching kernels one by one" in said
        if "CUDA graph" in uses and not failed:
            return " ".join(["captured", *compiled]), []
        reasons = re.findall(r"no CUDA graph: (.*)", said)
        return " ".join(["plain", *compiled]), reasons if reasons and not failed else ["a pass was not captured"]
    batched = ["continuous"] if document.get("batching") == "continuous" else []
    return " ".join([*batched, document["steps"]]), [document["steps_reason"]] if document["steps"] == "plain" else []


def _pages(reasons: Sequence[str]) -> tuple[list[str], list[str]]:
    """Where the reasons are documented, and those that are not."""
    found: list[str] = []
    unknown = []
    for reason in reasons:
        pages = [f"{each.page}: {each.sentence}" for each in DOCUMENTED if re.search(each.words, reason)]
        found += pages[:1]
        unknown += [] if pages else [reason]
    return found, unknown


def run_command(words: list[str], ranks: int) -> Outcome:
    return _over_ranks(words, ranks) if ranks > 1 else _in_this_process(words)


def _in_this_process(words: list[str]) -> Outcome:
    from amoeba.cli import main

    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["amoeba", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = before
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return Outcome(code, _document(out.getvalue()), err.getvalue())


def _over_ranks(words: list[str], ranks: int) -> Outcome:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*start, "-m", "amoeba", *words], capture_output=True, text=True, check=False)
    document = _document(done.stdout)
    return Outcome(document.get("exit_code", done.returncode), document, done.stderr)  # torchrun has a code of its own


def _document(stdout: str) -> dict[str, Any]:
    try:
        return dict(json.loads(stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {}


def walk_apart(cells: Sequence[Cell], folder: Path, size: Size) -> Iterator[Cell]:
    """The cells of each place and format in a process of their own; those that it leaves behind are red."""
    for (place, format), column in itertools.groupby(
        sorted(cells, key=lambda cell: (PLACES.index(cell.place), FORMATS.index(cell.format))),
        key=lambda cell: (cell.place, cell.format),
    ):
        roads = [cell.road for cell in column]
        words = [sys.executable, "-m", __name__, str(folder), size.name, place, format, *roads]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=said, text=True, env=_environment(), start_new_session=True
            )
            assert process.stdout is not None
            watch = threading.Timer(COLUMN_SECONDS, os.killpg, (process.pid, signal.SIGKILL))  # torchrun and all
            watch.start()
            try:
                for line in process.stdout:
                    if not line.startswith("{"):  # of a library that prints
                        continue
                    fields = json.loads(line)
                    roads.remove(fields["road"])
                    yield Cell(**fields | {name: tuple(fields[name]) for name in ("says", "pages")})
                process.wait()
            finally:
                watch.cancel()
                if process.poll() is None:  # interrupted
                    os.killpg(process.pid, signal.SIGKILL)
            said.seek(0)
            last = (said.read().strip().splitlines() or ["no message"])[-1]
        for road in roads:
            yield Cell(road, place, format, says=(f"the process ended with {process.returncode}: {last}",))


def _environment() -> dict[str, str]:
    """This process's, in which the folder of the benchmarks is found."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])}


def run(cells: Sequence[Cell], size: Size, path: Path | None, output: Output) -> tuple[dict[str, Any], bool]:
    """Prints one table; returns the document, and False if a cell is red."""
    options: dict[str, object] = {"shape": size.name}
    for name, known in (("road", ROADS), ("place", PLACES), ("format", FORMATS)):
        given = [each for each in known if any(getattr(cell, name) == each for cell in cells)]
        options[name] = given if len(given) < len(known) else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = BenchRun(command("roads", **options), "roads", path, output)
    report = RoadsReport(size, str(device))
    with tempfile.TemporaryDirectory() as folder:
        measured.progress(f"{size.name}: writing the model in {len({cell.format for cell in cells})} formats")
        prepare(Path(folder), size, {cell.format for cell in cells}, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        for cell in walk_apart(cells, Path(folder), size):
            report.cells.append(cell)
            measured.progress(f"{cell.road}, {cell.place}, {cell.format}: {cell.shown({})}")
            measured.keep(report)
    show(report, output)
    return measured.finish(), not report.red


def show(report: RoadsReport, output: Output) -> None:
    pages = dict.fromkeys(page for cell in report.cells for page in cell.pages)
    notes = {page: number for number, page in enumerate(pages, start=1)}
    shown = {(cell.road, cell.place, cell.format): cell.shown(notes) for cell in report.cells}
    formats = [each for each in FORMATS if any(cell.format == each for cell in report.cells)]
    rows = [
        [road, place, *(shown.get((road, place, format), "") for format in formats)]
        for road, place in itertools.product(ROADS, PLACES)
        if any((road, place) == (cell.road, cell.place) for cell in report.cells)
    ]
    output.table(f"{report.size.name} on {report.device}, tokens/s and path", ["road", "experts", *formats], rows)
    for page, number in notes.items():
        output.line(f"  [{number}] docs/{page}")
    for cell in report.red:
        output.line(f"  RED {cell.road}, {cell.place}, {cell.format}: {'; '.join(cell.says)}", style="bold red")


def _column(folder: str, size: str, place: str, format: str, *roads: str) -> None:
    for found in walk([Cell(road, place, format) for road in roads], Path(folder), SIZES[size]):
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    _column(*sys.argv[1:])
