"""The commands as a user meets them: exit codes, the JSON line, errors that say what to do."""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import fields, make_dataclass

import pytest
import torch
from few_cases import ENVIRONMENT, TINY, all_commands, invoke, last_line, only_few_cases
from typer.main import get_command

from amoeba.backends import eager, fp8_choice, registry
from amoeba.bench import suite
from amoeba.bench.suite import Measurement
from amoeba.bench.timing import Ceilings, Product
from amoeba.bench.workload import Shape
from amoeba.cli import app
from amoeba.commands import bench_layers as bench_command
from amoeba.commands.options import FROZEN_PRECISIONS, experts_in
from amoeba.commands.output import Output
from amoeba.commands.over_ranks import over_ranks
from amoeba.core.weights import ExpertWeights
from amoeba.cpu.build import CoreUnavailable
from amoeba.jobs.settings import FinetuneSettings, TrainSettings
from amoeba.placements import placement_names
from noted_output import NotedOutput
from planted_backend import Planted, plant


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    only_few_cases(monkeypatch)


def test_every_command_has_the_flag_of_verbose():
    for words, command in all_commands():
        assert hasattr(command, "commands") or any("-v" in parameter.opts for parameter in command.params), words


def test_every_option_of_every_command_has_a_help_text():
    for command in (get_command(app), *(command for _, command in all_commands())):
        assert command.help, command.name
        for parameter in command.params:
            assert parameter.help, f"amoeba {command.name} {parameter.opts[0]}"


@pytest.mark.parametrize(("name", "kind"), [("train", TrainSettings), ("finetune", FinetuneSettings)])
def test_a_default_that_a_help_text_names_is_that_of_the_settings(name, kind):
    defaults = {field.name: field.default for field in fields(kind)}
    said = 0
    for parameter in get_command(app).commands[name].params:
        number = re.search(r"default:? ([\d.e-]*\d)", parameter.help, re.IGNORECASE)
        if number is not None and parameter.name in defaults:
            assert float(number[1]) == defaults[parameter.name], parameter.help
            said += 1
    assert said >= 5


def test_precisions_of_frozen_experts_are_the_placements_in_codes():
    in_codes = {experts_in(name, None) for name in FROZEN_PRECISIONS if name != "bf16"}
    assert in_codes == {name for name in placement_names() if name.endswith("-weights") or name == "w8a8"}
    for experts in (None, "auto", "resident", "nvfp4-weights"):
        assert experts_in("nvfp4", experts) == "nvfp4-weights"
        assert experts_in(None, experts) == experts
    assert (experts_in("bf16", None), experts_in("bf16", "cpu-int8")) == (None, "cpu-int8")
    for experts in ("w8a8", "fp8-weights"):
        with pytest.raises(ValueError, match=f"--experts {experts}"):
            experts_in("bf16", experts)


def test_finetune_takes_a_precision_of_its_frozen_experts(monkeypatch):
    seen = []
    ended = make_dataclass("Ended", [("exit_code", int, 0)])
    monkeypatch.setattr(
        "amoeba.commands.over_ranks.job_over_ranks",
        lambda job, told, *_, **__: (seen.append(told.experts) or ended(), False),
    )
    for words, experts in ((("--precision", "fp8"), "fp8-weights"), ((), "auto")):
        assert invoke("finetune", "model", "--data", "x.jsonl", *words).exit_code == 0
        assert seen.pop() == experts


def test_finetune_refuses_products_without_gradients():
    result = invoke("finetune", "model", "--data", "x.jsonl", "--precision", "w8a8")
    assert result.exit_code == 2 and "w8a8, which is for generating" in result.output
    assert "--precision fp8" in result.output


def test_doctor_describes_the_machine_and_every_backend():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    document = last_line(result)
    assert document["machine"]["cpu"]["cores"] >= 1
    assert document["versions"]["torch"] == torch.__version__
    assert document["rates"].keys() >= {"cpu_flops", "cpu_bandwidth", "disk"}
    assert document["bfloat16_on_cpu"]["computed_in"] in ("bfloat16", "float32")
    assert [row["name"] for row in document["placements"]] == [
        *("cpu-bf16", "cpu-int8", "cpu-int8-bf16"),
        *("fp8-weights", "mxfp4-weights", "mxfp8-weights", "nvfp4-weights", "w8a8"),
    ]
    assert all((row["how"] is None) != (row["why_not"] is None) for row in document["placements"])
    names = {backend.name for backend in registry.backends_of(ExpertWeights, torch.device("cpu"))}
    here = {row["backend"]: row for row in document["backends"] if row["device"] == "cpu"}
    assert here.keys() == names | {"tasks", "cpu-fused", "exact"}
    assert not any(row["auto"] for row in here.values() if row["by_name"])
    for row in document["backends"]:
        for reason in row["refusals"].values():
            assert reason is None or reason in result.stdout
    taken = [dtype for row in document["backends"] if row["device"] == "cpu" for dtype in row["auto"]]
    assert sorted(taken) == ["bfloat16", "float16", "float32", "float64"]
    in_fp8 = {row["name"]: row["backend"] for row in document["precisions"] if row["device"] == "cpu"}
    assert "never fp8, which needs a GPU with fp8" in in_fp8.pop("auto")
    assert in_fp8.keys() == {"fp8", "fp8-ste", "fp8-saved", "fp8-all", "mxfp8", "nvfp4"} and all(
        "plain torch" in backend for backend in in_fp8.values()
    )


