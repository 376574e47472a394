"""What every storey stands on: guarantees, checks, randomness, rounding, Opacus's private side."""
