"""Finding which axes of which parameters may move together: axes, rules, and a tracer."""
