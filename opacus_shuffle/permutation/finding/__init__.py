"""Finding which axes of which parameters may move together: labels of axes, rules of operations, and a tracer."""
