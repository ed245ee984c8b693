"""What a training run was: routers watched while it trains, its folder read back, and one page that shows it."""
