"""Tensors of GPUs on their way to workers of the same host: memory that is lent, borrowed, and in which order."""
