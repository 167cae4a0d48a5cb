"""Packing of records and their npy files into WebDataset shards, and the documents of each set.

Spec: docs/spec/shards.md#updating-a-set
"""
