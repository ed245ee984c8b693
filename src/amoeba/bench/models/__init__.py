"""Whole models: training steps, LoRA steps and decodes with our experts beside transformers' own.

`problem` says what is measured, `training`, `low_rank` and `decoding` how a candidate prepares it, `candidates` who
takes part, `measure` how one is measured, `worker` is the process that it runs in, `suite` starts one after another.
"""
