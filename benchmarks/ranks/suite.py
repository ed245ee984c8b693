"""Runs the benchmark of experts over ranks: processes of this machine, without an exchange, then with each.

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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amoeba.parallel.processes import LocalRanks, RankFailed
from benchmarks.ranks import worker
from benchmarks.ranks.worker import ALONE, BARE, EXCHANGES, HIDING, IN_STEP, RECEIVED, RankJob

_ROUNDS = 3
# Of one setting in one round: a slow one is repeated less often.
_SECONDS = 2.0
_SECONDS_TO_FAIL = 90.0
_STEPS_OF_PHASES = 5
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
ONE_RANK = "one rank"


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
    """Bytes/s: rows that leave a rank."""

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
    push_bytes_per_second: dict[str, float] = field(default_factory=dict)
    heap_bytes: int | None = None

    def of(self, setting: str) -> RankMeasurement:
        return next(each for each in self.measurements if each.setting == setting)

    @property
    def wrong(self) -> list[str]:
        return [each.setting for each in self.measurements if each.reason is not None and not _is_refusal(each.reason)]


def _is_refusal(reason: str) -> bool:
    return reason.startswith(_REFUSED)


_REFUSED = "cannot serve: "


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
            is_exchange = setting in EXCHANGES
            if (is_exchange or setting == IN_STEP) and (refused := self._refused(setting)) is not None:
                found.reason = _REFUSED + refused
            else:
                self._check(found, first if is_exchange else None, repeats)
            if is_exchange and found.reason is None:
                first = first or setting
            self._so_far(report)
        good = [each for each in report.measurements if each.reason is None]
        for measure in (*[self._time] * _ROUNDS, self._divide):
            for found in good:
                if found.reason is None and (found.ms is None or found.ms < _SECONDS * 500):  # a slow one once
                    measure(found)
                    self._fill_in()
                    self._so_far(report)
        self._measure_travel([each.setting for each in good if each.setting in EXCHANGES and each.reason is None])
        self._fill_in()
        self._so_far(report)
        self._end()

    def _refused(self, setting: str) -> str | None:
        found = self._call(worker.why_not, setting)
        return found if isinstance(found, str) else next((each for each in found if each is not None), None)

    def _check(self, found: RankMeasurement, against: str | None, repeats: int) -> None:
        results = self._call(worker.check, found.setting, against)
        if isinstance(results, str):
            found.reason = results
            return
        different = sorted({name for result in results for name in result.different})
        if different:
            found.reason = f"other bits than {against}: {', '.join(different)}"
            return
        found.peak_bytes = max(result.peak_bytes for result in results)
        one = self._call(worker.step_ms, found.setting, 1)
        if isinstance(one, str):
            found.reason = one
            return
        found.steps = max(min(repeats, int(_SECONDS * 1e3 / max(one))), 1)

    def _time(self, found: RankMeasurement) -> None:
        times = self._call(worker.step_ms, found.setting, found.steps)
        if isinstance(times, str):
            found.reason = times
        else:
            found.rounds_ms.append(max(times))

    def _divide(self, found: RankMeasurement) -> None:
        """Into phases."""
        ranks = self._call(worker.phases, found.setting, min(found.steps, _STEPS_OF_PHASES))
        if isinstance(ranks, str):
            found.reason = ranks
        else:
            found.phases = [Phase(each[0][0], [ms for _, ms in each]) for each in zip(*ranks, strict=True)]

    def _measure_travel(self, settings: Sequence[str]) -> None:
        report = self._report
        for setting in settings:
            self._progress(f"{self._job.ranks} ranks: {setting}, the exchange alone")
            times = self._call(worker.step_ms, BARE + setting, report.of(setting).steps)
            if not isinstance(times, str):
                report.exchange_ms[setting] = max(times)
        if "peers" in settings and self._job.device == "cuda":
            rates = self._call(worker.push_rates)
            if not isinstance(rates, str):
                report.push_bytes_per_second = {name: min(rate[name] for rate in rates) for name in rates[0]}
        sizes = self._call(worker.heap_bytes)
        report.heap_bytes = None if isinstance(sizes, str) else max(sizes)

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

    def _call(self, function: Callable[..., Any], *given: Any) -> list[Any] | str:
        """What each rank found, or why there is nothing."""
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
            return f"rank {next(iter(failure.failures))}: {last[0]}"

    def _end(self) -> None:
        if self._processes is not None and self._processes is not self._given:
            self._processes.close()
        self._processes = None