def test_doctor_says_from_how_many_rows_on_auto_takes_fp8(monkeypatch):
    monkeypatch.setattr(fp8_choice.BACKEND, "why_not", lambda request: None)
    document = last_line(invoke("doctor", "--json"))
    (told,) = (row["backend"] for row in document["precisions"] if row["name"] == "auto" and row["device"] == "cpu")
    assert "from 1024 rows an expert on (256 within UnchangedWeights); else " in told


@pytest.mark.parametrize(
    ("policy", "threads", "said"),
    [
        (None, 2, "OMP_WAIT_POLICY is not set: they spin; where others compute too, set it to passive"),
        ("passive", 2, "OMP_WAIT_POLICY=passive"),
        (None, 1, "torch has one thread here"),
    ],
)
def test_doctor_says_that_waiting_threads_spin(policy, threads, said, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    found = last_line(result)["waiting_threads"]
    assert found["omp_wait_policy"] == policy
    assert found["what"].startswith(said)
    assert found["what"] in result.stdout


def test_doctor_says_why_experts_cannot_be_packed(monkeypatch):
    def unavailable():
        raise CoreUnavailable("no C++ compiler was found")

    monkeypatch.setattr("amoeba.cpu.placements.load_packed", unavailable)
    result = invoke("doctor", "--json")
    assert "packed for the CPU in int8; not here: no C++ compiler was found" in result.stdout
    for row in last_line(result)["placements"]:
        if row["name"].startswith("cpu-"):
            assert (row["how"], row["why_not"]) == (None, "no C++ compiler was found")


def test_bench_writes_a_document_and_refuses_to_overwrite_it(tmp_path):
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "training", "--repeats", "1")
    result = invoke(*words, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == last_line(result)
    assert str(tmp_path) not in written.read_text()
    again = invoke(*words, "--out", str(tmp_path))
    assert again.exit_code == 2
    assert "not overwritten" in again.stderr


def test_a_benchmark_that_is_stopped_leaves_what_it_has_measured(tmp_path, monkeypatch):
    real, asked = suite._report, []

    def report(*arguments):
        asked.append(arguments)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(suite, "_report", report)
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "both", "--repeats", "1", "--out", str(tmp_path))
    result = invoke(*words)
    assert result.exit_code != 0
    (written,) = tmp_path.iterdir()
    document = json.loads(written.read_text())
    assert not document["finished"] and len(document["results"]) == 1
    assert "amoeba cpu" in result.stdout or "amoeba eager" in result.stdout, "its table was printed, too"


def test_bench_exits_with_1_when_one_of_ours_is_wrong(monkeypatch):
    def wrong(request):
        return 1.01 * eager.BACKEND.run(request)

    plant(monkeypatch, Planted("broken", wrong))
    result = invoke("bench", "--device", "cpu", "--shape", TINY, "--pass", "forward", "--repeats", "1", "--json")
    assert result.exit_code == 1
    assert "amoeba broken: refused, out of tolerance: output 1.0e-02 > 1e-05" in result.stdout
    measurements = last_line(result)["results"][0]["measurements"]
    assert [m["median_ms"] for m in measurements if m["implementation"] == "amoeba broken"] == [None]


