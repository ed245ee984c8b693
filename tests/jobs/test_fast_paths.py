"""What makes steps fast is switched on where it serves, and a run that it does not serve goes on and says why."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from amoeba.integrations import fused_attention
from amoeba.integrations.compiled_layers import CompiledLayers, looping_parts
from amoeba.jobs.finetune import finetune
from amoeba.jobs.train import fast_paths
from amoeba.jobs.train.trainer import CapturedStep, FastTrainer
from selection import quick
from stand_in_graphs import captures_fail
from tiny_models import build
from tiny_runs import Quiet, kept_weights, tiny_run, tiny_settings


def losses(console: Quiet) -> list[float]:
    return [loss for line in console.lines for loss in line["step_losses"]]


def loads(folder: Any) -> list[list[int]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [layer["load"] for line in lines if line["kind"] == "router" for layer in line["layers"]]


def run(folder: Any, inputs: Any, command: str = "train", **changes: Any) -> tuple[list[float], list[str]]:
    console = Quiet()
    tiny_run(tiny_settings(command, folder, inputs, **changes), console)
    return losses(console), console.said


SHORT = {"steps": 3, "eval_every": 3, "save_every": 3}


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def compiled_layers(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Fills with the layers as they are compiled, by aot_eager: what a compiler would make of them takes a minute."""
    compile_layer = nn.Module.compile
    counted: list[nn.Module] = []

    def by_aot(layer: nn.Module, options: dict[str, Any]) -> None:
        counted.append(layer)
        compile_layer(layer, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", by_aot)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return counted


@quick(lambda command, experts: command == "train")  # factors in compiled layers: tests/lora/test_attach.py
@pytest.mark.parametrize(
    ("command", "experts"), [("train", "resident"), ("finetune", "resident"), ("finetune", "mxfp4-weights")]
)
def test_compiled_layers_give_the_same_losses_and_are_as_before_afterwards(
    command, experts, tmp_path, inputs, compiled_layers
):
    by_itself, _ = run(tmp_path / "plain", inputs, command, compile="off", experts=experts, **SHORT)
    found, said = run(tmp_path / "compiled", inputs, command, compile="on", experts=experts, **SHORT)
    assert len(compiled_layers) == 3 and any("compiled decoder layers" in line for line in said)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(by_itself), rtol=1e-5, atol=1e-6)
    assert all(layer._compiled_call_impl is None for layer in compiled_layers)
    rows = [[sum(load) for load in loads(tmp_path / name)] for name in ("plain", "compiled")]
    assert rows[0] == rows[1], "the batch that was tried was counted"
    if command == "train":
        assert graphs() == 2, "one code for both layers, one for the last norm, none for short evaluations"


@pytest.mark.parametrize(
    ("kind", "part"), [("qwen3_next", "Qwen3NextGatedDeltaNet"), ("jamba", "JambaMambaMixer"), ("qwen3_moe", None)]
)
def test_parts_that_loop_over_a_text_are_left_as_they_are(kind, part, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", lambda module, options: None)
    model = build(kind).eval()
    looping = looping_parts(model)
    assert {type(each).__name__ for each in looping} == ({part} if part else set())
    layers = CompiledLayers(model, looping)
    layers.begin()
    assert all(each.forward._torchdynamo_disable for each in looping)
    layers.end()
    assert all("forward" not in vars(each) for each in looping)


@pytest.mark.thorough  # traces for ten seconds
def test_parts_that_loop_over_a_text_are_not_compiled(tmp_path, inputs, compiled_layers, monkeypatch):
    """The compiler would unroll the loop, for minutes."""
    layers = ["linear_attention", "full_attention"]
    build("qwen3_next", vocab_size=300, num_hidden_layers=2, layer_types=layers).config.save_pretrained(
        tmp_path / "model"
    )
    changes = {"steps": 1, "model": str(tmp_path / "model"), "vocab_size": 300}
    found: list[list[nn.Module]] = []
    look = fast_paths.looping_parts
    monkeypatch.setattr(fast_paths, "looping_parts", lambda model: found.append(look(model)) or found[-1])
    unrolled = torch.linalg.solve_triangular
    monkeypatch.setattr(
        torch.linalg, "solve_triangular", lambda *args, **options: _not_compiled(unrolled, args, options)
    )
    by_itself, _ = run(tmp_path / "plain", inputs, compile="off", **changes)
    compiled, said = run(tmp_path / "compiled", inputs, compile="on", **changes)
    assert any("compiled decoder layers" in line for line in said if line.startswith("each step")), said
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(by_itself), rtol=1e-5, atol=1e-6)
    assert {type(part).__name__ for part in found[0]} == {"Qwen3NextGatedDeltaNet"}
    assert all("forward" not in vars(part) for part in found[0])
    assert loads(tmp_path / "plain") == loads(tmp_path / "compiled"), "the tokens that were tried were counted"


