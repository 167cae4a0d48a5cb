"""The viewer: photographs, frames and latents of a data root as pictures for people. Neither Dagster nor torch is imported."""
