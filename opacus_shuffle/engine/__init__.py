"""The seam to Opacus's training side: the privacy engine and what it is made of."""
