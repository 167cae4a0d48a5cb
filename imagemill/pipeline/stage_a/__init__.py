"""Stage-A: one-line summaries by ranks, merged per group.

Source: seed 003; CONTRACTS section 5.
"""
