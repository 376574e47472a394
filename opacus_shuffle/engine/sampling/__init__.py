"""How batches are drawn: samplers, loaders, and tickets for each batch."""
