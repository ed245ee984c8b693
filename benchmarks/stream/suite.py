"""Runs the benchmark of streamed experts: resident layers, then fewer and fewer of their experts in slots.

report = run_stream(choose_problem([], None, torch.device("cuda")), tokens=200)
report.decodes[0].us
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from amoeba.stream.bandwidth import read_rate
from amoeba.stream.store.layers import StoredExperts
from amoeba.stream.store.store import Store
from benchmarks.stream import lora, turns
from benchmarks.stream.decode import WARM, DecodeMeasurement, Setting, Tokens, measure
from benchmarks.stream.lora import LoraMeasurement
from benchmarks.stream.place import Place, place_of
from benchmarks.stream.problem import StreamProblem, StreamSize
from benchmarks.stream.stores import FileStore, ResidentStore
from benchmarks.stream.turns import TurnsMeasurement

# Of the tokens: a read takes a hundred times as long as a copy.
_TOKENS_FROM_DISK = 4
# What attention and all else between two layers of experts take, about; it is the time that copies can begin early.
PAUSE_US = 50.0
# Of two sequences in turns: so many of the experts have slots, one of so many, and pauses.
TURNS_SHARES, TURNS_PAUSES = (2, 4), (0.0, PAUSE_US)


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
    turns: list[TurnsMeasurement] = field(default_factory=list)
    disk_bytes_per_second_afterwards: float | None = None

    @property
    def wrong(self) -> list[str]:
        """Reasons of ours without times."""
        found = *self.decodes, self.lora, *self.turns
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
        Setting("25 %, pauses between layers", quarter, experts, pause_us=PAUSE_US),
        Setting("25 %, pauses, copies begin early", quarter, experts, pause_us=PAUSE_US, early=True),
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
        wants_turns = "turns" in problem.parts and place.has_link
        resident = problem.resident(
            max([*layers, size.lora_layers if wants_lora else 1, size.layers if wants_turns else 1])
        )
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
        if wants_turns:
            decodes.measure_turns()
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
        self._residents: dict[tuple[int, float, int], Tokens] = {}

    def measure(self, setting: Setting) -> None:
        problem, place, report, tokens = self._problem, self._place, self._report, self._tokens
        if report.resident_us is None:
            report.resident_us = self._time_resident(len(self._resident))
        is_read = setting.is_on_disk or not place.has_link
        layers = problem.hinted_layers if setting.pause_us else problem.size.layers
        store: Store = self._files() if is_read else ResidentStore(problem, self._resident[:layers])
        self._progress(f"{problem.size.name}: {setting.name}")
        count = max(1, tokens // _TOKENS_FROM_DISK) if setting.is_on_disk else tokens
        resident = self._of_resident(len(store.layers), setting.pause_us)
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

    def measure_turns(self) -> None:
        problem, report, layers = self._problem, self._report, self._problem.size.layers
        if report.resident_us is None:
            report.resident_us = self._time_resident(layers)
        for share in TURNS_SHARES:
            slots = max(1, problem.size.experts // share)
            self._progress(f"{problem.size.name}: two sequences, {slots} slots")
            report.turns += turns.measure(
                problem,
                self._place,
                ResidentStore(problem, self._resident[:layers]),
                slots,
                lambda ids, number: self._of_resident(layers, 0.0, 1 + number).outputs(ids),
                TURNS_PAUSES,
                self._tokens,
                report.link_bytes_per_second,
            )
            self._so_far(report)
            gc.collect()

    def _time_resident(self, layers: int) -> float:
        problem, resident = self._problem, self._of_resident(layers)
        routes = problem.routes(problem.trace(layers, WARM + self._tokens))
        self._progress(f"{problem.size.name}: {layers} layers, resident")
        resident.run(routes[:WARM])
        return resident.run(routes[WARM:]) * 1e6 / layers

    def _of_resident(self, layers: int, pause_us: float = 0.0, seed: int = 1) -> Tokens:
        what = layers, pause_us, seed
        if what not in self._residents:
            kinds = self._resident[:layers]
            self._residents[what] = Tokens(self._problem, self._place, kinds, pause_us=pause_us, seed=seed)
        return self._residents[what]


@contextmanager
def _files(problem: StreamProblem, resident: list[StoredExperts], folder: Path | None) -> Iterator[FileStore]:
    with tempfile.TemporaryDirectory(prefix="amoeba-bench-", dir=folder) as made:
        store = FileStore(problem, resident, Path(made))
        try:
            yield store
        finally:
            store.end()
