"""What every storey stands on: guarantees, checks of arguments, secret randomness, rounding, and the seam to Opacus's private side."""
