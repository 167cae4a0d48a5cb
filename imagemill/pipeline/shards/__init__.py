"""Records and their files into WebDataset shards, and what lies beside them.

Source: seed 001; CONTRACTS section 2.
"""
