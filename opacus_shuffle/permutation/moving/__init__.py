"""Moves entries of parameters: layouts, moves, and the kernels that carry them out."""
