"""`amoeba chat MODEL`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import json as json_format
import os
import sys
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from amoeba.commands.exits import finish, go_on, interrupted, need, usage
from amoeba.commands.generate import Computing, Sampling, write
from amoeba.commands.options import Json, ModelArgument, Verbose
from amoeba.commands.start import hide_loading_bars, start
from amoeba.core.errors import counted
from amoeba.system.fast_imports import loading

if TYPE_CHECKING:
    from amoeba.commands.output import Output
    from amoeba.jobs.generate.chat import Answer, Chat

HELP = """\
/retry          answer the last question once more
/undo           forget the last question and its answer
/clear          begin a new conversation
/system TEXT    begin a new one with this system message
/save FILE      write the conversation as a line of JSON, as amoeba finetune reads it
/exit           leave; so does Ctrl-D
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer."""


def chat(
    model: Annotated[str, ModelArgument],
    *,
    adapter: Annotated[
        str | None, Option(help="PEFT adapter to load: its folder, or a run of amoeba finetune.")
    ] = None,
    system: Annotated[str | None, Option(help="System message that begins every conversation.")] = None,
    context: Annotated[
        int | None, Option(help="Maximum tokens of a conversation (default: 4096, or what the model allows).")
    ] = None,
    max_new_tokens: Annotated[int, Option(help="Maximum number of tokens of an answer.")] = 1024,
    sampling: Sampling,
    computing: Computing,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Talk to a model in the terminal. /help lists the commands; Ctrl-C stops an answer."""
    output = start(verbose)
    with usage():
        need("tokenizers", "safetensors", "transformers", "transformers.models.auto.modeling_auto")
        with loading():
            from amoeba.jobs.generate.chat import DEFAULT_CONTEXT, open_chat
            from amoeba.jobs.generate.options import GenerationOptions

        hide_loading_bars(model, output)
        options = GenerationOptions(max_new_tokens, **vars(sampling), chat=True, **computing.told())
        taken = computing.take_plan(model, context or DEFAULT_CONTEXT, batch=1)
        options = replace(options, **taken.options)
        if taken.words is not None:
            output.say(taken.words)
        if output.on_terminal:
            output.say(f"loading {model}")
        try:
            opened = open_chat(model, options, adapter, context, system, output.say)
        except KeyboardInterrupt:
            raise interrupted("before the first message") from None
        with closing(opened):
            answers = _talk(opened, output)
            document = {
                "document": "amoeba chat",
                "messages": [message._asdict() for message in opened.messages],
                "answers": [asdict(answer) for answer in answers],
                "seed": opened.seed,
                **opened.loaded.facts(),
            }
            longest = max(answers, key=lambda answer: answer.generated_tokens, default=None)
            speed = {} if longest is None else {"generation_tokens_per_second": longest.tokens_per_second}
            document["plan"] = taken.compared(speed | document)
    finish(output, document, True, json)


def _talk(chat: Chat, output: Output) -> list[Answer]:
    in_terminal, answers = sys.stdin.isatty(), []
    if in_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines and remembers them
        output.say("/help lists the commands, Ctrl-D leaves")
    while (text := _read(in_terminal)) is not None:
        if not text.strip():
            continue
        try:
            if text.startswith("/"):
                word, _, rest = text.partition(" ")
                if word == "/exit":
                    break
                answer = _command(chat, word, rest.strip(), output)
            else:
                answer = chat.answer(text, write)
        except (ValueError, OSError) as error:  # the conversation is as it was
            output.warning(str(error))
            continue
        if answer is not None:
            answers.append(answer)
            _end_answer(answer, output)
    return answers


def _read(in_terminal: bool) -> str | None:
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if in_terminal else "")
        except EOFError:
            if in_terminal:
                write("\n")
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            go_on()
            write("\n(Ctrl-D or /exit leaves)\n")
            return ""
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _command(chat: Chat, word: str, rest: str, output: Output) -> Answer | None:
    if word == "/retry":
        return chat.retry(write)
    if word == "/undo":
        asked = chat.undo()
        output.progress("nothing was asked yet" if asked is None else f"forgotten: {asked.content}")
    elif word in ("/clear", "/system"):
        chat.clear(rest if word == "/system" else None)
        output.progress("a new conversation")
    elif word == "/save" and rest and all(message.role != "assistant" for message in chat.messages):
        output.progress("nothing to save yet")
    elif word == "/save" and rest:
        line = json_format.dumps({"messages": [message._asdict() for message in chat.messages]}, ensure_ascii=False)
        with Path(os.path.expanduser(rest)).open("a") as file:
            file.write(f"{line}\n")
        output.progress(f"added to {rest}")
    else:
        wrong = {"/help": "", "/save": "/save: expected a file name\n"}.get(word, f"{word}: no such command\n")
        output.progress(wrong + HELP)
    return None


def _end_answer(answer: Answer, output: Output) -> None:
    go_on()
    if not answer.text.endswith("\n"):
        write("\n")
    parts: list[Any] = [counted(answer.generated_tokens, "token")]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.1f}/s")
    if answer.seconds_to_first_token is not None:
        parts.append(f"first after {answer.seconds_to_first_token:.2f} s")
    if answer.stopped != "end of text":
        parts.append("stopped" if answer.stopped == "interrupted" else "cut off: raise --max-new-tokens or --context")
    output.progress(f"[{', '.join(parts)}]")
