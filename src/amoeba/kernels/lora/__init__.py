"""LoRA on the GPU: joined factors, the term that a product adds in its epilogue, and the backward pass."""
