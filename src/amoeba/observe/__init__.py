"""Observing a training run: its routers while it trains, its folder read back, and the HTML report."""
