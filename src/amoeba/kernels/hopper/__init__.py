"""Gluon kernels for Hopper: gemm, fp8_gemm, weight_only_gemm, wgrad."""
