"""`python -m benchmarks ranks`: experts over processes of this machine, without an exchange, then with each.

    report = run_ranks(RankJob(2, 16384, 2048, 768, 128, 8, "cuda", torch.bfloat16), repeats=20)
    report.of("peers").over_alone           # times the same processes without an exchange

An exchange whose results have other bits than those of the first one gets no time. A setting that fails ends its
processes; the others are measured in new ones. With CUDA MPS (its daemon is the caller's), each process gets its share
of the multiprocessors, unless CUDA_MPS_ACTIVE_THREAD_PERCENTAGE says otherwise.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amoeba.bench.workload import parse_shape
from amoeba.commands.bench_run import BenchRun, three_digits
from amoeba.commands.options import dtype_name
from amoeba.commands.output import Output
from amoeba.core.errors import bad_value
from amoeba.parallel.processes import LocalRanks, RankFailed
from amoeba.precision.recipes import OF_ALL_TOKENS, SUMMARIES, UNCHANGED
from benchmarks import command
from benchmarks.ranks import worker
from benchmarks.ranks.worker import ALONE, BARE, EXCHANGES, HIDING, IN_STEP, RECEIVED, RankJob

# Of each rank, with the shape that has none of its own to say: two ranks with half of qwen3_30b's tokens each.
_DEFAULT = {"cuda": "16384,2048,768,128,8", "cpu": "256,512,256,32,4"}
_MOST_RANKS = 16
_ROUNDS = 3
# Of one setting in one round: a slow one is repeated less often.
_SECONDS = 2.0
_SECONDS_TO_FAIL = 90.0
_STEPS_OF_PHASES = 5
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ONE_RANK = "one rank"
_REFUSED = "cannot serve: "


class Phase(NamedTuple):
    """What ends there, and how long it took each rank since the one before ended; the mean of some steps."""

    name: str
    ranks_ms: list[float]


@dataclass
class RankMeasurement:
    """Milliseconds of a forward and backward, of the slowest rank; the median of the rounds."""

    setting: str
    reason: str | None = None
    rounds_ms: list[float] = field(default_factory=list)
    steps: int = 0  # of a round
    peak_bytes: int | None = None
    over_alone: float | None = None  # times ALONE
    memory_over_alone: float | None = None
    hidden: float | None = None  # share of the exchange's own time by which the step is not longer than RECEIVED
    phases: list[Phase] = field(default_factory=list)  # of a step, in its order

    @property
    def ms(self) -> float | None:
        return statistics.median(self.rounds_ms) if self.rounds_ms else None


@dataclass
class RanksReport:
    ranks: int
    tokens: int  # of each rank
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    device: str
    dtype: str
    precision: str
    about_device: dict[str, Any] = field(default_factory=dict)
    mps_percentage: str | None = None
    measurements: list[RankMeasurement] = field(default_factory=list)
    exchange_ms: dict[str, float] = field(default_factory=dict)  # with nothing computed
    heap_bytes: int | None = None

    def of(self, setting: str) -> RankMeasurement:
        return next(each for each in self.measurements if each.setting == setting)

    @property
    def wrong(self) -> list[str]:
        failed = [each for each in self.measurements if each.reason is not None]
        return [each.setting for each in failed if not (each.reason or "").startswith(_REFUSED)]


def run_ranks(
    job: RankJob,
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
    so_far: Callable[[RanksReport], object] = lambda report: None,
    processes: LocalRanks | None = None,
    settings: Sequence[str] | None = None,
) -> RanksReport:
    """processes: to be used instead of new ones. settings: beside the first two those; None: all."""
    report = RanksReport(*job[:7], str(job.dtype).removeprefix("torch."), job.precision)
    known = [ONE_RANK] if job.ranks == 1 else [IN_STEP, *EXCHANGES]
    wanted = [each for each in known if job.ranks == 1 or settings is None or each in settings]
    with _share_of_gpu(job) as percentage:
        report.mps_percentage = percentage
        _Run(job, report, progress, so_far, processes).measure(repeats, wanted)
    return report


@contextmanager
def _share_of_gpu(job: RankJob) -> Iterator[str | None]:
    """The environment of the processes that are started inside."""
    if job.device != "cuda" or "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        yield None
        return
    given = os.environ.get(_PERCENTAGE)
    os.environ[_PERCENTAGE] = given or str(100 // job.ranks)
    try:
        yield os.environ[_PERCENTAGE]
    finally:
        if given is None:
            del os.environ[_PERCENTAGE]


class _Failed(Exception):
    """A setting that ended its processes."""


class _Run:
    def __init__(
        self,
        job: RankJob,
        report: RanksReport,
        progress: Callable[[str], None],
        so_far: Callable[[RanksReport], object],
        given: LocalRanks | None,
    ) -> None:
        self._job, self._report, self._progress, self._so_far = job, report, progress, so_far
        self._given, self._processes = given, given
        self._is_prepared = False

    def measure(self, repeats: int, wanted: Sequence[str]) -> None:
        report = self._report
        first: str | None = None
        plain = [ALONE, RECEIVED] if self._job.ranks > 1 else [ALONE]
        for setting in (*plain, *wanted):
            self._progress(f"{self._job.ranks} ranks: {setting}")
            found = RankMeasurement(setting)
            report.measurements.append(found)
            with self._reason_of(found):
                self._check(found, first, repeats)
            if setting in EXCHANGES and found.reason is None:
                first = first or setting
            self._so_far(report)
        good = [each for each in report.measurements if each.reason is None]
        for measure in (*[self._time] * _ROUNDS, self._divide):
            for found in good:
                if found.reason is None and (found.ms is None or found.ms < _SECONDS * 500):  # a slow one once
                    with self._reason_of(found):
                        measure(found)
                    self._fill_in()
                    self._so_far(report)
        self._measure_travel([each.setting for each in good if each.setting in EXCHANGES and each.reason is None])
        self._fill_in()
        self._so_far(report)
        self._end()

    def _check(self, found: RankMeasurement, first: str | None, repeats: int) -> None:
        """first: the exchange whose bits this one's have to be; None for none."""
        is_exchange = found.setting in EXCHANGES
        if is_exchange or found.setting == IN_STEP:
            refused = next((each for each in self._call(worker.why_not, found.setting) if each is not None), None)
            if refused is not None:
                found.reason = _REFUSED + refused
                return
        against = first if is_exchange else None
        results = self._call(worker.check, found.setting, against)
        different = sorted({name for result in results for name in result.different})
        if different:
            found.reason = f"other bits than {against}: {', '.join(different)}"
            return
        found.peak_bytes = max(result.peak_bytes for result in results)
        one = self._call(worker.step_ms, found.setting, 1)
        found.steps = max(min(repeats, int(_SECONDS * 1e3 / max(one))), 1)

    def _time(self, found: RankMeasurement) -> None:
        found.rounds_ms.append(max(self._call(worker.step_ms, found.setting, found.steps)))

    def _divide(self, found: RankMeasurement) -> None:
        """Into phases."""
        ranks = self._call(worker.phases, found.setting, min(found.steps, _STEPS_OF_PHASES))
        found.phases = [Phase(each[0][0], [ms for _, ms in each]) for each in zip(*ranks, strict=True)]

    def _measure_travel(self, settings: Sequence[str]) -> None:
        report = self._report
        for setting in settings:
            self._progress(f"{self._job.ranks} ranks: {setting}, the exchange alone")
            with suppress(_Failed):
                report.exchange_ms[setting] = max(self._call(worker.step_ms, BARE + setting, report.of(setting).steps))
        with suppress(_Failed):
            report.heap_bytes = max(self._call(worker.heap_bytes))

    def _fill_in(self) -> None:
        report = self._report
        alone, received = report.measurements[0], report.measurements[min(1, len(report.measurements) - 1)]
        for found in report.measurements:
            if found.ms is not None and alone.ms is not None:
                found.over_alone = found.ms / alone.ms
            if found.peak_bytes and alone.peak_bytes:
                found.memory_over_alone = found.peak_bytes / alone.peak_bytes
            # what moves the same rows by programs, one after the other with the products: what there is to hide
            plain = found.setting
            for suffix in HIDING:
                plain = plain.removesuffix(suffix)
            exchange = report.exchange_ms.get(plain)
            if exchange and found.ms is not None and received.ms is not None:
                found.hidden = 1 - (found.ms - received.ms) / exchange

    @contextmanager
    def _reason_of(self, found: RankMeasurement) -> Iterator[None]:
        try:
            yield
        except _Failed as failure:
            found.reason = str(failure)

    def _call(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """What each rank found."""
        try:
            if self._processes is None:
                self._processes = LocalRanks(self._job.ranks, preload=(worker.__name__,))
                self._is_prepared = False
            if not self._is_prepared:
                jobs = [(rank, self._job) for rank in range(self._job.ranks)]
                self._report.about_device = self._processes.run(worker.prepare, jobs, seconds=_SECONDS_TO_FAIL)[0]
                self._is_prepared = True
            return self._processes.run(function, [given] * self._job.ranks, seconds=_SECONDS_TO_FAIL)
        except RankFailed as failure:
            self._end()
            last = [text.strip().splitlines()[-1] for text in failure.failures.values()]
            raise _Failed(f"rank {next(iter(failure.failures))}: {last[0]}") from failure

    def _end(self) -> None:
        if self._processes is not None and self._processes is not self._given:
            self._processes.close()
        self._processes = None


def choose_job(
    shapes: Sequence[str],
    ranks: int,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    ours: Sequence[str] = (),
) -> RankJob:
    """ours: a recipe by which the experts train."""
    recipes = [name for name in SUMMARIES if name != OF_ALL_TOKENS]
    if ours and (len(ours) > 1 or ours[0] not in recipes):
        expected = f"one of {', '.join(recipes)}"
        raise bad_value("--ours", expected, ", ".join(ours), "leave it out for the dtype of the weights")
    if not 1 <= ranks <= _MOST_RANKS:
        raise bad_value("--ranks", f"1 to {_MOST_RANKS}", ranks, "each is a process of this machine")
    if len(shapes) > 1 or len(dtypes) > 1:
        raise bad_value("--shape", "one shape and one dtype", "several", "run it once for each")
    shape = parse_shape(shapes[0] if shapes else _DEFAULT[device.type])
    if shape.experts < ranks * shape.top_k:
        expected = f"K experts for each of {ranks} ranks at least"
        raise bad_value("--shape", expected, f"E={shape.experts} K={shape.top_k}", "raise E, or lower K or --ranks")
    if shape.rank or shape.forward_only:
        raise bad_value("--shape", "a layer that is trained", shape.name, "give T,H,I,E,K")
    sizes = shape.tokens, shape.hidden, shape.intermediate, shape.experts, shape.top_k
    return RankJob(ranks, *sizes, device.type, dtypes[0], *ours)


def command_line(job: RankJob, repeats: int) -> str:
    """The command that measures the same again."""
    shape, dtype = ",".join(map(str, job[1:6])), dtype_name(job.dtype)
    recipe = None if job.precision == UNCHANGED else job.precision
    return command("ranks", ranks=job.ranks, device=job.device, shape=shape, dtype=dtype, repeats=repeats, ours=recipe)


def run(job: RankJob, repeats: int, path: Path | None, output: Output) -> tuple[dict[str, Any], bool]:
    """Prints the table; returns the document, and False if an exchange failed or gave other numbers."""
    measured = BenchRun(command_line(job, repeats), "ranks", path, output)
    report = run_ranks(job, repeats, measured.progress, measured.keep)
    _print(report, output)
    measured.keep(report)
    return measured.finish(), not report.wrong


def _print(report: RanksReport, output: Output) -> None:
    sizes = f"T={report.tokens} a rank, H={report.hidden} I={report.intermediate} E={report.experts} K={report.top_k}"
    dtype = report.dtype if report.precision == UNCHANGED else f"{report.precision} beside {report.dtype}"
    title = f"{report.ranks} ranks, {sizes}, {dtype} on {report.device}"
    rows = [_row(each, report) for each in report.measurements if each.ms is not None]
    if rows:
        output.table(title, list(rows[0]), [list(row.values()) for row in rows])
    output.line("  ms: forward and backward, the slowest rank; x and memory: over the first line")
    if report.ranks > 1:
        output.line(
            "  exchange ms: the same rows there and back, nothing computed; hidden: the share of it that the step"
        )
        output.line("  is not longer than with the received rows alone")
    for each in report.measurements:
        if len(each.phases) > 2:
            phases = (f"{phase.name} {' '.join(f'{ms:.2f}' for ms in phase.ranks_ms)}" for phase in each.phases)
            output.line(f"  {each.setting}, ms of each rank: {'; '.join(phases)}")
    about = [f"{name} {value}" for name, value in report.about_device.items()]
    about += [] if report.mps_percentage is None else [f"MPS, {report.mps_percentage} % each"]
    about += [f"heap {report.heap_bytes / 2**20:.0f} MiB a rank, not in the peaks"] if report.heap_bytes else []
    if about:
        output.line(f"  {', '.join(about)}")
    for each in report.measurements:
        if each.reason is not None:
            style = "bold red" if each.setting in report.wrong else None
            output.line(f"  {each.setting}: {each.reason}", style=style)


def _row(found: RankMeasurement, report: RanksReport) -> dict[str, str]:
    assert found.ms is not None
    exchange = report.exchange_ms.get(found.setting)
    return {
        "": found.setting,
        "ms": three_digits(found.ms),
        "x": "-" if found.over_alone is None else f"{found.over_alone:.3f}",
        "peak MiB": "-" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:.0f}",
        "memory": "-" if found.memory_over_alone is None else f"{found.memory_over_alone:.2f}",
        "exchange ms": "-" if exchange is None else three_digits(exchange),
        "hidden": "-" if found.hidden is None else f"{found.hidden:.0%}",
    }
