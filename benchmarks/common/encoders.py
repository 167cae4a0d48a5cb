"""Encoders of no cost, for benchmarks of everything around a model."""

from imagemill.embedding_specs import EmbeddingSpec
from tests.helpers.stubs import StubEncoder


def use_stubs() -> None:
    """Give every embedding kind the stub, in this process."""
    EmbeddingSpec.encoder_class = lambda self: StubEncoder
