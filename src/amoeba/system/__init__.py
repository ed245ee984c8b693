"""The machine: its processors and versions, files on its disk, tables tuned for it."""
