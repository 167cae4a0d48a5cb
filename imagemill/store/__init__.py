"""Persistent state of a data root."""
