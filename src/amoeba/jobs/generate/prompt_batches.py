"""Answers to many prompts: by transformers' continuous batching, or in batches padded on the left.

    ids = tokenise(tokenizer, "Once upon", chat=False)
    most = most_new_tokens(config, ids, 200)
    for row, ids in continuous(model, rows, seed): ...
    for row, ids in padded(model, rows, batch_size, steps, seed): ...

Both give a row back when it is done, in any order. What continuous batching could not do comes back with None.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from amoeba.core.errors import bad_value, one_line
from amoeba.data.documents import Message, by_template, shown
from amoeba.data.sources import Prompt
from amoeba.data.token_rows import begin_tokens
from amoeba.integrations.text_model import check_ids, positions
from amoeba.jobs.generate.options import end_ids
from amoeba.jobs.generate.token_steps import Steps, why_no_graphs

logger = logging.getLogger("amoeba")

_POLL_SECONDS = 1.0
_CONTINUOUS_PROCESSORS = frozenset({"Temperature", "TopK", "TopP"})


class Row(NamedTuple):
    """most: new tokens."""

    prompt: Prompt
    ids: list[int]
    most: int


Answer = tuple[Row, list[int]]


def why_not_continuous(model: Any) -> str | None:
    from amoeba.decoding.decoder import why_not_chosen
    from amoeba.decoding.step import replays_in
    from amoeba.integrations.coverage import why_waits

    if why_no_graphs(model.device) is not None:
        return f"its paged cache needs a GPU; the model is on {model.device.type}"
    if not hasattr(model, "init_continuous_batching"):
        return "this version of transformers has none for it"
    if replays_in(model) is not None:
        return "its experts are streamed, which transformers' graphs do not support"
    if (reason := why_waits(model)) is not None:
        return reason
    return why_not_chosen(model, model.generation_config, _CONTINUOUS_PROCESSORS)


def continuous(model: Any, rows: Sequence[Row], seed: int) -> Iterator[tuple[Row, list[int] | None]]:
    """None in place of an answer: transformers failed, and the log has its reason."""
    torch.manual_seed(seed)
    waiting = {str(row.prompt.line): row for row in rows}
    try:
        manager = model.init_continuous_batching(generation_config=model.generation_config)
    except Exception as error:  # a kind of attention or of cache that it does not have
        _tell_failure(one_line(error))
        yield from ((row, None) for row in rows)
        return
    manager.start()
    try:
        for name, row in waiting.items():
            manager.add_request(row.ids, request_id=name, max_new_tokens=row.most)
        while waiting:
            result = manager.get_result(timeout=_POLL_SECONDS)
            if result is None:
                if not manager.is_running():
                    break
            elif result.is_finished():
                row = waiting.pop(result.request_id)
                if result.error is not None:
                    _tell_failure(result.error)
                yield row, None if result.error is not None else _cut(result.generated_tokens, row, end_ids(model))
    finally:
        # newer versions are told not to finish requests that were abandoned
        hard = {"hard_stop": True} if "hard_stop" in inspect.signature(manager.stop).parameters else {}
        manager.stop(block=True, **hard)
    yield from ((row, None) for row in waiting.values())


def _tell_failure(reason: str) -> None:
    logger.warning("transformers' continuous batching failed (%s); continuing with padded batches", reason[:300])


def batches_of(rows: Sequence[Row], size: int, equal_lengths: bool) -> list[list[Row]]:
    """Rows of like length together, the longest first: if memory is too small, that shows at once."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        last = batches[-1] if batches else []
        fits = 0 < len(last) < size and (not equal_lengths or len(last[0].ids) == len(row.ids))
        last.append(row) if fits else batches.append([row])
    return batches


def padded(model: Any, batches: Sequence[Sequence[Row]], size: int, steps: Steps, seed: int) -> Iterator[Answer]:
    """size: the rows that the Decoder was made for, where there is one."""
    for batch in batches:
        own = seed + batch[0].prompt.line  # a batch does not repeat the random numbers of another
        prompts = [row.ids for row in batch]
        if steps.decoder is None:
            answers = _by_transformers(model, prompts, max(row.most for row in batch), own)
        else:
            rows = prompts + prompts[-1:] * (size - len(prompts))  # the last batch is filled up
            answers = _by_decoder(steps.decoder, rows, batch, end_ids(model), own)
        for row, ids in zip(batch, answers, strict=False):
            yield row, _cut(ids, row, end_ids(model))


def _by_transformers(model: Any, prompts: list[list[int]], most: int, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    tokens = max(map(len, prompts))
    # nothing attends to what comes before a prompt; a token of its own there is not penalised for being there
    rows = [[prompt[0]] * (tokens - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (tokens - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask_BL = (torch.tensor(each, dtype=torch.int64, device=model.device) for each in (rows, mask))
    out = model.generate(input_ids=ids, attention_mask=mask_BL, max_new_tokens=most)
    return out[:, tokens:].tolist()


def _by_decoder(
    decoder: Any, prompts: list[list[int]], batch: Sequence[Row], ends: list[int], seed: int
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in batch]
    open_rows = set(range(len(batch)))
    for tokens in decoder.generate(prompts, max(row.most for row in batch), seed):
        for place in list(open_rows):
            answers[place].append(tokens[place])
            if tokens[place] in ends or len(answers[place]) == batch[place].most:
                open_rows.discard(place)
        if not open_rows:
            break
    return answers


def _cut(ids: list[int], row: Row, ends: list[int]) -> list[int]:
    """Up to its end token, or as many as it may have."""
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return list(ids[: min(end + 1, row.most)])


def tokenise(tokenizer: Any, prompt: str | Sequence[Message], chat: bool, name: str = "prompt") -> list[int]:
    """prompt: a text, which is a user's message where chat is true, or the messages of a conversation."""
    if chat and not getattr(tokenizer, "chat_template", None):
        raise bad_value(
            "--chat",
            "a tokenizer with a chat template",
            "one without",
            "leave --chat out, or use the family's chat model (its name often ends in Instruct)",
        )
    messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    for message in messages:
        _check_unicode(message.content, name)
    if chat:
        text = by_template(messages, tokenizer, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise bad_value(name, "at least one token", f"none from {shown(prompt)}", "write some text to continue")
    if tokenizer.unk_token_id is not None and set(ids) <= {tokenizer.unk_token_id, *begin_tokens(tokenizer)}:
        raise bad_value(
            name,
            "words that the tokenizer knows",
            f"none in {shown(prompt)}",
            "use the tokenizer that the model was trained with",
        )
    return ids


def _check_unicode(text: str, name: str) -> None:
    """Bytes of an argument that are no UTF-8 come from Python as halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_value(
            name,
            "text in UTF-8",
            f"{text[error.start : error.start + 1]!a} at character {error.start}",
            "set the terminal to UTF-8, or convert the text, for example with iconv",
        ) from error


def most_new_tokens(config: Any, prompt_ids: list[int], asked: int, name: str = "prompt") -> int:
    check_ids(config, max(prompt_ids))
    room = positions(config)
    if room is None:
        return asked
    if len(prompt_ids) > room:
        raise bad_value(
            name,
            f"at most {room} tokens, the model's max_position_embeddings",
            f"{len(prompt_ids)} tokens",
            "shorten it, or use a model with a longer context",
        )
    most = min(asked, room - len(prompt_ids) + 1)  # the last token takes no position: it is not read again
    if most < asked:
        logger.info("at most %d new tokens instead of %d: the model has %d positions", most, asked, room)
    return most
