"""Experts streamed through slots in the memory of a CPU."""
