"""`amoeba generate` on a tiny random model: the text of plain transformers, streamed, repeatable, and plain errors."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from amoeba.backends.registry import backends_of
from amoeba.core.weights import ExpertWeights
from amoeba.cpu import placements as cpu_placements
from amoeba.decoding import Decoder
from amoeba.integrations import place_experts as placement
from amoeba.integrations.experts_module import experts_modules
from amoeba.jobs import cpu_dtype
from amoeba.jobs.generate import token_steps
from amoeba.jobs.generate.generate import GenerationOptions, GenerationReport, TokenStream, generate
from amoeba.jobs.generate.options import sampling_of
from called import Called, call
from planted_backend import Planted, plant
from selection import quick
from tiny_models import byte_tokenizer, randomise, save_byte_tokenizer, tiny_config

POSITIONS = 64
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
GREEDY = GenerationOptions(max_new_tokens=17, temperature=0)
needs_engine = pytest.mark.skipif(cpu_placements._why_not() is not None, reason=str(cpu_placements._why_not()))


def word_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """As sentencepiece does: the space belongs to the word, and the first one is dropped in decoding."""
    vocabulary = {word: id for id, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save(folder: Path, model_class, config) -> Path:
    torch.manual_seed(0)
    model = randomise(model_class(config))
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter *= 2  # against models that repeat their last token
        model.lm_head.weight[256] = 0  # nearly never the end
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"vocab_size": 257, "max_position_embeddings": POSITIONS, "eos_token_id": 256, "pad_token_id": 256}
    config = tiny_config(Qwen3MoeConfig, "qwen3_moe", **changes)
    return save(tmp_path_factory.mktemp("moe"), Qwen3MoeForCausalLM, config)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture(params=["by transformers", "by_decoder"])
def either_way(request) -> None:
    """Also by the Decoder, whose steps are captured on a GPU."""
    if request.param == "by_decoder":
        request.getfixturevalue("by_decoder")


def run(folder: Path, prompt: str = "Once", options: GenerationOptions = GREEDY) -> GenerationReport:
    return generate(folder, prompt, options, lambda text: None)


def invoke(*words: object, **options: Any) -> Called:
    return call("generate", *words, **options)


def streamed(tokenizer, ids: list[int], prompt: int = 3) -> tuple[list[str], str]:
    pieces: list[str] = []
    stream = TokenStream(tokenizer, pieces.append)
    stream.put(torch.zeros(1, prompt, dtype=torch.int64))
    for id in ids:
        stream.put(torch.tensor([id]))
    stream.end()
    assert stream.ids == ids
    assert stream.pieces == pieces
    return pieces, tokenizer.decode(ids, skip_special_tokens=True)


# The stream


def test_characters_of_several_bytes_are_never_torn():
    text = "Grüße, 細胞 🦠!\nżółw"
    pieces, whole = streamed(byte_tokenizer(), byte_tokenizer()(text)["input_ids"])
    assert "".join(pieces) == whole == text
    assert pieces == list(text)  # and none is held back longer than it must be


@pytest.mark.parametrize("seed", range(5))
def test_any_bytes_stream_to_what_decoding_them_at_once_gives(seed):
    ids = torch.randint(0, 257, (199,), generator=torch.Generator().manual_seed(seed)).tolist()
    pieces, whole = streamed(byte_tokenizer(), ids)
    assert "".join(pieces) == whole


def test_a_character_that_never_gets_complete_is_shown_at_the_end():
    tokenizer = byte_tokenizer()
    pieces, whole = streamed(tokenizer, tokenizer("a🦠")["input_ids"][:-1])
    assert "".join(pieces) == whole
    assert pieces[0] == "a"
    assert "\ufffd" in pieces[-1]


def test_spaces_between_words_survive():
    pieces, whole = streamed(word_tokenizer(["▁one", "▁two", "▁three"]), [1, 2, 3, 2])
    assert pieces == ["one", " two", " three", " two"]
    assert "".join(pieces) == whole


# The job


def test_greedy_gives_the_tokens_of_plain_transformers_and_streams_the_text(folder):
    pieces: list[str] = []
    report = generate(folder, "Once upon", GREEDY, pieces.append)
    plain = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    ids = torch.tensor([byte_tokenizer()("Once upon")["input_ids"]])
    expected = plain.generate(input_ids=ids, max_new_tokens=17, do_sample=False)[0, ids.shape[1] :].tolist()
    assert report.generated_ids == expected
    assert len(set(expected)) > 3  # a model that repeats itself would show little
    assert "".join(pieces) == report.text == byte_tokenizer().decode(expected, skip_special_tokens=True)
    assert (report.prompt_tokens, report.generated_tokens) == (9, 17)
    assert report.stopped == "length"
    assert report.experts == "amoeba"
    assert report.backend in {backend.name for backend in backends_of(ExpertWeights, torch.device(report.device))}


@quick(lambda either_way: either_way == "by_decoder")
@pytest.mark.usefixtures("either_way")
def test_the_same_seed_gives_the_same_text_and_another_another(folder):
    def text(seed: int | None) -> GenerationReport:
        return run(folder, options=GenerationOptions(max_new_tokens=12, temperature=1.5, seed=seed))

    first = text(7)
    assert text(7).generated_ids == first.generated_ids
    assert text(8).generated_ids != first.generated_ids
    drawn = text(None)
    assert text(drawn.seed).generated_ids == drawn.generated_ids


def test_the_callers_random_numbers_are_left_alone(folder):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    run(folder, options=GenerationOptions(max_new_tokens=2, temperature=1, seed=5))
    assert torch.equal(torch.rand(4), expected)


def test_sampling_flags_reach_the_sampler(folder):
    greedy = run(folder).generated_ids
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert run(folder, options=GenerationOptions(max_new_tokens=17, **options)).generated_ids == greedy
    penalised = run(folder, options=GenerationOptions(max_new_tokens=17, temperature=0, repetition_penalty=50.0))
    assert penalised.generated_ids != greedy
    assert len(set(penalised.generated_ids)) == 17


def test_what_is_not_asked_for_is_the_models_own(folder):
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 256})
    )
    report = run(folder, options=GenerationOptions(max_new_tokens=2, top_p=0.9))
    assert report.sampling == {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.0,
    }
    assert run(folder, options=GREEDY).sampling == {"do_sample": False, "repetition_penalty": 1.0}


@pytest.mark.usefixtures("either_way")
def test_it_stops_at_the_end_token_and_does_not_write_it(folder):
    second = run(folder).generated_ids[1]
    settings = {"eos_token_id": [256, second], "pad_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    report = run(folder)
    assert report.stopped == "end of text"
    assert report.generated_ids[-1] == second
    assert second not in report.generated_ids[:-1]


@quick(lambda either_way: either_way == "by_decoder")
@pytest.mark.usefixtures("either_way")
def test_it_stops_where_the_models_positions_end_and_says_so(folder, our_log):
    report = run(folder, "x" * (POSITIONS - 2))
    assert report.generated_tokens == 3
    assert "at most 3 new tokens instead of 17: the model has 64 positions" in our_log.text
    assert run(folder, "x" * POSITIONS).generated_tokens == 1


def test_decisions_are_our_log_with_their_reasons(folder, our_log):
    report = run(folder, options=GenerationOptions(max_new_tokens=1, dtype=torch.bfloat16, device=torch.device("cpu")))
    assert (report.device, report.dtype) == ("cpu", "bfloat16")
    for words in ("device cpu: as requested", "dtype torch.bfloat16: as requested", f"backend {report.backend}: "):
        assert words in our_log.text
    our_log.clear()
    assert run(folder).dtype == "float32"
    assert "dtype torch.float32: the checkpoint's own" in our_log.text


def test_a_backend_that_refuses_is_part_of_the_reason(folder, monkeypatch):
    from amoeba.backends import eager

    refusing = Planted("planted", eager.BACKEND.run, lambda request: "has a headache", preference=99)
    plant(monkeypatch, refusing, eager.BACKEND, alone=True)
    report = run(folder, options=dataclasses.replace(GREEDY, device=torch.device("cpu")))
    assert (report.backend, report.backend_reason) == ("eager", "planted has a headache")


def test_a_model_without_experts_runs_as_it_is_with_the_reason(tmp_path, our_log):
    changes = {"vocab_size": 257, "eos_token_id": 256, "pad_token_id": 256}
    save(tmp_path, Qwen3ForCausalLM, tiny_config(Qwen3Config, "qwen3", **changes))
    report = run(tmp_path)
    assert (report.experts, report.backend, report.generated_tokens) == ("transformers", None, 17)
    assert "Qwen3ForCausalLM has no experts" in report.backend_reason
    assert "Qwen3ForCausalLM has no experts" in our_log.text


@needs_engine
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_experts_may_be_packed_for_the_cpu(folder, kind):
    report = run(folder, options=dataclasses.replace(GREEDY, experts=f"cpu-{kind}"))
    assert (report.placement, report.backend) == (f"cpu-{kind}", "cpu")
    assert "where the experts are packed" in report.backend_reason
    assert report.generated_tokens == GREEDY.max_new_tokens or report.stopped == "end of text"


def test_auto_packs_experts_that_a_gpu_has_no_room_for(folder, monkeypatch):
    model, cuda = AutoModelForCausalLM.from_pretrained(folder), torch.device("cuda")
    size = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(placement.experts_module, "place", lambda *_: None)
    for free, expected in ((2 * size, "resident"), (size, "cpu-bf16")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, free))
        placed = placement.place_experts(model, "auto", trains=False, device=cuda)
        assert placed.placement == expected
        assert "GiB free on the GPU" in placed.reason
    assert placement.place_experts(model, "auto", trains=False, device=torch.device("cpu")).placement == "resident"


@needs_engine
@pytest.mark.parametrize(("has_bf16", "expected"), [(False, "cpu-bf16"), (True, "resident")])
def test_auto_packs_bf16_experts_on_a_cpu_without_instructions_for_it(has_bf16, expected, folder, monkeypatch):
    monkeypatch.setattr(cpu_placements, "has_bf16_instructions", lambda: has_bf16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    placed = placement.place_experts(model, "auto", trains=False, device=torch.device("cpu"))
    assert placed.placement == expected
    assert ("--experts cpu-int8 is faster but rounds them" in placed.reason) == (not has_bf16)


def test_auto_leaves_experts_with_functions_of_their_own_in_place(folder, monkeypatch):
    monkeypatch.setattr(cpu_placements, "has_bf16_instructions", lambda: False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for module in experts_modules(model).values():
        module.act_fn = torch.nn.Softmax(-1)
    placed = placement.place_experts(model, "auto", trains=False, device=torch.device("cpu"))
    assert placed == ("resident", "Qwen3MoeExperts computes them with its own functions", ())


@needs_engine
def test_a_bf16_checkpoint_is_computed_in_float32_where_bf16_is_emulated(folder, monkeypatch):
    for module in (cpu_dtype, cpu_placements):
        monkeypatch.setattr(module, "has_bf16_instructions", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    said = []
    report = generate(folder, "Once", GREEDY, lambda piece: None, say=said.append)
    assert (report.dtype, report.placement, report.backend) == ("float32", "cpu-bf16", "cpu")
    assert said == [
        "qwen3_moe on cpu in float32 (faster on this CPU than the checkpoint's bfloat16); experts cpu-bf16 (stored in "
        "bf16 and computed in float32, since this CPU has no bf16 instructions; --experts cpu-int8 is faster but "
        "rounds them), backend cpu"
    ]
    asked = generate(folder, "Once", dataclasses.replace(GREEDY, dtype=torch.float32), lambda piece: None)
    assert (asked.dtype, asked.placement) == ("float32", "resident")


def test_the_chat_template_is_applied(folder):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    chat = run(folder, "hi", GenerationOptions(max_new_tokens=9, temperature=0, chat=True))
    plain = run(folder, "[user]hi[a]", GenerationOptions(max_new_tokens=9, temperature=0))
    assert chat.prompt_tokens == plain.prompt_tokens == 11
    assert chat.generated_ids == plain.generated_ids != run(folder, "hi").generated_ids[:9]


@pytest.mark.usefixtures("either_way")
def test_an_interruption_keeps_what_was_written(folder):
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    report = generate(folder, "Once", GREEDY, write)
    assert report.stopped == "interrupted"
    assert 2 <= report.generated_tokens < 17
    assert "".join(pieces) == report.text


# The same by the Decoder, whose steps are captured on a GPU


def test_the_decoder_gives_the_same_text_piece_by_piece(folder, monkeypatch):
    expected, pieces = run(folder), []
    monkeypatch.setattr(token_steps, "why_plain", lambda model: None)
    report = generate(folder, "Once", GREEDY, pieces.append)
    assert report.generated_ids == expected.generated_ids
    assert "".join(pieces) == report.text == expected.text
    assert len(pieces) > 3
    assert (expected.steps, report.steps, report.stopped) == ("native", "captured", "length")
    for seconds in (report.load_seconds, report.prepare_seconds, report.seconds_to_first_token):
        assert seconds > 0


def test_the_compile_flag_reaches_the_steps(folder, by_decoder, monkeypatch):
    asked = []
    monkeypatch.setattr(Decoder, "prepare", lambda self, tokens: asked.append(self._step.compiled))
    monkeypatch.setattr(Decoder, "generate", lambda self, *_: iter([[65]]))
    for flags in ((), ("--compile",), ("--no-compile",)):
        invoke(folder, "Once", *flags)
    assert asked == [False, True, False]


# Errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, "temperature: expected a number from 0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"top_p": 0.0}, "top_p: expected 0 < top_p <= 1; got 0.0"),
        ({"top_p": 1.01}, "got 1.01"),
        ({"top_p": float("nan")}, "got nan"),
        ({"top_k": -1}, "top_k: expected at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        GenerationOptions(**options)


def refusal(*words: object) -> str:
    """What the command says, in one line on stderr, before it exits with 2."""
    result = invoke(*words, code=2)
    assert result.stdout == ""
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("amoeba: "))
    return line


def of_ten_ids(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = 10
    config.save_pretrained(folder)


def without(pattern: str):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


UNCHANGED = None
TOO_LONG = "expected at most 64 tokens, the model's max_position_embeddings; got 65 tokens. Shorten it"


@pytest.mark.parametrize(
    ("spoil", "model", "words", "said"),
    [
        (UNCHANGED, "../nowhere", ["Once"], "expected an existing folder"),
        (UNCHANGED, "config.json", ["Once"], "expected a folder or a GGUF file; got the file"),
        (without("config.json"), ".", ["Once"], "expected a folder with a config.json"),
        (without("tokenizer*"), ".", ["Once"], "expected a folder with a tokenizer"),
        (without("model.safetensors"), ".", ["Once"], "model.safetensors"),
        (UNCHANGED, ".", [""], "prompt: expected at least one token; got none from ''"),
        (UNCHANGED, ".", ["x" * (POSITIONS + 1)], TOO_LONG),
        (of_ten_ids, ".", ["Once"], "expected ids below the model's vocab_size, 10"),
        (UNCHANGED, ".", ["Once", "--chat"], "--chat: expected a tokenizer with a chat template"),
        (UNCHANGED, ".", ["Once", "--device", "tpu"], "--device: expected one of auto, cpu, cuda; got 'tpu'"),
        (UNCHANGED, ".", ["Once", "--dtype", "int3"], "--dtype: expected one of auto, "),
        (UNCHANGED, ".", ["Once", "--experts", "disk"], "expected one of resident, cpu-bf16, "),
        (UNCHANGED, ".", ["Once", "--precision", "fp8-ste"], "--precision: expected one of bf16, fp8, "),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_generated_from_is_said(spoil, model, words, said, folder):
    if spoil is not None:
        spoil(folder)
    assert said in refusal(folder / model, *words)


def test_a_run_in_place_of_its_model(folder, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    folder.rename(run / "model")
    for config in (False, True):
        if config:
            (run / "config.json").write_text("{}")
        assert f"Give the run's model: '{run / 'model'}'" in refusal(run, "Once")


def test_a_hub_name_goes_to_transformers_as_it_is(monkeypatch):
    def not_there(name, **_):
        raise OSError(f"asked for {name}\nand more")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", not_there)
    monkeypatch.setattr("amoeba.integrations.model_folder._offline_without_hub", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # also where there is no network
    line = refusal("somebody/some-Model.1b", "Once")
    assert "'somebody/some-Model.1b' (no folder here): asked for somebody/some-Model.1b. " in line


@pytest.mark.parametrize(("precision", "placed"), [("mxfp4", "mxfp4-weights"), ("bf16", "resident")])
def test_a_precision_is_that_of_the_experts(folder, precision, placed):
    result = invoke(folder, "Once", "--max-new-tokens", 1, "--precision", precision, "--json")
    assert result.document["placement"] == placed


# The command


def test_the_last_line_is_a_complete_document_and_the_text_comes_before_it(folder):
    result = invoke(folder, "Once", "--max-new-tokens", 17, "--temperature", 0, "--seed", 4, "--json")
    text, line = result.stdout.rstrip("\n").rsplit("\n", 1)
    document = json.loads(line)
    expected = run(folder)
    assert document["generated_ids"] == expected.generated_ids
    assert text.removesuffix("\n") == document["text"].removesuffix("\n") == expected.text.removesuffix("\n")
    assert document["document"] == "amoeba generate"
    assert (document["prompt_tokens"], document["generated_tokens"], document["seed"]) == (4, 17, 4)
    assert (document["device"], document["dtype"]) == (expected.device, "float32")
    assert document["backend"] == expected.backend
    numbers = ("prompt_tokens_per_second", "generation_tokens_per_second", "seconds_to_first_token")
    for name in (*numbers, "peak_memory_bytes", "load_seconds"):
        assert document[name] > 0, name
    assert document["prompt_tokens_per_second"] == pytest.approx(4 / document["seconds_to_first_token"])
    assert "17 generated (" in result.stderr


def test_exact_mode(folder, tmp_path):
    result = call("generate", str(folder), "ab", "--exact", "--dtype", "float32", "--max-new-tokens", "3", "--json")
    document = result.document
    assert (document["backend"], document["placement"], document["steps"]) == ("exact", "resident", "native")
    refused = call("generate", str(folder), "ab", "--exact", "--experts", "cpu-int8", code=2)
    assert "exact mode of model.layers.0.mlp.experts" in refused.said
    call("pack", folder, "--out", tmp_path / "store")
    in_memory = "--exact: expected experts that stay in memory; got streamed ones."
    for model, options, said in (
        (folder, ("--ram", "1GiB"), f"{in_memory} Leave out --exact, or --ram"),
        (tmp_path / "store", (), f"{in_memory} Give the folder that it was packed from"),
        (folder, ("--dense", "int8"), "dense: expected the weights as they are, with exact mode"),
    ):
        assert said in call("generate", model, "ab", "--exact", *options, code=2).said


def test_without_json_stdout_is_the_text_alone(folder):
    result = invoke(folder, "Once", "--max-new-tokens", 17, "--temperature", 0)
    assert result.stdout.removesuffix("\n") == run(folder).text.removesuffix("\n")


def test_stderr_has_decisions_and_results_and_verbose_adds_reasons(folder):
    words = (folder, "Once", "--max-new-tokens", 3, "--temperature", 0)
    quiet = invoke(*words).stderr.splitlines()
    assert len(quiet) == 2, quiet
    here = run(folder)
    assert quiet[0] == f"amoeba: qwen3_moe on {here.device} in float32; experts resident, backend {here.backend}"
    assert "3 generated" in quiet[1]
    said = invoke(*words, "-v").stderr
    assert f"amoeba: device {here.device}: " in said and "the checkpoint's own" in said and "greedy" in said
    assert quiet[0] in said
    assert "Activation(" not in said, "no dataclass as Python writes it"


def test_the_prompt_may_come_from_stdin(folder):
    result = invoke(folder, "-", "--max-new-tokens", 17, "--temperature", 0, "--json", input="Once\n")
    document = result.document
    assert document["prompt_tokens"] == 4
    assert document["generated_ids"] == run(folder).generated_ids


def test_ctrl_c_ends_with_the_report_and_130(folder, monkeypatch):
    original = TokenStream.add

    def add(self, ids):
        original(self, ids)
        if len(self.ids) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(TokenStream, "add", add)
    result = invoke(folder, "Once", "--temperature", 0, "--json", code=130)
    document = result.document
    assert (document["stopped"], document["generated_tokens"]) == ("interrupted", 5)
    assert "stopped: interrupted" in result.stderr


def test_ctrl_c_while_loading_is_130_too(folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("amoeba.jobs.generate.loaded_model.load_placed", interrupted)
    result = invoke(folder, "Once", code=130)
    assert "interrupted: before the first token" in result.stderr


def test_device_and_dtype_flags_reach_the_job(folder):
    result = invoke(folder, "Once", "--max-new-tokens", 1, "--device", "cpu", "--dtype", "bf16", "--json")
    document = result.document
    assert (document["device"], document["dtype"]) == ("cpu", "bfloat16")


# ---- Whose word counts on how to sample: what was asked for, then the model's own, then nothing cut off


WHOLE = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
OWN = {"do_sample": True, "top_k": 7}


@pytest.mark.parametrize(
    ("asked", "own", "found"),
    [
        ({}, {}, {"do_sample": False, "repetition_penalty": 1.0}),
        ({"temperature": 0.5}, {}, WHOLE | {"temperature": 0.5}),
        ({"top_p": 0.9}, {}, WHOLE | {"top_p": 0.9}),
        ({}, OWN | {"repetition_penalty": 1.2}, WHOLE | {"top_k": 7, "repetition_penalty": 1.2}),
        ({"top_k": 3}, OWN | {"top_p": 0.8}, WHOLE | {"top_k": 3, "top_p": 0.8}),
        ({}, OWN | {"min_p": 0.1}, WHOLE | {"top_k": 7, "min_p": 0.1}),
        ({"temperature": 0, "repetition_penalty": 1.5}, OWN, {"do_sample": False, "repetition_penalty": 1.5}),
    ],
)
def test_what_is_not_said_keeps_every_token(asked, own, found):
    assert sampling_of(GenerationOptions(**asked), GenerationConfig(**own)) == found
