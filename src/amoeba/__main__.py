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


def main() -> None:
    try:
        from amoeba.cli import main as run

        run()
    except KeyboardInterrupt:  # outside of what `commands.exits` guards
        if "--json" in sys.argv[1:] and os.environ.get("RANK", "0") == "0":
            print(json.dumps(_INTERRUPTED), flush=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all that counts is written


if __name__ == "__main__":
    main()
