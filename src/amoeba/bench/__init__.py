"""The benchmark: our backends and their peers on one problem, checked first, then timed in turns.

`shapes` says what is measured, `workload` makes the numbers and the truth about them, `implementations` who computes
them, `timing`, `sustained`, `nvml` and `memory` how it is measured, `ceilings` what there is to reach, `suite` runs it
all, `document` writes it down. `models` does the same for whole models.
"""
