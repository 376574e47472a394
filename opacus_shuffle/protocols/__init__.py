"""Sums of bounded vectors and numbers by multi-message shuffling: see ``vector_sum.py``."""
