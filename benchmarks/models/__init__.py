"""Whole models: training steps, LoRA steps and decodes with our experts beside transformers' own.

`problem` says what is measured; `as_commands` (steps of our own commands), `training`, `low_rank` and `decoding` how a
candidate prepares it; `candidates` who takes part; `measure` how one is measured, and `greedy` whether its tokens are
those of the plain loop; `worker` is the process that a family runs in, `process` how it is seen from outside; `suite`
starts one after another.
"""
