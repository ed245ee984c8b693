"""The layers of a model, as shapes to search for.

shapes, head_sizes = shapes_of("120m", tokens=16384)          # a preset, or a folder with a config.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amoeba.bench.workload import Shape
from amoeba.core.errors import bad_value
from amoeba.integrations.coverage import check_coverage
from amoeba.integrations.experts_module import layouts_of
from amoeba.integrations.model_folder import check_json, load_config, load_without_weights
from amoeba.integrations.text_model import text_config
from amoeba.jobs.presets import PRESETS


def shapes_of(model: str, tokens: int) -> tuple[list[Shape], tuple[int, ...]]:
    built = load_without_weights(_config(model), model)
    check_coverage(built, "--model", "give its sizes instead: --shape T,H,I,E,K")
    config = text_config(built.config)
    top_k = next((getattr(config, name) for name in ("num_experts_per_tok", "moe_topk") if hasattr(config, name)), None)
    layouts = {layout for layout in layouts_of(built).values() if layout.gated and not layout.transposed}
    if top_k is None or not layouts:
        got, remedy = f"{model!r}, in which none are found", "give its sizes instead: --shape T,H,I,E,K"
        raise bad_value("--model", "one with gated experts, stored as (experts, out, in)", got, remedy)
    name = f"{Path(model).name}"
    shapes = [
        Shape(name, tokens, layout.hidden, layout.intermediate, layout.num_experts, top_k)
        for layout in sorted(layouts, key=str)
    ]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return shapes, (head,)


def _config(model: str) -> Any:
    if model in PRESETS:
        return PRESETS[model].build(PRESETS[model].training.get("vocab_size", 1024), sequence_length=256)
    path = Path(model) / "config.json"
    if not path.is_file():
        remedy = "correct the path, or give the sizes: --shape T,H,I,E,K"
        raise bad_value("--model", f"a folder with a config.json, or one of {', '.join(PRESETS)}", repr(model), remedy)
    check_json(path)
    return load_config(model)
