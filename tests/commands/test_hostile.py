"""What a hostile user, folder or machine gives the commands ends in one sentence: no traceback, no code of others."""

import ast
import errno
import io
import json
import os
import pickle
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from amoeba import cli
from amoeba.commands import exits
from amoeba.data import documents as chat_template
from amoeba.data.documents import Message, by_template
from amoeba.jobs.convert.merge import merge
from amoeba.system.files import shell_command
from hostile_folders import (
    POSITIONS,
    bring_code,
    byte_tokenizer,
    change_json,
    cut_short,
    drop_tensor,
    save_adapter,
    save_model,
    tiny,
)
from selection import each_value_once

SOURCE = Path(__file__).resolve().parents[2] / "src"
TEXT = "a few words to learn from, and some more of them.\n\n" * 40

pytestmark = pytest.mark.filterwarnings("ignore")


class Place(NamedTuple):
    """Copies that a case may spoil."""

    model: Path
    adapter: Path
    folder: Path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_model(folder / "model")
    save_adapter(folder / "adapter", tiny())
    save_model(folder / "deeper", num_hidden_layers=3)
    save_model(folder / "mixtral", "mixtral", intermediate_size=24)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Place:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return Place(tmp_path / "model", tmp_path / "adapter", tmp_path)


# --- the table


def generate(*more: object) -> Callable[[Place], list[object]]:
    return lambda place: ["generate", place.model, "Once", "--max-new-tokens", 1, *more]


def adapted(place: Place) -> list[object]:
    return [*generate()(place), "--adapter", place.adapter]


def train(*more: object) -> Callable[[Place], list[object]]:
    words = ["--steps", 1, "--sequence-length", 32]
    return lambda place: ["train", "--model", place.model, "--data", place.folder / "text.txt", "--out",
                          place.folder / "run", *words, *more]  # fmt: skip


def without_weights(place: Place, instead: str) -> None:
    (place.model / "model.safetensors").unlink()
    (place.model / instead).write_bytes(pickle.dumps({"weight": 1}))


def template(source: str) -> Callable[[Place], None]:
    return lambda place: byte_tokenizer(source).save_pretrained(place.model)


def nothing(place: Place) -> None:
    pass


def merged_before(place: Place) -> None:
    merge(place.model, place.adapter, place.folder / "merged")


