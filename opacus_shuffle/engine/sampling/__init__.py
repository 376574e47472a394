"""How batches are drawn: the plan, and the samplers that keep to it."""
