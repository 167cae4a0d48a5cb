"""Presets of public datasets: rescaled images, boxes in three spaces, and filtered presets that share the images.

Spec: docs/spec/presets.md#layout
"""
