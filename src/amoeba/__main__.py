"""`python -m amoeba` is the command `amoeba`."""

from amoeba.cli import main

main()
