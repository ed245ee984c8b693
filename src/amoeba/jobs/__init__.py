"""What the long-running commands do: train, fine-tune, generate, convert. Here is what these jobs share."""
