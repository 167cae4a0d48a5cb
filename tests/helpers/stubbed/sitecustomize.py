"""With this folder on PYTHONPATH every Python process has the stub encoders: those that `imagemill ui` starts too."""

from imagemill.domain.embedding_specs import EmbeddingSpec
from tests.helpers.stubs import StubEncoder

EmbeddingSpec.encoder_class = lambda self: StubEncoder
