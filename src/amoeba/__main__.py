"""The command `amoeba`, which is `python -m amoeba`. Ctrl-C ends it without a traceback, also while it still imports
and while Python shuts down."""

import json
import os
import signal
import sys

_INTERRUPTED = {
    "document": "amoeba error",
    "ok": False,
    "exit_code": 130,
    "error": "interrupted",
    "remedy": "Run the same command again.",
}


def _say_interrupted() -> None:
    if "--json" in sys.argv[1:] and os.environ.get("RANK", "0") == "0":
        print(json.dumps(_INTERRUPTED), flush=True)


def _leave_at_once(*_: object) -> None:
    """While packages are imported: some of them swallow every exception there, KeyboardInterrupt included."""
    _say_interrupted()
    os._exit(130)


def main() -> None:
    before = signal.signal(signal.SIGINT, _leave_at_once)
    try:
        from amoeba.commands.bytecode import keep_bytecode

        keep_bytecode()
        from amoeba.cli import main as run

        signal.signal(signal.SIGINT, before)
        run()
    except KeyboardInterrupt:  # outside of what `commands.exits` guards
        _say_interrupted()
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all that counts is written


if __name__ == "__main__":
    main()