def test_a_result_with_infinite_errors_is_written_as_strict_json(monkeypatch, tmp_path):
    def not_a_number(request):
        return float("nan") * eager.BACKEND.run(request)

    plant(monkeypatch, Planted("broken", not_a_number))
    words = ("bench", "--device", "cpu", "--shape", TINY, "--pass", "forward", "--repeats", "1")
    assert invoke(*words, "--out", str(tmp_path)).exit_code == 1
    (written,) = tmp_path.iterdir()
    assert "Infinity" not in written.read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bench", "--shape", "1,2,3"), "--shape: expected a name (small, "),
        (("bench", "--shape", "8,8,8,4,5"), "--shape: expected K at most E (4); got K = 5"),
        (("bench", "--suite", "huge"), "--suite: expected one of small, cpu, gpu; got 'huge'"),
        (("bench", "--suite", "model", "--shape", "1b", "--pass", "lora"), "run: python -m benchmarks models"),
        (("bench", "--suite", "stream"), "run: python -m benchmarks stream"),
        (("bench", "--device", "cpu", "--sustained", "4"), "--sustained: expected a GPU whose clocks and watts"),
        (("bench", "--suite", "cpu", "--shape", "small"), "either --shape or --suite"),
        (("bench", "--pass", "backward"), "--pass: expected one of forward, training, both; got 'backward'"),
        (("bench", "--device", "tpu"), "--device: expected one of auto, cpu, cuda; got 'tpu'"),
        (("verify", "--dtype", "int8"), "--dtype: expected one of float64, "),
        (("verify", "--device", "cpu", "--backend", "fastest"), "--backend: expected one of "),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_was_expected(words, expected):
    result = invoke(*words)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert not result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_asking_for_a_gpu_that_is_not_there_says_so():
    result = invoke("verify", "--device", "cuda")
    assert result.exit_code == 2
    assert "finds no GPU" in result.stderr


@pytest.mark.thorough
def test_as_a_process_the_last_line_is_json_and_the_log_is_on_stderr():
    start = """
        import atexit, logging, runpy
        atexit.register(logging.getLogger("amoeba.experts").info, "said by the library")
        runpy.run_module("amoeba", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(start), "doctor", "--json", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["document"] == "amoeba doctor"
    assert "amoeba: said by the library" in done.stderr


def test_no_cell_is_cut_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    names = [f"implementation {index}" for index in range(4)]
    Output().table("title", ["", *names], [["a", "1.234", "2.345", "3.456", "4.567"]])
    out = capsys.readouterr().out
    assert "\x1b" in out
    assert "…" not in out
    assert all(cell in out for cell in ("1.234", "2.345", "3.456", "4.567"))


def bench_tables(measure) -> tuple[NotedOutput, dict]:
    output = NotedOutput()
    shapes = [Shape("layer", 37, 32, 16, 6, 2), Shape("step", 1, 32, 16, 6, 2, forward_only=True)]
    plan = suite.Plan(shapes, torch.device("cpu"), [torch.float32], ["training"], 1)
    document, _ = bench_command.run(plan, None, output, ceilings=measure)
    return output, document


def test_bench_shows_the_share_of_the_ceilings():
    limits = Ceilings("cpu", {"float32": Product(2048, 1e9)}, copied_bytes=4096, copy_bytes_per_second=1e8)
    output, document = bench_tables(lambda device, dtypes: limits)
    assert output.lines[0] == limits.line()
    assert document["ceilings"]["copy_bytes_per_second"] == 1e8
    for (columns, rows), result, before, column, rate, limit in zip(
        [table[1:] for table in output.tables],
        document["results"],
        ("GFLOP/s", "weights GB/s"),
        ("of matmul", "of copy"),
        ("flops_per_second", "weight_bytes_per_second"),
        (1e9, 1e8),
        strict=True,
    ):
        place = columns.index(column)
        assert columns[place - 1] == before
        assert len([name for name in columns if name.startswith("of ")]) == 1
        timed = [m for m in result["measurements"] if m["status"] == "timed"]
        assert [row[place] for row in rows] == [f"{100 * m[rate] / limit:.0f}%" for m in timed]


def test_bench_without_ceilings_shows_no_shares():
    output, document = bench_tables(None)
    assert document["ceilings"] is None
    assert not [name for _, columns, _ in output.tables for name in columns if name.startswith("of ")]
    assert not [line for line in output.lines if "ceilings" in line]


def test_one_process_resumes_a_run_over_ranks_but_starts_none(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with over_ranks("ranks", NotedOutput(), resume=True) as rank_zero:
        assert rank_zero.count == 1 and rank_zero.ranks is not None
    with (
        pytest.raises(ValueError, match="--experts ranks: expected several processes, started by torchrun"),
        over_ranks("ranks", NotedOutput()),
    ):
        pass


# ---- What `amoeba bench` says of implementations that have no time, and of names that are none


def test_those_that_share_a_reason_are_told_in_one_line():
    timed = Measurement("amoeba cpu", True, "timed")
    left_out = [Measurement(f"amoeba {name}", True, "left out", "needs a GPU") for name in ("fp8", "fp8, h recomputed")]
    refused = Measurement("eager", False, "refused", "needs a GPU")
    assert bench_command._untimed([timed, *left_out, refused]) == {
        ("left out", "needs a GPU"): ["amoeba fp8", "amoeba fp8, h recomputed"],
        ("refused", "needs a GPU"): ["eager"],
    }


def test_names_with_a_comma_can_be_told_apart_in_the_error():
    with pytest.raises(ValueError, match=r"--ours: expected one of: .*; fp8, weights unchanged; .*got 'fp9'"):
        bench_command.choose_ours(["fp8", "fp9"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--for", "generate"), "name the GPU to compile for"),
        (("--gpu", "sm_1"), "one of sm_80"),
        (("--for", "tune"), "--for"),
    ],
)
def test_warm_says_what_it_wants(monkeypatch, more, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = more if said.startswith(("name", "one")) else (*more, "--gpu", "sm_90")
    result = invoke("warm", "tiny", *words)
    assert result.exit_code == 2
    assert said.lower() in result.output.lower()
