"""How rows of tokens travel between ranks: one file per way, each with its own why_not."""
