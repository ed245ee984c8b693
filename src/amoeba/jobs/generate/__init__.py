"""Generation: text from one prompt, or from each prompt of a file."""
