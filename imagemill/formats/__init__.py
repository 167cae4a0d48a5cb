"""Bytes on disk, writer and reader of each format side by side."""
