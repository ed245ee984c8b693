"""Run folders as training leaves them, for the tests of their report."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, TOP_K, STEPS, EVERY = 4, 16, 2, 300, 5
TOKENS = 4096


def train_line(step: int, loss: float | None = 5.0, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "time": 0.5 * step,
        "loss": loss,
        "lr": 1e-3,
        "tokens": TOKENS * step,
        **more,
    }


def metrics() -> Iterator[dict[str, Any]]:
    """300 steps in which the loss falls, a lopsided start evens out, and one expert stays dead for a while."""
    chance = random.Random(7)
    bias = [[chance.gauss(0, 1.1) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    for step in range(EVERY, STEPS + 1, EVERY):
        calm = 0.25 + 0.75 * math.exp(-step / 90)
        layers = []
        for layer in range(LAYERS):
            weights = [math.exp(calm * value + chance.gauss(0, 0.08)) for value in bias[layer]]
            load = [round(TOKENS * TOP_K * weight / sum(weights)) for weight in weights]
            if layer == 2 and step < 120:
                load[11] = 0
            layers.append(
                {
                    "layer": layer,
                    "load": load,
                    "entropy": math.log(EXPERTS)
                    - 0.25 * (layer + 1) * (1 - math.exp(-step / 120))
                    - chance.random() / 30,
                    "max_violation": max(load) / (sum(load) / EXPERTS) - 1,
                    "dead_experts": load.count(0),
                    "drop_rate": 0.0,
                }
            )
        yield {"kind": "router", "step": step, "layers": layers}
        yield train_line(
            step,
            loss=4.0 + 3.6 * math.exp(-step / 70) + chance.gauss(0, 0.06),
            lr=3e-4 * min(1, step / 30) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS)),
            grad_norm=0.6 + 2 * math.exp(-step / 40) + chance.random() * 0.2,
            tokens_per_second=8200 + chance.gauss(0, 220),
            memory_bytes=1_310_000_000 + 400_000 * step,
            max_violation=max(layer["max_violation"] for layer in layers),
            dead_experts=sum(layer["dead_experts"] for layer in layers),
            drop_rate=0.0,
        )
        if step % 50 == 0:
            loss = 4.1 + 3.5 * math.exp(-step / 70)
            yield {"kind": "eval", "step": step, "time": 0.5 * step, "loss": loss, "perplexity": math.exp(loss)}
    together = []
    for layer in range(LAYERS):
        counts = [[0] * EXPERTS for _ in range(EXPERTS)]
        for one in range(EXPERTS):
            for other in range(one):
                near = 3.0 if (one - other) % (layer + 2) == 0 else 1.0
                counts[one][other] = counts[other][one] = round(60 * near * math.exp(chance.gauss(0, 0.4)))
            counts[one][one] = 0
        for one in range(EXPERTS):
            counts[one][one] = sum(counts[one])
        together.append({"layer": layer, "counts": counts})
    yield {"kind": "coactivation", "step": STEPS, "layers": together}
    loads = [
        [[(7 * layer + 3 * kind + 5 * at) % 11 for at in range(EXPERTS)] for kind in (0, 1, 2)]
        for layer in range(LAYERS)
    ]
    of_layers = [{"layer": layer, "loads": of_kinds} for layer, of_kinds in enumerate(loads)]
    yield {"kind": "text_kinds", "step": STEPS, "kinds": ["code", "prose", "verse"], "layers": of_layers}
    yield {"kind": "final", "step": STEPS, "loss": 4.15, "perplexity": 63.4, "start_loss": 7.62, "seconds": 154.0}


def write_run(folder: Path, lines: list[dict[str, Any]] | None = None, tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = {"layers": LAYERS, "experts": EXPERTS, "top_k": TOP_K, "hidden": 256}
    config = {
        "preset": "small",
        "model": model,
        "steps": STEPS,
        "learning_rate": 3e-4,
        "seed": 12345,
        "data": ["a", "b"],
    }
    environment = {
        "date": "2026-03-01T12:00:00+00:00",
        "commit": "0123456789abcdef",
        "machine": {
            "system": "Linux",
            "cpu": {"model": "Some CPU", "cores": 8},
            "memory_bytes": 16 * 2**30,
            "gpus": [],
        },
        "versions": {"torch": "2.10.0", "transformers": None},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps(environment))
    text = "".join(json.dumps(line) + "\n" for line in (metrics() if lines is None else lines))
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder
