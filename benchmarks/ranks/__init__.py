"""Experts over ranks: what an exchange costs, and how much of it is hidden. `worker` is a process, `run` all of it."""
