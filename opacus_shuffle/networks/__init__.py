"""Networks as users bring them: running them untouched, on what, and whether they may train."""
