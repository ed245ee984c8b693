"""The options of a generation, and how they combine with the model's own generation_config.

options = GenerationOptions(temperature=0.7, seed=1)
sampling = sampling_of(options, model.generation_config)
"""

from __future__ import annotations

import copy
import math
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from amoeba.core.errors import bad_value
from amoeba.parallel.rank_zero import RankZero


@dataclass(frozen=True)
class GenerationOptions:
    """What is None is left to the model and the machine: its generation_config, its checkpoint's dtype (or float32 if
    that is faster on this CPU), the best device here.

    temperature 0 is greedy. top_k 0 and top_p 1 keep every token. The seed that was drawn is in the report.
    """

    max_new_tokens: int = 200
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    chat: bool = False
    images: tuple[str, ...] = ()  # files, which the prompt's message begins with
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    experts: str = "auto"  # where they are kept, as amoeba.placements names it
    products: str = "auto"  # with an fp8 checkpoint's experts: as it asks for where that is faster, or "bf16"
    ram: str | None = None  # a budget through which the experts are streamed, as amoeba.stream.attach takes it
    vram: str | None = None  # the same on a GPU; ram is then for experts in pinned memory
    miss: str = "move"  # experts that a step misses on a GPU: moved there, computed by the cpu, or auto
    record: str | None = None  # a file for the routing of streamed experts
    trace: str | None = None  # a file for a timeline of streaming
    dense: str = "auto"  # on a CPU: weights of a step that are not experts, as loaded or "int8"
    exact: bool = False  # on a CPU: see amoeba.exact; experts resident where nothing is said
    compile: bool | None = None  # one prompt on a GPU: decoder layers through torch.compile; None: where it pays
    trust_remote_code: bool = False  # whether Python code in the model's folder may run

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise bad_value("max_new_tokens", "at least 1", self.max_new_tokens, "ask for one token or more")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            remedy = "0.7 is common, 1 is the model's own"
            raise bad_value("temperature", "a number from 0 (greedy) up", self.temperature, remedy)
        if self.top_k is not None and self.top_k < 0:
            raise bad_value("top_k", "at least 0", self.top_k, "leave it out or set it to 0 to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise bad_value("top_p", "0 < top_p <= 1", self.top_p, "leave it out or set it to 1 to keep every token")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise bad_value("repetition_penalty", "a number above 0", self.repetition_penalty, "1 penalises nothing")
        if self.products not in ("auto", "bf16"):
            remedy = 'for w8a8 in every pass use experts="w8a8"'
            raise bad_value("products", "auto or bf16", repr(self.products), remedy)
        if self.dense not in ("auto", "int8"):
            raise bad_value("dense", "auto or int8", repr(self.dense), "leave it out for the weights as they are")
        if self.exact and self.dense != "auto":
            raise bad_value("dense", "the weights as they are, with exact mode", self.dense, "leave one of them out")
        if (self.ram is not None or self.vram is not None) and self.experts != "auto":
            remedy = "leave one out"
            raise bad_value("experts", "no experts with ram or vram, which stream them", repr(self.experts), remedy)
        if self.miss != "move" and self.vram is None:
            raise bad_value("miss", "move, or vram as well", repr(self.miss), "leave it out, or stream with --vram")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise bad_value("seed", "0 <= seed < 2**63", self.seed, "leave it out for a random seed")

    @property
    def settings(self) -> dict[str, float]:
        """Those given of what decides which tokens are chosen."""
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_batched(self) -> None:
        """For rows that come and go, whose steps are not compiled."""
        if self.compile:
            remedy = "leave it out (`generate` with one prompt and `chat` compile)"
            raise bad_value("--compile", "no compiling with serve and --prompts", True, remedy)


def sampling_of(options: GenerationOptions, own: Any) -> dict[str, Any]:
    """What was asked for, then what the model's generation_config says, then nothing cut off (transformers' top_k is
    50 unless set otherwise)."""
    asked = any(value is not None for value in (options.temperature, options.top_k, options.top_p))
    penalty = _first(options.repetition_penalty, own.repetition_penalty, 1.0)
    if options.temperature == 0 or not (asked or own.do_sample):
        return {"do_sample": False, "repetition_penalty": penalty}
    found: dict[str, Any] = {"do_sample": True}
    for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
        found[name] = _first(getattr(options, name), getattr(own, name), off)
    found |= {"min_p": own.min_p} if getattr(own, "min_p", None) else {}
    return found | {"repetition_penalty": penalty}


def seed_for(options: GenerationOptions, rank_zero: RankZero) -> int:
    return rank_zero.tell(lambda: secrets.randbelow(2**31)) if options.seed is None else options.seed


def in_words(sampling: dict[str, Any]) -> str:
    numbers = [f"{name} {value}" for name, value in sampling.items() if name != "do_sample"]
    return ", ".join([*([] if sampling["do_sample"] else ["greedy"]), *numbers])


def set_generation_config(model: Any, tokenizer: Any, sampling: dict[str, Any], most: int) -> None:
    config = copy.deepcopy(model.generation_config)
    # Left from the folder, the ones that greedy has no use for would be warned about
    for name in ("temperature", "top_k", "top_p", "max_length"):
        setattr(config, name, None)
    ends = end_ids(model)
    pad = next((p for p in (config.pad_token_id, tokenizer.pad_token_id, *ends) if p is not None), None)
    config.update(**sampling, max_new_tokens=most, num_beams=1, pad_token_id=pad)
    model.generation_config = config


def end_ids(model: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
