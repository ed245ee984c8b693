"""Gluon's kernels for Hopper."""
