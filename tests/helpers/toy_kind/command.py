"""`imagemill` with one embedding kind more; the shipped kinds get encoders of no cost, the toy its own."""

from imagemill.domain.embedding_specs import EmbeddingSpec
from tests.helpers.stubs import StubEncoder
from tests.helpers.toy_kind.asset import TOY

if __name__ == "__main__":
    from dagster_project.cli.main import main

    own_encoder = EmbeddingSpec.encoder_class
    EmbeddingSpec.encoder_class = lambda self: own_encoder(self) if self is TOY else StubEncoder
    main()
