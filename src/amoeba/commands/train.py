"""`amoeba train`: runs it and tells how it ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from amoeba.commands.exits import TRAINER, need
from amoeba.commands.output import Output
from amoeba.jobs.settings import TrainSettings
from amoeba.system.loading import loading
from amoeba.system.shell import shell_command


def run(
    settings: TrainSettings, resume: bool, start_from: str | None, output: Output, trust_remote_code: bool = False
) -> dict[str, Any]:
    need(*TRAINER)
    with loading():
        from amoeba.commands.over_ranks import job_over_ranks
        from amoeba.jobs.train.train import train

    report, first = job_over_ranks(
        train, settings, output, resume=resume, start_from=start_from, trust_remote_code=trust_remote_code
    )
    if not first:
        return asdict(report)
    output.heading("trained" if not report.interrupted else "stopped")
    output.facts(
        [
            ("held-out loss", f"{report.losses()} (perplexity {report.perplexity:.1f})"),
            ("steps", f"{report.steps} in {report.seconds:.0f} s, {report.tokens_per_second:,.0f} tokens/s at the end"),
            ("dead experts", f"{report.dead_experts} at the end"),
            ("model", f"{report.model}    try: {shell_command('generate', report.model, 'The with statement')}"),
            ("run", f"{report.folder}    look: {shell_command('report', report.folder)}"),
        ]
    )
    return asdict(report)
