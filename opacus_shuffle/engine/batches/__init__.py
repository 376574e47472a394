"""The batches of a private run: samplers, data loaders, and the ticket of each batch."""
