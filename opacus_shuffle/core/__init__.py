"""Used by all other rooms: guarantees, validation, randomness, rounding, and Opacus's internals."""
