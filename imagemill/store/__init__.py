"""Stored knowledge about a data root."""
