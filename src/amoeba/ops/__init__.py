"""The rest of a training step: attention, rotary embedding, the language model's loss."""
