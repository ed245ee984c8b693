"""`python -m benchmarks products`: each kernel of the GPU path by itself, beside torch's grouped products."""
