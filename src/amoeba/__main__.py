"""The command `amoeba`, which is `python -m amoeba`. Ctrl-C ends it without a traceback while it still imports, and
while Python shuts down."""

import signal
import sys


def main() -> None:
    try:
        from amoeba.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all that counts is written


if __name__ == "__main__":
    main()
