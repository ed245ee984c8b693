"""The best output there is here: rich's, or plain lines where rich is not installed."""

from __future__ import annotations

from amoeba.commands.output import Output


def make_output(verbose: bool = False) -> Output:
    try:
        from amoeba.commands.rich_output import RichOutput
    except ImportError:
        output = Output()
    else:
        output = RichOutput()
    output.verbose = verbose
    return output
