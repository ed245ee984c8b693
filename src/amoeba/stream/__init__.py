"""Experts beyond memory: which of them are where, who leaves when room is needed, and what that costs."""
