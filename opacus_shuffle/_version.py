"""The version, apart so that building the package imports nothing else."""

__version__ = "0.1.0"
