"""`amoeba serve MODEL`: answers HTTP requests in OpenAI's protocol, many at once."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from typing import Annotated

from typer import Option

from amoeba.commands.exits import finish, interrupted, need, usage
from amoeba.commands.generate import Computing, Sampling
from amoeba.commands.options import Json, ModelArgument, Verbose
from amoeba.commands.start import hide_loading_bars, start
from amoeba.core.errors import bad_value
from amoeba.system.fast_imports import loading

_KEY = "AMOEBA_API_KEY"


def serve(
    model: Annotated[str, ModelArgument],
    *,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 for any free port.")] = 8000,
    api_key: Annotated[
        str | None, Option(help=f"Bearer key that clients must send (default: ${_KEY}, or none).")
    ] = None,
    name: Annotated[str | None, Option(help="Name of the model in requests (default: its folder's).")] = None,
    adapter: Annotated[
        list[str] | None, Option(help="name=folder: a PEFT adapter, chosen by its name. Can be repeated.")
    ] = None,
    slots: Annotated[
        int | None, Option(help="Answers generated at once, per adapter (default: 32 on a GPU, 8 on a CPU).")
    ] = None,
    context: Annotated[
        int | None, Option(help="Maximum tokens of prompt and answer (default: 4096, or what the model allows).")
    ] = None,
    max_new_tokens: Annotated[int, Option(help="Maximum tokens of an answer, unless the request sets it.")] = 1024,
    queue: Annotated[int, Option(help="Requests that can wait for a slot. Further ones get status 429.")] = 64,
    max_body: Annotated[int, Option(help="Maximum bytes of a request. Longer ones get status 413.")] = 4 * 2**20,
    sampling: Sampling,
    computing: Computing,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model through an OpenAI-compatible API, with a chat page at /. SIGTERM or Ctrl-C finishes current
    answers, then exits."""
    output = start(verbose)
    with usage():
        need("tokenizers", "safetensors", "transformers", "transformers.models.auto.modeling_auto")
        need("fastapi", "uvicorn", "prometheus_client")
        with loading():
            from amoeba.jobs.generate.options import GenerationOptions
            from amoeba.serve.served_model import DEFAULT_CONTEXT, open_model, parse_adapters
            from amoeba.serve.server import Limits, bound, make_app, run

        if not 0 <= port < 2**16 or queue < 0 or max_body < 1:
            expected, got = "--port 0 to 65535, --queue from 0, --max-body from 1", f"{port}, {queue}, {max_body}"
            raise bad_value("serve", expected, got, "leave them out")
        address = bound(host, port)
        hide_loading_bars(model, output)
        options = GenerationOptions(max_new_tokens, **vars(sampling), **computing.told())
        adapters = parse_adapters(adapter or [])
        lanes = 1 + len(adapters)  # each has rows of its own, and one to read prompts in
        most = (slots or computing.at_once()) + 1
        taken = computing.take_plan(model, context or DEFAULT_CONTEXT, most * lanes - 1, purpose="serve")
        options = replace(options, **taken.options)
        if computing.plan is not None and taken.work is not None and taken.work.purpose == "serve":
            slots, context = slots or taken.work.batch, context or taken.work.context
        if taken.words is not None:
            output.say(taken.words)
        if output.on_terminal:
            output.say(f"loading {model}")
        try:
            served = open_model(
                model, options, name=name, adapters=adapters, slots=slots, context=context, say=output.say
            )
        except KeyboardInterrupt:
            raise interrupted("before the first request") from None
        with closing(served), closing(address):
            engine = served.engine
            output.say(f"steps {engine.kind}: {engine.reason}; {engine.slots} slots of {served.context} tokens")
            app = make_app(served, Limits(queue, max_body), api_key or os.environ.get(_KEY) or None, taken.chosen)
            shown = f"[{host}]" if ":" in host else host
            where = f"{', '.join(served.names)} at http://{shown}"
            run(app, served, address, lambda chosen: output.say(f"{where}:{chosen}/v1"))
            document = {"document": "amoeba serve", **served.status(), **served.loaded.facts()}
            document["plan"] = taken.compared(document)
    finish(output, document, True, json)
