"""Whether a run over ranks is that of one process: what its log says of each step, and what it kept.

check_same_run(found, expected, "model")
"""

import json
from pathlib import Path
from typing import Any

import torch


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def check_same_run(found: Path, expected: Path, kept: str, atol: float = 1e-5) -> None:
    """Losses and norms of every step, held-out losses, loads and pairs of experts, and what was learnt."""
    for name in ("step_losses", "step_norms"):
        sides = [[number for line in lines(folder, "train") for number in line[name]] for folder in (found, expected)]
        torch.testing.assert_close(*map(torch.tensor, sides), rtol=1e-5, atol=0)
    sides = [[line["loss"] for line in lines(folder, "eval")] for folder in (found, expected)]
    torch.testing.assert_close(*map(torch.tensor, sides), rtol=1e-5, atol=0)
    assert [line["tokens"] for line in lines(found, "train")] == [line["tokens"] for line in lines(expected, "train")]
    loads = [
        [[layer["load"] for layer in line["layers"]] for line in lines(side, "router")] for side in (found, expected)
    ]
    assert loads[0] == loads[1]
    ours, theirs = (weights(folder / kept) for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=atol)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a model as plain transformers reads it, or of an adapter as plain PEFT does."""
    if (folder / "adapter_config.json").is_file():
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        return {name: tensor for name, tensor in model.state_dict().items() if "lora" in name or "gate" in name}
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.state_dict()
