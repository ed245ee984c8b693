"""`amoeba warm MODEL`: compiles what a command will need for this model, before there is anything to run."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

from typer import Argument, Option

from amoeba.commands.exits import finish, interrupted, need, usage
from amoeba.commands.options import Json, TrustRemoteCode, Verbose
from amoeba.commands.start import start
from amoeba.core.errors import bad_value
from amoeba.jobs.compile_ahead import Work

_COMMANDS = ("generate", "finetune", "train")


def warm(
    model: Annotated[str, Argument(help="A model folder (config.json is enough) or a preset of train.")],
    wanted: Annotated[
        list[str] | None,
        Option("--for", help="The command to prepare: generate (default), finetune or train. Can be repeated."),
    ] = None,
    gpu: Annotated[str | None, Option(help="Compile for this GPU, for example sm_90, on a machine without it.")] = None,
    batch_size: Annotated[
        int | None, Option(min=1, help="Batch size that the command will use (default: the command's).")
    ] = None,
    sequence_length: Annotated[int | None, Option(min=1, help="Sequence length for train and finetune.")] = None,
    precision: Annotated[str, Option(help="Precision for train.")] = "bf16",
    r: Annotated[int, Option("--r", "--lora-rank", min=1, help="LoRA rank for finetune.")] = 16,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compile the GPU kernels that a command needs for a model, on all cores. Reads no weights."""
    output = start(verbose)
    need("transformers", "triton")
    from amoeba.jobs.settings import FinetuneSettings, TrainSettings
    from amoeba.jobs.train.resume import settings_of
    from amoeba.jobs.warm import warm as compile_for
    from amoeba.kernels.launch.ahead import gpu_named

    documents = []
    with usage():
        device = gpu_named(gpu)
        given: dict[str, Any] = {"model": model, "batch_size": batch_size, "sequence_length": sequence_length}
        given = {name: value for name, value in given.items() if value is not None}
        for command in wanted or ["generate"]:
            if command not in _COMMANDS:
                raise bad_value("--for", f"one of {', '.join(_COMMANDS)}", repr(command), "choose one, or repeat it")
            if command == "generate":
                work = Work(command, model, batch_size or 1)
            elif command == "train":
                work = Work.of_run(command, settings_of(TrainSettings, None, None, given | {"precision": precision}))
            else:
                work = Work.of_run(command, settings_of(FinetuneSettings, None, None, given | {"r": r}))
            output.progress(f"compiling for {command} on {device.name}")
            try:
                with output.working():
                    found = compile_for(replace(work, trust_remote_code=trust_remote_code), device, output.progress)
            except KeyboardInterrupt:
                raise interrupted("what was compiled until now is kept") from None
            output.facts([(command, f"{found.kernels} kernels in {found.seconds:.1f} s")])
            for reason in found.left_out:
                output.line(f"  left to {command} itself: {reason}")
            documents.append(asdict(found) | {"command": command})
    finish(output, {"document": "amoeba warm", "model": model, "found": documents}, True, json)
