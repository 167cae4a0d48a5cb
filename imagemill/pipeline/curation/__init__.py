"""Looks at the whole dataset: moments of the latents, images that are nearly the same."""
