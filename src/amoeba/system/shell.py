"""Commands that we tell a user to run, safe to copy into a shell.

shell_command("generate", "my models/base", "--chat")     # amoeba generate 'my models/base' --chat
shell_words("--resume", folder)                           # a part of one
"""

from __future__ import annotations

import shlex


def shell_command(command: str, *words: object) -> str:
    """command: of aMoEba, with or without the name in front ("amoeba train")."""
    return shell_words("amoeba", command.removeprefix("amoeba "), *words)


def shell_words(*words: object) -> str:
    return shlex.join(map(str, words))
