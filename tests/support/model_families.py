"""What each kind of model of the installed transformers can do here, found by doing it with a tiny one, as a table.

    python tests/support/model_families.py > docs/families.md
    python tests/support/model_families.py --kinds qwen3_next zaya

A cell is "yes", or a number that refers to the reason below the table.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import amoeba
from amoeba import lora, stream
from amoeba.core.errors import one_line
from amoeba.decoding import Decoder, why_not
from amoeba.decoding.trial import raise_if_it_waits
from amoeba.integrations.model_folder import load_model
from amoeba.jobs.convert.quantise import quantise_folder
from model_kinds import VOCABULARY, build_kind, kinds
from replayed_steps import Recorded, replayed
from tiny_models import relative

HEAD = """# Model families

What each kind of model in transformers {version} can do, found with a tiny random model of each on a CPU by
`python tests/support/model_families.py`:

- **experts**: logits with our experts equal those with transformers' own
- **LoRA**: factors on the experts get gradients
- **streamed**: logits with experts read from the folder equal those of the resident model
- **quantised**: the model is written in mxfp8 and read again
- **captured decoding**: greedy tokens of a step replayed on fixed memory, without Python, equal those of `generate`
- **captured training**: forward and backward replayed in that way with another text give its gradients
"""


def experts(kind: str, folder: Path) -> None:
    model = build_kind(kind)
    found = {}
    for implementation in ("eager", "amoeba"):
        model.set_experts_implementation(implementation)
        found[implementation] = logits(model)
    assert relative(found["amoeba"], found["eager"]) < 1e-5


def adapted(kind: str, folder: Path) -> None:
    model = build_kind(kind)
    state = lora.attach(model, 2, 4, ["experts"])
    model(input_ids=ids(), use_cache=False).logits.square().mean().backward()
    assert state.experts
    assert all(parameter.grad is not None for layer in state.experts.values() for parameter in layer.parameters())


def streamed(kind: str, folder: Path) -> None:
    with stream.attach(saved(kind, folder), ram="1GiB") as attached:
        assert relative(logits(attached.model), logits(load_model(str(folder), None))) < 1e-5


def quantised(kind: str, folder: Path) -> None:
    quantise_folder(saved(kind, folder), folder / "mxfp8", "mxfp8")
    assert relative(logits(load_model(str(folder / "mxfp8"), None)), logits(load_model(str(folder), None))) < 0.3


def captured(kind: str, folder: Path) -> None:
    model = build_kind(kind)
    model.set_experts_implementation("batched_mm")
    if (reason := why_not(model)) is not None:
        raise ValueError(reason)
    raise_if_it_waits(model, Decoder(model, length=40))
    prompt = torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(0)).tolist()
    decoder = Decoder(model, length=40)
    replayed(decoder._step)
    tokens = [token for (token,) in decoder.generate([prompt], 12)]
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    given = torch.tensor([prompt])
    out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), generation_config=config)
    assert tokens == out[0, len(prompt) :].tolist(), "other tokens than those of generate"


def captured_training(kind: str, folder: Path) -> None:
    """As `jobs.train.trainer` captures a pass, which looks at no number of the device and gets no mask to look into."""
    model, given = build_kind(kind).train(), ids()
    model.set_experts_implementation("batched_mm")
    mask = torch.full((1, 1, given.shape[1], given.shape[1]), float("-inf"), dtype=torch.float32).triu(1)
    try:
        model(input_ids=given, attention_mask=mask, use_cache=False)
    except RuntimeError:  # takes masks of texts alone
        mask = torch.ones_like(given)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(run: Callable[[], object]) -> list[Tensor]:
        torch.manual_seed(0)  # of routers that add noise
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        run()
        return [parameter.grad.clone() for parameter in trained if parameter.grad is not None]

    def pass_over() -> None:
        model(input_ids=given, attention_mask=mask, labels=given, use_cache=False).loss.backward()

    recorded = Recorded()

    def record() -> None:
        with recorded:
            pass_over()

    first = gradients(record)
    if recorded.decisions:
        raise ValueError(f"the host waits for numbers of the device inside a pass: {recorded.decisions[0]}")
    given.copy_(given.flip(1))
    expected, found = gradients(pass_over), gradients(recorded.replay)
    whole = [torch.cat([gradient.flatten() for gradient in each]) for each in (first, expected, found)]
    assert relative(whole[0], whole[1]) > 0.1
    assert relative(whole[2], whole[1]) < 1e-5, "other gradients than those of the pass itself"


COLUMNS: dict[str, Callable[[str, Path], None]] = {
    "experts": experts,
    "LoRA": adapted,
    "streamed": streamed,
    "quantised": quantised,
    "captured decoding": captured,
    "captured training": captured_training,
}


def ids() -> Tensor:
    return torch.tensor([[3, 9, 27, 40, 4, 9]], dtype=torch.int64)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=ids(), use_cache=False).logits


def saved(kind: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        build_kind(kind).save_pretrained(folder)
    return folder


def table(chosen: Iterable[str], tell: Callable[[str], None] = lambda line: None) -> dict[str, dict[str, str]]:
    """Kind -> column -> "yes" or the reason why not."""
    found: dict[str, dict[str, str]] = {}
    for kind in chosen:
        found[kind] = {}
        with tempfile.TemporaryDirectory() as folder:
            for column, check in COLUMNS.items():
                try:
                    check(kind, Path(folder))
                    found[kind][column] = "yes"
                except Exception as error:
                    said = (one_line(error) or "the numbers differ").partition(". ")[0]  # without the remedy
                    found[kind][column] = said.replace(folder, "the folder").replace("|", "/")[:240]
        tell(f"{kind}: {found[kind]}")
    return found


def shown(found: dict[str, dict[str, str]]) -> str:
    reasons: dict[str, int] = {}
    lines = ["| kind | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for kind, cells in found.items():
        row = ["yes" if each == "yes" else f"({reasons.setdefault(each, len(reasons) + 1)})" for each in cells.values()]
        lines.append(f"| {kind} | " + " | ".join(row) + " |")
    counts = [sum(cells[column] == "yes" for cells in found.values()) for column in COLUMNS]
    lines.append(f"| **{len(found)} kinds** | " + " | ".join(f"**{count}**" for count in counts) + " |")
    lines += ["", *(f"({number}) {reason}\n" for reason, number in reasons.items())]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="*")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    amoeba.register()
    found = table(given.kinds or kinds(), lambda line: print(line, file=sys.stderr, flush=True))
    print(HEAD.format(version=transformers.__version__))
    print(shown(found), end="")


if __name__ == "__main__":
    main()
