"""The only rooms that import torch: one file per model, and the preview checkpoints that stand in for them."""
