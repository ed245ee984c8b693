"""Experts over ranks, measured: what the exchange costs, and how much of it is hidden."""
