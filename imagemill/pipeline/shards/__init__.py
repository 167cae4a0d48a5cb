"""Records and their files into WebDataset shards, and what lies beside them.

Spec: docs/spec/shards.md#updating-a-set
"""
