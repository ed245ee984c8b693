"""What the long-running commands are made of: text in, a tokenizer, rows of tokens, a trained model out."""
