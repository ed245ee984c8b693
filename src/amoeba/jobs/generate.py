"""Text from a Hugging Face model, its experts computed by aMoEba, handed on while it is being generated.

    report = generate("models/tiny", "Once upon", GenerationOptions(temperature=0.7, seed=1), write=print)
    report.text                              # all that was written, end to end
    report.generation_tokens_per_second

A model without experts, or whose experts transformers does not dispatch, runs as it is and the report says so. Times
are taken after one warm-up token, which also compiles what has to be compiled.
"""

from __future__ import annotations

import copy
import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from amoeba import lora
from amoeba.backends.backend import Request
from amoeba.backends.registry import explain
from amoeba.data.chat_template import by_template
from amoeba.data.documents import Message, shown
from amoeba.data.token_rows import begin_tokens
from amoeba.data.token_stream import TokenStream
from amoeba.errors import bad_value
from amoeba.integrations.model_folder import check_model, find_adapter, load_model, load_tokenizer_and_config
from amoeba.integrations.model_limits import check_ids, positions
from amoeba.jobs.merged_adapters import check_not_merged
from amoeba.machine import peak_memory
from amoeba.routing import Routing

logger = logging.getLogger("amoeba")


@dataclass(frozen=True)
class GenerationOptions:
    """What is None is left to the model: its generation_config, its checkpoint's dtype, the best device here.

    temperature 0 is greedy. top_k 0 and top_p 1 keep every token. The seed that was drawn is in the report.
    """

    max_new_tokens: int = 200
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    chat: bool = False
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    experts: str = "auto"  # where they are kept, as amoeba.placements names it
    trust_remote_code: bool = False  # whether Python code in the model's folder may run

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise bad_value("max_new_tokens", "at least 1", self.max_new_tokens, "ask for one token or more")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise bad_value(
                "temperature", "a number from 0 (greedy) up", self.temperature, "0.7 is common, 1 is the model's own"
            )
        if self.top_k is not None and self.top_k < 0:
            raise bad_value("top_k", "at least 0", self.top_k, "leave it out, or 0, to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise bad_value("top_p", "0 < top_p <= 1", self.top_p, "leave it out, or 1, to keep every token")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < math.inf:
            raise bad_value("repetition_penalty", "a number above 0", self.repetition_penalty, "1 penalises nothing")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise bad_value("seed", "0 <= seed < 2**63", self.seed, "leave it out to have one drawn")


@dataclass(frozen=True)
class GenerationReport:
    prompt_tokens: int
    generated_tokens: int
    generated_ids: list[int]
    text: str
    stopped: Literal["end of text", "length", "interrupted"]
    load_seconds: float
    seconds_to_first_token: float | None  # None: interrupted before it
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None  # from the first token to the last; None with fewer than two
    peak_memory_bytes: int | None  # allocated on the GPU, or resident in this process; None where nobody tells
    device: str
    dtype: str
    experts: str  # "amoeba", or "transformers" where there was nothing to take over
    placement: str  # of the experts
    backend: str | None
    backend_reason: str
    sampling: dict[str, Any]
    seed: int


def generate(
    model_folder: str | Path,
    prompt: str,
    options: GenerationOptions,
    write: Callable[[str], object],
    adapter: str | Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> GenerationReport:
    """Calls write(piece) for every piece of text; a KeyboardInterrupt while generating ends it with a report.

    model_folder: as save_pretrained writes it, or the name of a model on the hub.
    adapter: a PEFT folder or a run of `amoeba finetune`; its tokenizer, if it has one, is used.
    say: is told in one line, before the first token, what computes; the log has the reasons.
    """
    from amoeba.integrations.placement import check_placement, place_experts

    check_placement(options.experts)
    name = check_model(str(model_folder))
    adapter = None if adapter is None else find_adapter(adapter)
    if adapter is not None:
        check_not_merged(name, adapter)
    trust = options.trust_remote_code
    tokenizer, config = load_tokenizer_and_config(name, adapter, trust_remote_code=trust)
    prompt_ids = _tokenise(tokenizer, prompt, options.chat)
    most = _most_new_tokens(config, prompt_ids, options.max_new_tokens)

    device = _choose_device(options.device)
    started = time.perf_counter()
    # The caller's random numbers go on where they were: transformers may draw some when it makes a model
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = load_model(name, options.dtype, trust_remote_code=trust)
        placed = place_experts(model, options.experts, trains=False, device=device)
        logger.info("experts %s: %s", placed.placement, placed.reason)
        if adapter is not None:
            lora.load(model, adapter)
            logger.info("adapter %s", adapter)
        model.to(device)
        backend, reason = _warm_up(model, prompt_ids[0])
    load_seconds = time.perf_counter() - started
    logger.info("backend %s: %s", backend or "of transformers", reason)
    experts = f"experts {placed.placement}, backend {backend}" if backend else reason
    say(f"{model.config.model_type} on {device} in {_name(model.dtype)}; {experts}")

    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    sampling = _sampling(options, model.generation_config)
    _set_generation_config(model, tokenizer, sampling, most)
    logger.info("sampling: %s, at most %d tokens, seed %d", _in_words(sampling), most, seed)

    stream = TokenStream(tokenizer, write)
    interrupted = False
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        ids = torch.tensor([prompt_ids], dtype=torch.int64, device=device)
        try:
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=stream)
        except KeyboardInterrupt:
            interrupted = True
            stream.end()
    count = len(stream.ids)
    first = stream.first_at - began if count else None
    return GenerationReport(
        prompt_tokens=len(prompt_ids),
        generated_tokens=count,
        generated_ids=stream.ids,
        text="".join(stream.pieces),
        stopped="interrupted" if interrupted else "end of text" if _ended(model, stream.ids) else "length",
        load_seconds=load_seconds,
        seconds_to_first_token=first,
        prompt_tokens_per_second=len(prompt_ids) / first if first else None,
        generation_tokens_per_second=(count - 1) / (stream.last_at - stream.first_at) if count > 1 else None,
        peak_memory_bytes=peak_memory(device),
        device=str(device),
        dtype=_name(model.dtype),
        experts="transformers" if backend is None else "amoeba",
        placement=placed.placement,
        backend=backend,
        backend_reason=reason,
        sampling=sampling,
        seed=seed,
    )


def _tokenise(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if chat and not getattr(tokenizer, "chat_template", None):
        raise bad_value(
            "--chat",
            "a tokenizer with a chat template",
            "one without",
            "leave --chat out, or take the chat model of the family (its name often ends in Instruct)",
        )
    _check_unicode(prompt)
    if chat:
        text = by_template([Message("user", prompt)], tokenizer, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise bad_value("prompt", "at least one token", f"none from {shown(prompt)}", "write something to go on from")
    if tokenizer.unk_token_id is not None and set(ids) <= {tokenizer.unk_token_id, *begin_tokens(tokenizer)}:
        raise bad_value(
            "prompt",
            "words that the tokenizer knows",
            f"none in {shown(prompt)}",
            "use the tokenizer that the model was trained with",
        )
    return ids


def _check_unicode(prompt: str) -> None:
    """Bytes of an argument that are no UTF-8 come from Python as halves of surrogate pairs."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise bad_value(
            "prompt",
            "text in UTF-8",
            f"{prompt[error.start : error.start + 1]!a} at character {error.start}",
            "set the terminal to UTF-8, or convert the text, for example with iconv",
        ) from error


def _most_new_tokens(config: Any, prompt_ids: list[int], asked: int) -> int:
    check_ids(config, max(prompt_ids))
    room = positions(config)
    if room is None:
        return asked
    if len(prompt_ids) > room:
        raise bad_value(
            "prompt",
            f"at most {room} tokens, the model's max_position_embeddings",
            f"{len(prompt_ids)} tokens",
            "shorten it, or take a model with a longer context",
        )
    most = min(asked, room - len(prompt_ids) + 1)  # the last token takes no position: it is not read again
    if most < asked:
        logger.info("at most %d new tokens and not %d: the model has %d positions", most, asked, room)
    return most


def _choose_device(asked: torch.device | None) -> torch.device:
    if asked is not None:
        device, reason = asked, "as asked"
    elif torch.cuda.is_available():
        device, reason = torch.device("cuda"), torch.cuda.get_device_name()
    else:
        device, reason = torch.device("cpu"), f"torch {torch.__version__} finds no GPU"
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    logger.info("device %s: %s", device, reason)
    return device


def _warm_up(model: Any, token: int) -> tuple[str | None, str]:
    """Runs one token; returns the backends that served the experts, or None, and why these."""
    from amoeba.integrations.coverage import coverage
    from amoeba.integrations.experts_module import experts_modules, is_described

    with torch.no_grad():
        ids = torch.tensor([[token]], dtype=torch.int64, device=model.device)
        model(input_ids=ids, use_cache=False)
    served = [module for module in experts_modules(model).values() if is_described(module)]
    if not served:
        others = coverage(model).others
        how = f"has its experts computed by {coverage(model)}" if others else "has no experts"
        return None, f"{type(model).__name__} {how}"
    found = list(dict.fromkeys(_backend_of(module) for module in served))
    reasons = dict.fromkeys(reason for _, reason in found)
    if (covered := coverage(model)).others:
        reasons[f"experts by {covered}"] = None
    return " and ".join(dict.fromkeys(name for name, _ in found)), "; ".join(reasons)


def _backend_of(module: Any) -> tuple[str, str]:
    """The backend that `auto` takes for this module, and why."""
    from amoeba.integrations.experts_module import weights_of

    weights = weights_of(module)
    if weights is None:
        return "composed", f"the activation or norm of {type(module).__name__} is called as it is"
    x_TH = torch.zeros(1, weights.hidden, dtype=weights.dtype, device=weights.device)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int64, device=x_TH.device), x_TH.new_ones(1, 1))
    explanation = explain(Request(x_TH, routing, weights))
    backend = explanation.backend
    assert backend is not None  # the warm-up ran
    return backend.name, explanation.reasons or f"{backend.summary}, the first choice on {weights.device.type}"


def _sampling(options: GenerationOptions, own: Any) -> dict[str, Any]:
    """What was asked for, then what the model's generation_config says, then nothing cut off (transformers' top_k is
    50 where nobody says otherwise)."""
    asked = any(value is not None for value in (options.temperature, options.top_k, options.top_p))
    penalty = _first(options.repetition_penalty, own.repetition_penalty, 1.0)
    if options.temperature == 0 or not (asked or own.do_sample):
        return {"do_sample": False, "repetition_penalty": penalty}
    return {
        "do_sample": True,
        "temperature": _first(options.temperature, own.temperature, 1.0),
        "top_k": _first(options.top_k, own.top_k, 0),
        "top_p": _first(options.top_p, own.top_p, 1.0),
        "repetition_penalty": penalty,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _in_words(sampling: dict[str, Any]) -> str:
    numbers = [f"{name} {value}" for name, value in sampling.items() if name != "do_sample"]
    return ", ".join([*([] if sampling["do_sample"] else ["greedy"]), *numbers])


def _set_generation_config(model: Any, tokenizer: Any, sampling: dict[str, Any], most: int) -> None:
    config = copy.deepcopy(model.generation_config)
    # Left from the folder, the ones that greedy has no use for would be warned about
    for name in ("temperature", "top_k", "top_p", "max_length"):
        setattr(config, name, None)
    ends = _end_ids(config.eos_token_id)
    pad = next((p for p in (config.pad_token_id, tokenizer.pad_token_id, *ends) if p is not None), None)
    config.update(**sampling, max_new_tokens=most, num_beams=1, pad_token_id=pad)
    model.generation_config = config


def _end_ids(eos: int | list[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _ended(model: Any, ids: list[int]) -> bool:
    return bool(ids) and ids[-1] in _end_ids(model.generation_config.eos_token_id)
