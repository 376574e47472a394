"""Moving entries of tensors: where they lie (layout), what moves (moves), and PyTorch or Triton to do it (gather chooses)."""
