"""Benchmarks beyond one layer (that is `amoeba bench`): whole models, streamed experts, experts over ranks, single
kernels. From the root of the repository:

    python -m benchmarks models|stream|ranks|products --help
"""
