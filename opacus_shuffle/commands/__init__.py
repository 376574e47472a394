"""The command line, the demo network and its data."""
