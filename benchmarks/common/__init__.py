"""What the benchmarks share: their images, their clock, and the other sides of their comparisons."""
