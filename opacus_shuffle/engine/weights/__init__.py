"""Permutes the weights of a network while it is trained."""
