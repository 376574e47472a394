"""Which axes of which parameters may move together: tracing, rules, labels."""
