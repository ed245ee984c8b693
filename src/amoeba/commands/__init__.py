"""What the commands do and print. typer and rich are imported here only, and nothing here needs them."""
