"""The bounds of every mechanism, and the registry they answer through."""
