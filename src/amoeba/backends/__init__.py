"""One file per way to compute experts. `experts_operator.py` turns a pair of functions (forward, backward) into a
backend."""
