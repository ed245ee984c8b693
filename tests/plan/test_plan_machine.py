"""What a plan knows of machines: measured once and kept, or described."""

import json

import pytest

from amoeba.plan import machine
from amoeba.plan.machine import CARDS, described_machine, measured_machine, rates_in_words
from amoeba.stream.store import compiled_reads


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Measurements in a cache of their own, on a machine that is said to be idle."""
    compiled_reads._library()  # from the cache that all share: it would be compiled once more
    monkeypatch.setenv("AMOEBA_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "load_average", lambda: 0.0)
    return tmp_path


def test_rates_are_measured_once_and_kept(quick, monkeypatch):
    unknown = measured_machine(measure=False, gpu=False)
    assert {"cpu_flops", "cpu_bandwidth", "disk"} <= set(unknown.assumed) and not unknown.is_measured
    found = measured_machine(gpu=False)
    assert found.is_measured and all(rate > 0 for rate in found.rates.values())
    monkeypatch.setattr(machine, "measure_ceilings", None)
    assert measured_machine(measure=False, gpu=False).rates == found.rates
    assert not list(quick.glob(".disk*")), "the file that was read is gone"


def test_the_disk_is_timed_once_its_threads_have_started(quick, monkeypatch):
    class Slow(machine.Reader):
        """Takes a second for its first read, as one that is compiled then."""

        def read(self, ranges, **options):
            clock["now"] += 0.01 if clock.pop("begun", None) else 1.0
            clock["begun"] = True
            return super().read(ranges, **options)

    clock = {"now": 0.0}
    monkeypatch.setattr(machine, "Reader", Slow)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock["now"])
    assert machine._disk_rate() == pytest.approx((4 << 20) / 0.01)


def test_what_a_busy_machine_gives_is_not_kept(quick, monkeypatch):
    monkeypatch.setattr(machine, "load_average", lambda: 1000.0)
    assert measured_machine(gpu=False).is_measured
    assert not measured_machine(measure=False, gpu=False).is_measured


def test_cards_are_marked_as_public_figures():
    for name in CARDS:
        found = described_machine(name)
        assert found.source == "public figures" and found.gpu == name and found.vram_free == found.vram_bytes
        assert found.gpu_bandwidth < CARDS[name]["gpu_bandwidth"], "nobody reaches them"
    assert described_machine("RTX 4090").vram_bytes == 24 * 2**30


def test_a_budget_of_no_gpu_memory_takes_the_gpu_away():
    found = described_machine("4090").within(0, None)
    assert found.device == "cpu" and found.gpu is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "got list"),
        ("{", "a JSON object"),
        ('{"speed": 3}', "got speed"),
        ('{"link": -1}', "link in"),
        ('{"link": "fast"}', "a number above 0"),
        ('{"card": "9999"}', "card in"),
        ('{"link": NaN}', "link in"),
        ('{"vram_bytes": "24GiB", "link": 3e10}', "none for gpu_flops, gpu_bandwidth"),
    ],
)
def test_a_description_that_is_wrong_is_refused(tmp_path, content, said):
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        described_machine(str(path))


def test_a_description_without_a_card_is_a_machine_without_a_gpu(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"ram_bytes": "32GiB", "cpu_bandwidth": 80e9}))
    found = described_machine(str(path))
    assert found.gpu is None and found.ram_free == 32 * 2**30
    assert ("host memory", "80 GB/s") in rates_in_words(found.rates)
