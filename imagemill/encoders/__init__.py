"""Encoders: the only modules that import torch. One file per model, and small random preview checkpoints for each."""
