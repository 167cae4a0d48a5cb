"""With this folder on PYTHONPATH every Python process uses the stub encoders, including those that `imagemill ui` starts."""

from imagemill.domain.embedding_specs import EmbeddingSpec
from tests.helpers.stubs import StubEncoder

EmbeddingSpec.encoder_class = lambda self: StubEncoder
