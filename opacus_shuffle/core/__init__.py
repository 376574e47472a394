"""What every storey stands on: guarantees, checks, randomness, rounding, roots, tables, and Opacus's private side."""