def _not_compiled(function: Any, args: Any, options: Any) -> Any:
    assert not torch.compiler.is_compiling()
    return function(*args, **options)


@pytest.mark.thorough
def test_long_evaluations_have_compiled_layers_too(tmp_path, inputs, compiled_layers, monkeypatch):
    monkeypatch.setattr(fast_paths, "WORTH_COMPILING", 0.0)
    run(tmp_path / "run", inputs, compile="on", held_out=0.5, **SHORT)
    assert graphs() == 4


def test_a_compiler_that_fails_leaves_a_plain_run_and_a_sentence(tmp_path, inputs, monkeypatch):
    by_itself, _ = run(tmp_path / "plain", inputs, compile="off", **SHORT)

    def broken(layer: nn.Module, **options: Any) -> None:
        def call(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no compiler for this\nand a long trace")

        layer._compiled_call_impl = call

    monkeypatch.setattr(nn.Module, "compile", broken)
    found, said = run(tmp_path / "broken", inputs, compile="on", **SHORT)
    assert found == by_itself  # the batch that was tried has left nothing behind
    assert loads(tmp_path / "broken") == loads(tmp_path / "plain")
    assert [line for line in said if line.startswith("no compiled decoder layers")] == [
        next(line for line in said if line.endswith("RuntimeError: no compiler for this"))
    ]


def test_short_runs_and_cpus_do_not_compile_by_themselves(tmp_path, inputs, monkeypatch):
    monkeypatch.setattr(CompiledLayers, "begin", lambda self: pytest.fail("compiled"))
    run(tmp_path / "run", inputs, **SHORT)


@quick(lambda compiled: compiled == "off")
@pytest.mark.parametrize(("compiled", "by_documents"), [("off", True), ("on", False)])
def test_a_cpu_attends_by_documents_where_no_layer_is_compiled(
    compiled, by_documents, tmp_path, inputs, compiled_layers, monkeypatch
):
    """Compiled, each batch's documents would be other code."""
    seen = []
    step = FastTrainer.training_step

    def noted(trainer: Any, model: Any, batch: Any, *others: Any) -> Any:
        seen.append((model.config._attn_implementation, "cu_seq_lens_q" in batch))
        return step(trainer, model, batch, *others)

    monkeypatch.setattr(FastTrainer, "training_step", noted)
    run(tmp_path / "run", inputs, compile=compiled, steps=1)
    assert seen == [("amoeba" if by_documents else "sdpa", by_documents)]


def wide_model(folder: Any) -> dict[str, Any]:
    """With heads that our kernels serve."""
    build("qwen3_moe", head_dim=64, hidden_size=64, vocab_size=300).config.save_pretrained(folder)
    return {"model": str(folder), "vocab_size": 300, "accumulation": 1}


class TestPackedRows:
    """`amoeba finetune` packs where attention by documents serves; here transformers' own mask stands in for it."""

    @pytest.fixture
    def packs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(finetune, "why_not_by_documents", lambda model: None)
        monkeypatch.setattr(finetune, "LEAST_PACKED_STEPS", 1)

    LONG: ClassVar[dict[str, Any]] = {"sequence_length": 96, "steps": 4, "save_every": 2, "accumulation": 1}

    def test_a_run_repeats_and_resumes_bit_by_bit(self, packs, tmp_path, inputs):
        first, said = run(tmp_path / "first", inputs, "finetune", **self.LONG)
        assert any(line.startswith("packed into") and "--batch-size counts packed rows" in line for line in said)
        again, _ = run(tmp_path / "again", inputs, "finetune", **self.LONG)
        assert again == first
        shutil.rmtree(tmp_path / "again" / "checkpoints" / "checkpoint-4")
        shutil.rmtree(tmp_path / "again" / "adapter")
        console = Quiet()
        tiny_run(tiny_settings("finetune", tmp_path / "again", inputs, **self.LONG), console, resume=True)
        assert any("resuming from checkpoint-2" in line for line in console.said)
        assert kept_weights(tmp_path / "again", "finetune") == kept_weights(tmp_path / "first", "finetune")

    def test_a_run_goes_on_with_the_rows_it_began_with_or_says_why_it_cannot(
        self, packs, tmp_path, inputs, monkeypatch
    ):
        run(tmp_path / "run", inputs, "finetune", **self.LONG)
        shutil.rmtree(tmp_path / "run" / "adapter")
        told = tiny_settings("finetune", tmp_path / "run", inputs, **self.LONG)
        monkeypatch.setattr(finetune, "why_not_by_documents", lambda model: "there is no GPU")
        with pytest.raises(ValueError, match=r"a machine that packs rows.*there is no GPU"):
            tiny_run(told, Quiet(), resume=True)

    def test_a_small_set_keeps_its_steps_and_a_cpu_its_rows(self, tmp_path, inputs, monkeypatch):
        _, said = run(tmp_path / "cpu", inputs, "finetune", **self.LONG | {"batch_size": 1})
        monkeypatch.setattr(finetune, "why_not_by_documents", lambda model: None)
        _, small = run(tmp_path / "small", inputs, "finetune", **self.LONG)
        assert not any(line.startswith("packed into") for line in [*said, *small])


class TestCheckpointing:
    """In a CUDA graph nothing may be asked of the device, as torch's checkpoint does to keep random numbers."""

    def test_such_a_model_is_not_captured_and_a_sentence_says_why(self):
        model = build("qwen3_moe")
        arguments = SimpleNamespace(gradient_checkpointing=True)
        trainer = SimpleNamespace(model=model, args=arguments, captures=False, release=lambda: None)
        with fast_paths._captured(trainer, None) as reason:
            assert reason is None and trainer.captures
        with fast_paths._captured(trainer, "its experts wait") as reason:
            assert reason == "its experts wait" and not trainer.captures
        model.config.attention_dropout = 0.1
        with fast_paths._captured(trainer, None) as reason:
            assert "random numbers" in reason and not trainer.captures

    @pytest.mark.parametrize(
        ("ranks", "says"),
        [
            (1, ["each step uses: fused loss, CUDA graph"]),
            (2, ["no CUDA graph: several", "each step uses: fused loss"]),
        ],
    )
    def test_an_exact_run_has_the_fused_loss_and_the_capture_alone(self, ranks, says):
        arguments = SimpleNamespace(gradient_checkpointing=False, device=torch.device("cuda"))
        rows, rank_zero = SimpleNamespace(has_images=False), SimpleNamespace(count=ranks)
        trainer = SimpleNamespace(
            model=build("qwen3_moe"),
            args=arguments,
            rows=rows,
            rank_zero=rank_zero,
            captures=False,
            release=lambda: None,
            as_it_trains=nullcontext,
            compiled=False,
        )
        said: list[str] = []
        with fast_paths.fast_paths(trainer, "auto", said.append, exact=True):
            assert trainer.captures == (ranks == 1)
        assert len(said) == len(says) and all(map(str.startswith, said, says))


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.fixture
    def told(self, inputs: Any) -> dict[str, Any]:
        return wide_model(inputs / "wide")

    def test_a_run_repeats_bit_by_bit_and_captured_passes_change_no_loss(self, told, inputs, tmp_path, monkeypatch):
        first, said = run(tmp_path / "first", inputs, **told)
        assert any("per-document attention, CUDA graph" in line for line in said)
        again, _ = run(tmp_path / "again", inputs, **told)
        assert again == first
        captures_fail(monkeypatch)
        launched, _ = run(tmp_path / "launched", inputs, **told)
        assert launched == first

    def test_passes_of_a_step_add_up(self, told, inputs, tmp_path, monkeypatch):
        first, _ = run(tmp_path / "first", inputs, **told | {"accumulation": 3})
        captures_fail(monkeypatch)
        launched, _ = run(tmp_path / "launched", inputs, **told | {"accumulation": 3})
        torch.testing.assert_close(torch.tensor(launched), torch.tensor(first), rtol=1e-3, atol=1e-3)

    def test_compiled_layers_train_alike(self, told, inputs, tmp_path):
        plain, _ = run(tmp_path / "plain", inputs, **told, compile="off")
        compiled, said = run(tmp_path / "compiled", inputs, **told, compile="on")
        assert any("compiled decoder layers" in line for line in said)
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=2e-2, atol=2e-2)

    def test_attention_from_one_projection_trains_alike(self, told, inputs, tmp_path, monkeypatch, caplog):
        with caplog.at_level("INFO", "amoeba"):
            fused, _ = run(tmp_path / "fused", inputs, **told, compile="on")
        assert "2 of 2 attention layers" in caplog.text
        monkeypatch.setattr(fused_attention, "recognise", lambda layer: "it is not wanted")
        plain, _ = run(tmp_path / "plain", inputs, **told, compile="on")
        torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=2e-2, atol=2e-2)

    def of_a_base_in_bf16(self, inputs: Any) -> dict[str, Any]:
        folder = inputs / "wide_base"
        build("qwen3_moe", head_dim=64, hidden_size=64, vocab_size=300).to(torch.bfloat16).save_pretrained(folder)
        for path in (inputs / "base").glob("tokenizer*"):
            shutil.copy(path, folder)
        return {"model": str(folder), "sequence_length": 96, "accumulation": 1, "targets": ["experts"]}

    def test_a_router_that_is_trained_in_fp32_keeps_the_fast_paths(self, inputs, tmp_path):
        """Its products need autocast, also where the model is tried before the first step."""
        told = self.of_a_base_in_bf16(inputs) | {"train_router": True, "dtype": "bfloat16"}
        _, said = run(tmp_path / "run", inputs, "finetune", **told)
        assert any(line.startswith("each step uses: fused loss, per-document attention") for line in said)

    @pytest.mark.parametrize(
        ("experts", "checkpointing"),
        [
            ("resident", False),
            ("resident", True),
            ("fp8-weights", False),
            ("mxfp8-weights", False),
            ("mxfp4-weights", False),
            ("mxfp4-weights", True),
            ("nvfp4-weights", False),
        ],
    )
    def test_factors_are_trained_by_captured_passes_over_packed_rows(
        self, experts, checkpointing, inputs, tmp_path, monkeypatch
    ):
        """Only factors have gradients, whatever the format of the experts; and checkpointing asks nothing of the
        device."""
        told = self.of_a_base_in_bf16(inputs) | {"train_router": False, "gradient_checkpointing": checkpointing}
        told |= {"experts": experts}
        monkeypatch.setattr(finetune, "LEAST_PACKED_STEPS", 1)
        first, said = run(tmp_path / "first", inputs, "finetune", **told)
        assert any(line.startswith("packed into") for line in said)
        assert any(line.startswith("each step uses") and "CUDA graph" in line for line in said)
        calls: list[int] = []
        replay = CapturedStep.__call__
        monkeypatch.setattr(CapturedStep, "__call__", lambda *given: (calls.append(1), replay(*given))[1])
        again, _ = run(tmp_path / "again", inputs, "finetune", **told)
        assert again == first and len(calls) >= len(first) // 2
        captures_fail(monkeypatch)
        launched, _ = run(tmp_path / "launched", inputs, "finetune", **told)
        assert launched == first

    @pytest.mark.parametrize(
        ("command", "more"),
        [
            ("finetune", {"experts": "resident"}),
            ("finetune", {"experts": "mxfp4-weights", "gradient_checkpointing": True}),
            ("train", {"dtype": "bfloat16", "sequence_length": 64}),
        ],
    )
    def test_an_exact_run_is_captured_with_the_same_bits(self, command, more, inputs, tmp_path, monkeypatch):
        told = self.of_a_base_in_bf16(inputs) | {"exact": True} | more
        told |= {"train_router": False} if command == "finetune" else {}
        told = {name: each for name, each in told.items() if command == "finetune" or name != "targets"}
        captured, said = run(tmp_path / "captured", inputs, command, **told)
        assert "each step uses: fused loss, CUDA graph" in said
        captures_fail(monkeypatch)
        launched, _ = run(tmp_path / "launched", inputs, command, **told)
        assert launched == captured
