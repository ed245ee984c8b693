"""`amoeba train --exact` and `amoeba finetune --exact`: training on the numbers that generation has.

B rows · N tokens of a row · T of a text · V vocabulary
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import amoeba
from amoeba import lora
from amoeba.decoding import Decoder
from amoeba.jobs.train.training_loop import WatchedTrainer
from called import call
from tiny_runs import KEPT, TOLD, kept_weights

pytestmark = pytest.mark.filterwarnings("ignore")
RUNS = [
    ("train", "float32"),
    ("finetune", "bfloat16"),
    pytest.param(("finetune", "float32"), marks=pytest.mark.thorough),
]
Pass = tuple[dict[str, Tensor], Tensor]  # inputs, and logits (B, N, V)


def words(command: str, inputs: Path, out: Path, *more: str) -> list[str]:
    model = ["--model"] if command == "train" else ["--targets", "experts,q_proj", "--r", "2"]
    (out.parent / "told.yaml").write_text("".join(f"{name}: {value}\n" for name, value in TOLD.items()))
    told = ["--config", str(out.parent / "told.yaml"), "--out", str(out)]
    return [command, *model, str(inputs / "base"), "--data", str(inputs / f"{command}.jsonl"), *told, *more]


@pytest.fixture(scope="module", params=RUNS, ids=" in ".join)
def run(request: Any, inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path, list[Pass]]:
    """The command, its dtype and folder, and all passes of the model."""
    command, dtype = request.param
    out, passes, own = tmp_path_factory.mktemp("exact") / "run", [], WatchedTrainer.compute_loss

    def compute_loss(self: Any, model: Any, given: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = own(self, model, given, True, **more)
        passes.append((dict(given), outputs.logits.detach()))
        return (loss, outputs) if return_outputs else loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchedTrainer, "compute_loss", compute_loss)
        said = call(*words(command, inputs, out, "--exact", "--dtype", dtype)).said
    assert "exact mode:" in said
    return command, getattr(torch, dtype), out, passes


def decoded(model: Any, text: list[int]) -> Tensor:
    """The logits of each token, read one after another."""
    steps: list[Tensor] = []

    def follow(logits_BV: Tensor) -> Tensor:
        steps.append(logits_BV[0])
        return torch.tensor(text[len(steps) : len(steps) + 1] or [0])

    model.generation_config.eos_token_id = None
    list(Decoder(model, length=len(text) + 1, choose=follow).generate([text[:1]], len(text)))
    return torch.stack(steps)


def texts_of(given: dict[str, Tensor], logits_BNV: Tensor) -> list[tuple[list[int], Tensor]]:
    """Each document alone, without padding, and its logits."""
    found = []
    for row, ids_N in enumerate(given["input_ids"]):
        seen = int(given["attention_mask"][row].sum()) if "attention_mask" in given else len(ids_N)
        position_N = given["position_ids"][row, :seen] if "position_ids" in given else torch.arange(seen)
        begins = (position_N == 0).nonzero().flatten().tolist()
        for first, end in zip(begins, [*begins[1:], seen], strict=True):
            found.append((ids_N[first:end].tolist(), logits_BNV[row, first:end]))
    return found


def test_training_has_the_numbers_of_generation(run: tuple[str, Any, Path, list[Pass]], inputs: Path) -> None:
    command, dtype, out, passes = run
    first = next(each for each in passes if len(each[0]["input_ids"]) == TOLD["batch_size"])
    amoeba.register()
    for folder, adapter, (given, logits) in (
        (inputs / "base", None, first),
        (out / "model" if command == "train" else inputs / "base", out / "adapter", passes[-1]),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="amoeba").eval()
        if adapter is not None and command == "finetune":
            lora.load(model, adapter)
        texts = texts_of(given, logits)
        assert sum(len(text) for text, _ in texts) > 20
        with amoeba.exact(model):
            for text, wanted in texts[-1:]:  # behind another document of its row
                assert torch.equal(decoded(model, text), wanted)


def test_a_resumed_run_stays_exact_and_ends_with_the_same_bits(
    run: tuple[str, Any, Path, list[Pass]], tmp_path: Path
) -> None:
    command, _, out, _ = run
    again = shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(again / KEPT[command])
    assert "exact mode:" in call(command, "--resume", again, "--from", "checkpoint-8").said
    assert kept_weights(again, command) == kept_weights(out, command)
    other = tmp_path / "other.yaml"
    other.write_text("exact: false\n")
    said = call(command, "--resume", again, "--config", other, code=2).said
    assert "--exact: expected True, as in the run in" in said


def test_a_run_that_was_not_exact_does_not_become_so(inputs: Path, tmp_path: Path) -> None:
    call(*words("train", inputs, tmp_path / "run", "--steps", "2"))
    said = call("train", "--resume", tmp_path / "run", "--exact", code=2).said
    assert "--exact: expected False, as in the run in" in said


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("train", ["--compile", "on"], "--exact: expected none with --compile on; got both"),
        ("train", ["--precision", "fp8"], "--exact: expected none with --precision fp8"),
        ("train", ["--dtype", "bfloat16"], "--dtype with --exact: expected float32"),
        ("finetune", ["--ram", "1GiB"], "--exact: expected none with --ram 1GiB"),
        ("finetune", ["--experts", "ranks"], "--exact: expected none with --experts ranks"),
        ("finetune", ["--experts", "cpu-int8"], "expected resident experts in fp32 or bf16"),
        ("finetune", ["--dtype", "bfloat16", "--train-router"], "--exact with --train-router: expected a model in"),
        ("finetune", ["--plan", "none.json"], "--plan: expected a run without --exact"),
    ],
)
def test_what_exact_runs_cannot_have_is_refused(command, more, message, inputs: Path, tmp_path: Path) -> None:
    assert message in call(*words(command, inputs, tmp_path / "run", "--exact", *more), code=2).said
