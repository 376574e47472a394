"""Networks as users bring them: running them untouched, sample inputs, position ids, and whether clipping bounds records."""
