"""Sums of bounded vectors and numbers by multi-message shuffling."""
