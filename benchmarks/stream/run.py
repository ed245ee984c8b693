"""`python -m benchmarks stream`: experts beyond memory. Resident layers, then fewer and fewer of their experts in
slots; a fine-tuning step.

report = run_stream(choose_problem([], None, torch.device("cuda")), tokens=200)
report.decodes[0].us
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.output import Output
from amoeba.stream.report import read_rate
from amoeba.stream.store.layers import StoredExperts
from amoeba.stream.store.store import Store
from benchmarks import command
from benchmarks.stream import lora
from benchmarks.stream.decode import (
    BAR_BYTES_PER_SECOND,
    BAR_TIMES,
    BAR_US,
    WARM,
    DecodeMeasurement,
    Setting,
    Tokens,
    measure,
)
from benchmarks.stream.lora import LoraMeasurement
from benchmarks.stream.place import Place, place_of
from benchmarks.stream.problem import PARTS, StreamProblem, StreamSize
from benchmarks.stream.stores import FileStore, ResidentStore

TOKENS_PER_REPEAT = 10
# Of the tokens: a read takes a hundred times as long as a copy.
_TOKENS_FROM_DISK = 4


@dataclass
class StreamSuiteReport:
    """Rates are bytes/s: of the link with large copies, and of the disk with experts read as a run reads them."""

    size: StreamSize
    device: str
    dtype: str
    expert_bytes: int
    link_bytes_per_second: float | None = None
    disk_bytes_per_second: float | None = None
    resident_us: float | None = None  # of one layer
    decodes: list[DecodeMeasurement] = field(default_factory=list)
    lora: LoraMeasurement | None = None
    disk_bytes_per_second_afterwards: float | None = None

    @property
    def wrong(self) -> list[str]:
        """Reasons of ours without times."""
        found = *self.decodes, self.lora
        return [each.reason for each in found if each is not None and each.reason is not None]


def settings(experts: int, has_link: bool) -> list[Setting]:
    quarter, half = max(1, experts // 4), max(1, experts // 2)
    if not has_link:
        shares = ("100 %", experts), ("50 %, rest on disk", half), ("25 %, rest on disk", quarter)
        return [Setting(name, slots, 0, slots < experts) for name, slots in shares]
    return [
        Setting("100 %", experts, 0),
        Setting("50 %, all in pinned memory", half, experts),
        Setting("25 %, all in pinned memory", quarter, experts),
        Setting("25 %, the CPU computes misses", quarter, experts, miss="cpu"),
        Setting("25 %, misses split (auto)", quarter, experts, miss="auto"),
        Setting("25 %, 25 % in pinned memory, rest on disk", quarter, quarter, is_on_disk=True),
    ]


def run_stream(
    problem: StreamProblem,
    tokens: int,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    so_far: Callable[[StreamSuiteReport], None] = lambda report: None,
    make_place: Callable[[], Place] | None = None,
) -> StreamSuiteReport:
    """folder: for the files of experts, on the disk that is to be measured; None: where temporary files go.
    so_far: called with what there is of the report after each setting."""
    size = problem.size
    report = StreamSuiteReport(
        size, problem.device.type, str(problem.dtype).removeprefix("torch."), problem.entry.expert_bytes
    )
    with ExitStack() as stack:
        place = stack.enter_context(place_of(problem.device) if make_place is None else make_place())
        report.link_bytes_per_second = place.link_rate()
        wanted = [each for each in settings(size.experts, place.has_link) if each.part in problem.parts]
        if problem.format is not None:  # the CPU core reads no codes
            wanted = [each for each in wanted if each.miss == "move"]
        wants_lora = "lora" in problem.parts
        layers = [size.layers if place.has_link and not each.is_on_disk else size.disk_layers for each in wanted]
        resident = problem.resident(max([*layers, size.lora_layers if wants_lora else 1]))
        files = None

        def written() -> FileStore:
            nonlocal files
            if files is None:
                progress(f"{size.name}: writing {size.disk_layers} layers of experts to the disk")
                files = stack.enter_context(_files(problem, resident[: size.disk_layers], folder))
                report.disk_bytes_per_second = read_rate(files).bytes_per_second
            return files

        decodes = _Decodes(problem, place, resident, written, tokens, report, progress, so_far)
        for setting in wanted:
            if not setting.is_on_disk:
                decodes.measure(setting)
        if wants_lora:
            progress(f"{size.name}: a fine-tuning step over {size.lora_layers} layers")
            some = resident[: size.lora_layers]
            store = ResidentStore(problem, some) if place.has_link else written().first(len(some))
            if place.has_link:  # links wake up; the share is of the best that was seen
                rates = report.link_bytes_per_second, place.link_rate()
                report.link_bytes_per_second = max(each for each in rates if each is not None)
            rate = report.link_bytes_per_second if place.has_link else report.disk_bytes_per_second
            with ThreadPoolExecutor(1, thread_name_prefix="writes experts") as pool:
                # its kernels are compiled meanwhile
                writing = pool.submit(written) if any(each.is_on_disk for each in wanted) else None
                ready = (lambda: None) if writing is None else writing.result
                report.lora = lora.measure(problem, place, store, some, rate, ready)
            so_far(report)
        for setting in wanted:  # last: writing files takes longer than all else
            if setting.is_on_disk:
                decodes.measure(setting)
    return report


class _Decodes:
    """One setting after another, beside the resident layers, which are timed ahead of the first."""

    def __init__(
        self,
        problem: StreamProblem,
        place: Place,
        resident: list[StoredExperts],
        files: Callable[[], FileStore],
        tokens: int,
        report: StreamSuiteReport,
        progress: Callable[[str], None],
        so_far: Callable[[StreamSuiteReport], None],
    ) -> None:
        self._problem, self._place, self._resident, self._files = problem, place, resident, files
        self._tokens, self._report, self._progress, self._so_far = tokens, report, progress, so_far
        self._residents: dict[int, Tokens] = {}

    def measure(self, setting: Setting) -> None:
        problem, place, report, tokens = self._problem, self._place, self._report, self._tokens
        if report.resident_us is None:
            report.resident_us = self._time_resident(len(self._resident))
        is_read = setting.is_on_disk or not place.has_link
        store: Store = self._files() if is_read else ResidentStore(problem, self._resident[: problem.size.layers])
        self._progress(f"{problem.size.name}: {setting.name}")
        count = max(1, tokens // _TOKENS_FROM_DISK) if setting.is_on_disk else tokens
        resident = self._of_resident(len(store.layers))
        rates = report.link_bytes_per_second, report.disk_bytes_per_second
        found = measure(problem, place, store, setting, resident, count, *rates)
        if is_read:
            found = self._beside_the_best_rate(found, store)
        report.decodes.append(found)
        self._so_far(report)
        gc.collect()  # slots of this setting, ahead of those of the next

    def _beside_the_best_rate(self, found: DecodeMeasurement, store: Store) -> DecodeMeasurement:
        """A disk may be slower when it is measured than when it is used."""
        report, before = self._report, self._report.disk_bytes_per_second
        after = report.disk_bytes_per_second_afterwards = read_rate(store).bytes_per_second
        if before is None or found.over_disk is None:
            return found
        return replace(found, over_disk=found.over_disk * max(1.0, after / before))

    def _time_resident(self, layers: int) -> float:
        problem, resident = self._problem, self._of_resident(layers)
        routes = problem.routes(problem.trace(layers, WARM + self._tokens))
        self._progress(f"{problem.size.name}: {layers} layers, resident")
        resident.run(routes[:WARM])
        return resident.run(routes[WARM:]) * 1e6 / layers

    def _of_resident(self, layers: int) -> Tokens:
        if layers not in self._residents:
            self._residents[layers] = Tokens(self._problem, self._place, self._resident[:layers])
        return self._residents[layers]


@contextmanager
def _files(problem: StreamProblem, resident: list[StoredExperts], folder: Path | None) -> Iterator[FileStore]:
    with tempfile.TemporaryDirectory(prefix="amoeba-bench-", dir=folder) as made:
        store = FileStore(problem, resident, Path(made))
        try:
            yield store
        finally:
            store.end()


def run(
    problem: StreamProblem,
    repeats: int,
    path: Path | None,
    output: Output,
    make_place: Callable[[], Place] | None = None,
) -> tuple[dict[str, Any], bool]:
    """Prints the table; returns the document, and False if a setting did not give the numbers of resident experts."""
    part = None if problem.parts == PARTS else problem.parts[0]
    again = command("stream", device=problem.device.type, shape=problem.size.name, pass_=part, repeats=repeats)
    measured, said = BenchRun(again, "streams", path, output), list[str]()

    def keep(report: StreamSuiteReport) -> None:
        """After each setting: what is measured is not lost where the rest is stopped, and can be seen."""
        measured.keep(report)
        of_decodes = [line for each in report.decodes for line in (_in_short(each), *_round_lines(each))]
        lines = *of_decodes, *_lora_lines(report)
        for line in lines:
            if line not in said:
                said.append(line)
                output.line(f"  {line}")
                sys.stdout.flush()

    report = run_stream(problem, TOKENS_PER_REPEAT * repeats, None, measured.progress, keep, make_place)
    _print(report, output)
    measured.keep(report)
    return measured.finish(), not report.wrong


def _print(report: StreamSuiteReport, output: Output) -> None:
    size = report.size
    sizes = f"E={size.experts} K={size.top_k} H={size.hidden} I={size.intermediate}"
    timed = [each for each in report.decodes if each.reason is None]
    if timed:
        rows = [_row(each, report) for each in timed]
        if report.resident_us is not None:
            rows.insert(
                0, dict.fromkeys(rows[0], "") | {"": "resident", "us a layer": three_digits(report.resident_us)}
            )
        title = f"{size.name} ({sizes}) one token after another, {report.dtype} on {report.device}"
        output.table(title, list(rows[0]), [list(row.values()) for row in rows])
    for line in _notes(report, timed):
        output.line(f"  {line}")
    for each in report.decodes:
        if each.reason is not None:
            output.line(f"  {each.setting}: refused, {each.reason}", style="bold red")


def _in_short(found: DecodeMeasurement) -> str:
    if found.us is None:
        return f"{found.setting}: refused, {found.reason}"
    said = f"{found.setting}: {three_digits(found.us)} us a layer, {found.hit_rate:.1%} hits"
    if found.simulated_hit_rate is not None:
        said += f" ({found.simulated_hit_rate:.1%} simulated)"
    return said


def _round_lines(found: DecodeMeasurement) -> list[str]:
    if not found.rounds:
        return []
    said = ", ".join(
        three_digits(each.us) + ("" if found.over_bar is None else f" (bar {three_digits(each.bar_us)})")
        for each in found.rounds
    )
    rates = [each.link_bytes_per_second for each in found.rounds if each.link_bytes_per_second is not None]
    link = f"; link {', '.join(f'{rate / 1e9:.3g}' for rate in rates)} GB/s" if rates else ""
    return [f"  {found.setting}; rounds: {said}{link}"]


def _row(found: DecodeMeasurement, report: StreamSuiteReport) -> dict[str, str]:
    assert found.us is not None and found.hits_us is not None and found.hit_rate is not None
    has_link = report.link_bytes_per_second is not None
    row = {
        "": found.setting,
        "layers": str(found.layers),
        "us a layer": three_digits(found.us),
        "median": "-" if found.median_us is None else three_digits(found.median_us),
        "all there": three_digits(found.hits_us),
        "hits": f"{found.hit_rate:.1%}",
        "simulated": "-" if found.simulated_hit_rate is None else f"{found.simulated_hit_rate:.1%}",
    }
    if has_link:
        row |= {
            "MB up": _mb(found.bytes_up_per_token),
            "x least": f"{found.over_least:.2f}",
            "x bar": "-" if found.over_bar is None else f"{found.over_bar:.2f}",
            "of link": "-" if found.share_of_link is None else f"{found.share_of_link:.0%}",
            "ids us": "-" if found.export_us is None else three_digits(found.export_us),
            "by CPU": "-" if not found.computed_per_token else three_digits(found.computed_per_token / found.layers),
            "CPU us": "-" if found.computed_us is None else three_digits(found.computed_us),
        }
    if report.disk_bytes_per_second is not None:
        over = "-" if found.over_disk is None else f"{found.over_disk:.2f}"
        row |= {"MB disk": _mb(found.bytes_from_disk_per_token), "x disk": over}
    return row | {"bits": "same" if found.same_bits else f"{found.error:.0e}"}


def _notes(report: StreamSuiteReport, timed: Sequence[DecodeMeasurement]) -> list[str]:
    lines = []
    rates = (
        ("link", report.link_bytes_per_second),
        ("disk", report.disk_bytes_per_second),
        ("disk afterwards", report.disk_bytes_per_second_afterwards),
    )
    known = [f"{name} {rate / 1e9:.3g} GB/s" for name, rate in rates if rate is not None]
    if known:
        lines.append(f"measured here: {', '.join(known)}; an expert has {report.expert_bytes / 1e6:.3g} MB")
    if timed:
        rounds = max(len(each.rounds) for each in timed)
        lines.append(
            f"us a layer, x: medians of {rounds} rounds, in turns with resident layers; MB: a token; "
            "all there: a token that asks for the same again"
        )
        if report.link_bytes_per_second is not None:
            lines.append(
                "x least: over resident + bytes at the link's rate; ids us: from the kernel's end to the ids read"
            )
            at = f"{BAR_BYTES_PER_SECOND / 1e9:g} GB/s"
            lines.append(f"x bar: over {BAR_TIMES:.2f} x (resident + bytes at {at}) + {BAR_US:g} us")
        if report.disk_bytes_per_second is not None:
            lines.append("x disk: over the bytes from the disk at its rate")
    if any(each.computed_us is not None for each in timed):
        lines.append("by CPU: experts of a layer that it computed and that were not moved; CPU us: it took for one")
    return lines + _lora_lines(report)


def _lora_lines(report: StreamSuiteReport) -> list[str]:
    lines = list[str]()
    if (lora := report.lora) is not None:
        about = f"LoRA step, {lora.layers} layers, {lora.tokens} tokens, rank {lora.rank}, {lora.slots} slots"
        if lora.reason is not None:
            return [*lines, f"{about}: refused, {lora.reason}"]
        assert lora.ms is not None and lora.resident_ms is not None and lora.share_of_link is not None
        of_what = "link" if report.link_bytes_per_second is not None else "disk"
        rate = report.link_bytes_per_second or report.disk_bytes_per_second or 0
        moved = f"{(lora.bytes_per_step or 0) / 1e9:.3g} GB at {lora.share_of_link:.1%} of the {of_what}"
        moved += f"'s {rate / 1e9:.3g} GB/s"
        lines.append(f"{about}: {three_digits(lora.ms)} ms ({three_digits(lora.resident_ms)} resident), {moved}")
    return lines


def _mb(count: float | None) -> str:
    return "-" if count is None else three_digits(count / 1e6)
