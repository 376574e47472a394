"""Training with Opacus: the privacy engine, and the packages that it combines."""
