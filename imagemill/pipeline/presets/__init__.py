"""Public datasets into presets: images at other sizes, boxes in three spaces, filtered ones that share every image.

Spec: docs/spec/presets.md#layout
"""
