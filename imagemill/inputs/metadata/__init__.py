"""Captions in metadata files: a row per image, in one module per format.

    metadata.jsonl ──jsonl.read_rows──> MetadataRow, BadRow ──row_captions.py──> ledger

Each format is a module here with FILE_NAMES, SUFFIXES and `read_rows`; adding one touches no other file.

Spec: docs/spec/stage2.md#metadata-files
"""
