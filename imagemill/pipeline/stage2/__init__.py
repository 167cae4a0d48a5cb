"""Stage 2: approved images and captions into embeddings and records, from Stage 1 records too.

Spec: docs/spec/stage2.md#embeddings
"""
