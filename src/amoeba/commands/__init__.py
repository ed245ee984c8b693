"""What the commands do and print. typer and rich are imported here and in cli.py only."""
