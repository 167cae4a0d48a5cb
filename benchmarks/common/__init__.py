"""Shared parts of the benchmarks: inputs, timing, and the other sides of the comparisons."""
