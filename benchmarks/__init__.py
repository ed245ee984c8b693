"""Benchmarks beyond one layer (that is `amoeba bench`): whole models, streamed experts, experts over ranks, single
kernels, and every command with every place and format of the experts. From the root of the repository:

    python -m benchmarks models|stream|ranks|products|roads --help
"""
