"""Analyses of the whole dataset: moments of the latents, near-duplicate images."""
