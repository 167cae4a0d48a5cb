"""Encoders without cost, for benchmarks of everything around a model."""

from imagemill.domain.embedding_specs import EmbeddingSpec


def use_free_encoders() -> None:
    """Give every embedding kind an encoder without cost, in this process."""
    EmbeddingSpec.encoder_class = _free_encoder


def _free_encoder(_spec):
    # Not imported by commands that encode nothing: NumPy would be a quarter of their time.
    from benchmarks.common.free_encoder import FreeEncoder

    return FreeEncoder
