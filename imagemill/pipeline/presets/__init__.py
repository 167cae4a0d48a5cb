"""Public datasets into presets: images at other sizes, boxes in three spaces, filtered ones that share every image.

Source: seed 004; CONTRACTS section 3.
"""
