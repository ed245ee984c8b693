"""Text on its way to a model: read, tokenised, cut into rows."""