CHAT = generate("--chat")
CASES: dict[str, tuple[Callable[[Place], object], Callable[[Place], list[object]], str]] = {
    # model folders
    "config.json that is no JSON": (lambda p: cut_short(p.model / "config.json"), generate(), "config.json: expected"),
    "config.json that is a list": (lambda p: (p.model / "config.json").write_text("[]"), generate(), "got a list"),
    "config.json of brackets without end": (
        lambda p: (p.model / "config.json").write_text("[" * 100_000), generate(), "invalid JSON"),
    "a size that is a word": (
        lambda p: change_json(p.model / "config.json", hidden_size="big"), generate(), "whose config.json loads"),
    "a size below 0": (
        lambda p: change_json(p.model / "config.json", hidden_size=-4), generate(), "whose model loads"),
    "a size other than the weights'": (
        lambda p: change_json(p.model / "config.json", intermediate_size=64, moe_intermediate_size=64), generate(),
        "weights of the sizes that config.json gives: (6, 32, 64) of model.layers.0.mlp.experts.down_proj; got (6, 32"),
    "more experts for a token than there are": (
        lambda p: change_json(p.model / "config.json", num_experts_per_tok=7), train(), "a number from 1 to 6"),
    "a model in place of a run to resume": (
        nothing, lambda p: ["train", "--resume", p.model], "the folder of an earlier run; got"),
    "an unknown architecture": (
        lambda p: change_json(p.model / "config.json", model_type="gpt9"), generate(), "gpt9"),
    "an architecture that is a number": (
        lambda p: change_json(p.model / "config.json", model_type=9), generate(), "MODEL: expected"),
    "tokenizer.json cut short": (lambda p: cut_short(p.model / "tokenizer.json"), generate(), "whose tokenizer loads"),
    "weights cut short": (lambda p: cut_short(p.model / "model.safetensors"), generate(), "complete safetensors file"),
    "weights of no bytes": (
        lambda p: (p.model / "model.safetensors").write_bytes(b""), generate(),
        "model.safetensors: expected a complete"),
    "a weight that is missing": (
        lambda p: drop_tensor(p.model / "model.safetensors", "q_proj.weight"), generate(),
        "none for model.layers.0.self_attn.q_proj.weight"),
    "weights as a pickle": (
        lambda p: without_weights(p, "pytorch_model.bin"), generate(), "pytorch_model.bin in"),
    "weights as a pickle to train on": (
        lambda p: without_weights(p, "pytorch_model.bin"), train(), "a pickle, which aMoEba does not read"),
    "weights cut short to train on": (
        lambda p: cut_short(p.model / "model.safetensors"), train(), "a complete safetensors file"),
    "weights without their tokenizer": (
        lambda p: [path.unlink() for path in p.model.glob("tokenizer*")], train(), "a checkpoint with a tokenizer"),
    "rows longer than the model's positions": (
        nothing, train("--sequence-length", POSITIONS + 1), f"at most {POSITIONS}, the model's max_position"),
    "ids beyond the model's vocabulary": (
        lambda p: (change_json(p.model / "config.json", vocab_size=99), (p.model / "model.safetensors").unlink()),
        train("--vocab-size", 300), "ids below the model's vocab_size, 99"),
    # chat templates
    "a template that raises": (template("{{ raise_exception('never') }}"), CHAT, "never"),
    "a template that divides by 0": (template("{{ 1 / 0 }}"), CHAT, "division by zero"),
    "a template that is none": (template("{% for"), CHAT, "the tokenizer's chat template accepts"),
    "a template without an end": (
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"), CHAT,
        "it ran for more than"),
    "a template that calls itself": (
        template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), CHAT, "recursion"),
    "a template that computes for years": (template("{{ 10 ** 10 ** 10 }}"), CHAT, "it computes powers"),
    "a template that writes a book": (template("{{ 'x' * 2000000 }}"), CHAT, "it wrote 2,000,000 characters"),
    "a template that looks into Python": (
        template("{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}"), CHAT, "unsafe"),
    # adapters
    "an adapter as a pickle": (
        lambda p: (p.adapter / "adapter_model.safetensors").rename(p.adapter / "adapter_model.bin"), adapted,
        "adapter_model.bin there is a pickle and not read"),
    "an adapter cut short": (
        lambda p: cut_short(p.adapter / "adapter_model.safetensors"), adapted, "adapter_model.safetensors: expected"),
    "adapter_config.json that is no JSON": (
        lambda p: cut_short(p.adapter / "adapter_config.json"), adapted, "adapter_config.json: expected JSON"),
    "adapter targets that are a number": (
        lambda p: change_json(p.adapter / "adapter_config.json", target_modules=7), adapted,
        "target_modules: expected a list of names or a string; got 7"),
    "adapter ranks that are a list": (
        lambda p: change_json(p.adapter / "adapter_config.json", rank_pattern=["q"]), adapted, "expected an object"),
    "an adapter pattern that is none": (
        lambda p: change_json(p.adapter / "adapter_config.json", rank_pattern={"(": 2}), adapted, "a regular"),
    "an adapter of another architecture of the same sizes": (
        nothing, lambda p: ["generate", p.folder / "mixtral", "Once", "--adapter", p.adapter],
        "model_type of the base model: expected 'mixtral'; got 'qwen3_moe'"),
    "an adapter of 2 layers on a base of 3": (
        nothing, lambda p: ["generate", p.folder / "deeper", "Once", "--adapter", p.adapter],
        "layers of the base model: expected 3; got 2"),
    "merging twice": (
        merged_before, lambda p: ["merge", p.folder / "merged", "--adapter", p.adapter, "--out", p.folder / "again"],
        "--adapter: expected an adapter that is not merged into the model yet"),
    "an adapter on the model that it was merged into": (
        merged_before, lambda p: ["generate", p.folder / "merged", "Once", "--adapter", p.adapter],
        "--adapter: expected an adapter that is not merged into the model yet"),
    "merging into a file": (
        nothing, lambda p: ["merge", p.model, "--adapter", p.adapter, "--out", p.folder / "text.txt" / "merged"],
        "--out: expected room to write"),
    # words and data
    "a prompt that is no UTF-8": (
        nothing, lambda p: ["generate", p.model, os.fsdecode(b"caf\xe9")], "prompt: expected text in UTF-8"),
    "data without an end": (nothing, train("--data", "/dev/zero"), "a device, which has no end"),
    "data that leads nowhere": (
        lambda p: ((p.folder / "data").mkdir(), (p.folder / "data" / "a.txt").symlink_to(p.folder / "nothing")),
        lambda p: [*train()(p), "--data", p.folder / "data"], "a.txt: expected a file or folder that can be read"),
    # other commands
    "a report on a model": (nothing, lambda p: ["report", p.model], "expected a training run (metrics.jsonl"),
    "a report on a file": (nothing, lambda p: ["report", p.folder / "text.txt"], "the folder of a training run"),
    "a report into a file's folder": (
        lambda p: (p.folder / "metrics.jsonl").write_text(""),
        lambda p: ["report", p.folder, "--out", p.folder / "text.txt" / "page.html"], "page.html: expected a file or"),
    "bench into a file": (
        nothing, lambda p: ["bench", "--out", p.folder / "text.txt"], "--out: expected a folder; got the file"),
    "bench into a folder that cannot be": (
        nothing, lambda p: ["bench", "--out", p.folder / "text.txt" / "results"], "expected a file or folder that can"),
    "bench of a shape beyond any memory": (
        nothing, lambda p: ["bench", "--device", "cpu", "--shape", "512,99999,99999,999,8"], "--shape: expected one"),
    "bench of a shape beyond 64 bits": (
        nothing, lambda p: ["bench", "--device", "cpu", "--shape", f"512,{10**30},8,4,2"], "--shape: expected one"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hostile_input_ends_in_one_sentence(name, place, amoeba, monkeypatch):
    if name == "a template without an end":
        monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.5)
    spoil, words, wanted = CASES[name]
    spoil(place)
    ended = amoeba(*words(place))
    assert ended.code == exits.BAD_USAGE, ended.err
    assert re.fullmatch(r"amoeba: .+: expected .+; got .+\. [A-Z`].+\.", ended.sentence), ended.err
    assert wanted in ended.sentence
    assert "Traceback" not in ended.out + ended.err
    assert not (place.folder / "again").exists()


