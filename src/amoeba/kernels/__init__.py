"""Triton kernels and their launchers, one subject per file. No autograd and no modules in here: backends call these.

`import amoeba` never imports this package; it needs Triton.
"""
