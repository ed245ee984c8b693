"""Benchmarks beyond one layer (that is `amoeba bench`): whole models, streamed experts, experts over ranks, single
kernels, and every command with every place and format of the experts. From the root of the repository:

    python -m benchmarks models|stream|ranks|products|roads --help
"""

import shlex


def command(suite: str, *words: str, **options: object) -> str:
    """The command that measures the same again. options: of each a value, a list of them, or None."""
    for name, given in options.items():
        several = given if isinstance(given, list) else [] if given is None else [given]
        words += tuple(word for each in several for word in (f"--{name.rstrip('_').replace('_', '-')}", str(each)))
    return shlex.join(["python", "-m", "benchmarks", suite, *words])