def test_a_prompt_on_stdin_that_is_no_utf8_is_a_sentence(place, amoeba, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    ended = amoeba("generate", place.model, "-")
    assert ended.code == exits.BAD_USAGE
    assert "stdin: expected text in UTF-8; got the byte 0xe9 at offset 3" in ended.sentence


# --- Python code in a folder


CODE_CASES = {
    "of the configuration": ("config.json", {"AutoConfig": "evil.Config"}, {"model_type": "theirs"}),
    "of the model": ("config.json", {"AutoModelForCausalLM": "evil.Model"}, {"model_type": "siglip"}),
}


@each_value_once()
@pytest.mark.parametrize("name", CODE_CASES)
@pytest.mark.parametrize("command", ["generate", "merge", "finetune", "train"])
def test_code_in_a_folder_does_not_run_unless_the_flag_says_so(name, command, place, amoeba, monkeypatch):
    """`echo y | amoeba generate FOLDER`"""
    mark = place.folder / "mark"
    file, auto_map, changes = CODE_CASES[name]
    bring_code(place.model, file, auto_map, mark, **changes)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    words = {
        "generate": generate()(place),
        "merge": ["merge", place.model, "--adapter", place.adapter, "--out", place.folder / "merged"],
        "finetune": ["finetune", place.model, "--data", place.folder / "text.txt", "--out", place.folder / "run"],
        "train": train()(place),
    }[command]
    ended = amoeba(*words)
    assert not mark.exists()
    assert ended.code == exits.BAD_USAGE
    assert "--trust-remote-code" in ended.sentence
    if command == "generate":
        ended = amoeba(*words, "--trust-remote-code")
        assert mark.read_text() == "ran"
        assert ended.code == exits.BAD_USAGE  # there is no such class in the code
        assert "Traceback" not in ended.err


def test_code_of_a_tokenizer_does_not_run_where_transformers_has_its_own(place, amoeba, monkeypatch):
    mark = place.folder / "mark"
    bring_code(place.model, "tokenizer_config.json", {"AutoTokenizer": [None, "evil.Theirs"]}, mark)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    assert amoeba(*generate()(place)).code == 0
    assert not mark.exists()


def texts(pattern: str) -> Iterator[tuple[Path, str]]:
    """Of our files in which it occurs: to parse them all takes seconds."""
    for path in SOURCE.rglob("*.py"):
        if re.search(pattern, text := path.read_text()):
            yield path, text


def test_every_call_that_could_run_code_of_others_says_whether_it_may():
    """Left out, transformers asks on the terminal, and takes its answer from a pipe."""
    found = 0
    for path, text in texts(r"\b(?:from_pretrained|from_config)\b"):
        for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("from_pretrained", "from_config"):
                found += 1
                assert any(k.arg == "trust_remote_code" for k in call.keywords), f"{path}:{call.lineno}"
    assert found >= 5


# --- commands that are printed


AWKWARD = 'my models; it\'s "here" $HOME'


def test_a_command_that_is_printed_can_be_copied(place, amoeba):
    out = place.folder / AWKWARD / "merged"
    ended = amoeba("merge", place.model, "--adapter", place.adapter, "--out", out)
    assert ended.code == 0, ended.err
    (line,) = (line for line in ended.out.splitlines() if line.startswith("try: "))
    assert shlex.split(line.removeprefix("try: ")) == ["amoeba", "generate", str(out), "..."]


def test_every_command_that_is_printed_is_quoted():
    assert shlex.split(shell_command("amoeba train", "--resume", AWKWARD)) == ["amoeba", "train", "--resume", AWKWARD]
    commands = r"amoeba (?:train|finetune|generate|merge|report)\b[^`']*\{|--(?:resume|adapter|out|data|model) \{"
    for path, text in texts(r"amoeba (?:train|finetune|generate|merge|report)\b|--(?:resume|adapter|out|data|model) "):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                assert not re.search(commands, ast.unparse(node)), f"{path}:{node.lineno}: use amoeba.system.files"


# --- the machine


@pytest.fixture
def small_files():
    """No file may grow beyond this, as on a disk that is full."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_while_merging_leaves_nothing_and_says_so(place, amoeba, small_files):
    small_files(20_000)
    ended = amoeba("merge", place.model, "--adapter", place.adapter, "--out", place.folder / "merged")
    assert ended.code == exits.BAD_USAGE
    assert "--out: expected room to write" in ended.sentence
    assert "Traceback" not in ended.err
    assert not list(place.folder.glob("*merged*"))


def test_a_full_disk_while_a_report_is_written_leaves_the_earlier_one(place, amoeba, small_files):
    (place.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    (place.folder / "report.html").write_text("earlier")
    small_files(10_000)
    ended = amoeba("report", place.folder)
    assert ended.code == exits.BAD_USAGE
    assert "report.html: expected a file or folder that can be read or written; got File too large" in ended.sentence
    assert (place.folder / "report.html").read_text() == "earlier"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_file_that_cannot_be_read_is_named(number, place, amoeba, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    words = train("--model", "demo")(place)
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    ended = amoeba(*words)
    assert ended.code == exits.BAD_USAGE
    assert f"text.txt: expected a file or folder that can be read or written; got {os.strerror(number)}" in ended.err


def test_a_folder_in_the_data_that_cannot_be_listed_is_not_passed_over(place, amoeba, monkeypatch):
    (place.folder / "data" / "inner").mkdir(parents=True)
    (place.folder / "data" / "a.txt").write_text(TEXT)
    real = os.scandir

    def refuse(path):
        if Path(path).name == "inner":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr("os.scandir", refuse)
    ended = amoeba("train", "--model", "demo", "--data", place.folder / "data", "--out", place.folder / "run")
    assert ended.code == exits.BAD_USAGE
    assert "inner: expected a file or folder that can be read" in ended.sentence


class Gone(io.TextIOWrapper):
    """stdout into a pipe whose reader went away."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        super().__init__(os.fdopen(writer, "wb"), encoding="utf-8", write_through=False)


@pytest.mark.parametrize("words", [("--version",), ("doctor",)], ids=str)
def test_a_reader_that_goes_away_ends_it_quietly(words, monkeypatch, capsys):
    """`amoeba doctor | head -1`"""
    monkeypatch.setattr(sys, "argv", ["amoeba", *words])
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == exits.READER_GONE
    sys.stdout.flush()  # as Python does at its end
    assert "Error" not in capsys.readouterr().err


def test_a_closed_stdout_wants_nothing(place, monkeypatch):
    """`amoeba generate ... >&-`: Python then has None for it."""
    monkeypatch.setattr(sys, "argv", ["amoeba", *map(str, generate()(place))])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_stdout_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["amoeba", "--version"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == exits.BAD_USAGE
    assert (
        "amoeba: output: expected a file or folder that can be read or written; got No space left"
        in capsys.readouterr().err
    )


# --- what is a bug stays one


def test_a_bug_is_said_to_be_one_and_shows_its_traceback_when_asked(place, amoeba, monkeypatch):
    def broken(*_, **__):
        raise KeyError("inner")

    monkeypatch.setattr("amoeba.observe.report.write_report", broken)
    ended = amoeba("report", place.folder)
    assert ended.code == exits.BUG
    assert "unexpected KeyError: 'inner'. This is a bug" in ended.sentence and exits.TRACEBACK in ended.sentence
    assert "Traceback" not in ended.err
    monkeypatch.setenv(exits.TRACEBACK, "1")
    assert "in broken" in amoeba("report", place.folder).err


def test_memory_that_is_not_there_is_a_sentence(place, amoeba, monkeypatch):
    def too_much(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr("amoeba.observe.report.write_report", too_much)
    ended = amoeba("report", place.folder)
    assert ended.code == exits.BAD_USAGE
    assert "memory: expected enough for this command; got [enforce fail" in ended.sentence


def test_a_template_is_not_limited_where_it_behaves():
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    long = "x" * 3_000_000
    assert by_template([Message("user", long)], byte_tokenizer(text)) == f"<user>{long}"


def test_the_merged_folder_remembers_what_is_in_it(place):
    merge(place.model, place.adapter, place.folder / "one")
    save_adapter(place.folder / "other", tiny(), targets=("experts",))
    merge(place.folder / "one", place.folder / "other", place.folder / "two")
    noted = json.loads((place.folder / "two" / "merged_adapters.json").read_text())["adapters"]
    assert [entry["adapter"] for entry in noted] == [str(place.adapter), str(place.folder / "other")]
    with pytest.raises(ValueError, match="not merged into the model yet"):
        merge(place.folder / "two", place.adapter, place.folder / "three")
