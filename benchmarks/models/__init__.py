"""Whole models: training steps, LoRA steps and decodes with our experts and with transformers' own.

`problem` says what is measured; `candidates` who takes part (with `as_commands`, the steps of our own commands, and
`decoding`); `measure` how one is measured; `worker` is the process that a family runs in; `run` starts them in turn.
"""
