"""The benchmark of a layer: our backends and their peers on one problem, checked first, then timed alternately.

`shapes` says what is measured, `workload` makes the numbers and the truth about them, `implementations` and `peers` who
computes them, `timing`, `sustained`, `captured` and `memory` how it is measured, `ceilings` what there is to reach,
`suite` runs it all, `document` writes it down. Suites beyond one layer are in the repository's benchmarks/.
"""
