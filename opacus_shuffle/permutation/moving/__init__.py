"""Moves the entries of tensors by permutations, with PyTorch or with Triton."""
