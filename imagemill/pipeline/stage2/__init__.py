"""Stage 2: approved images and captions into embeddings and records, from Stage 1 records too.

Source: seeds 000 and 002; CONTRACTS section 1.
"""
