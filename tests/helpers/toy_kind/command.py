"""`imagemill` with an additional embedding kind. The shipped kinds get encoders without cost, the toy kind its own encoder."""

from imagemill.domain.embedding_specs import EmbeddingSpec
from tests.helpers.stubs import StubEncoder
from tests.helpers.toy_kind.spec import TOY

if __name__ == "__main__":
    from dagster_project.cli.main import main
    from imagemill.processes import run_process

    own_encoder = EmbeddingSpec.encoder_class
    EmbeddingSpec.encoder_class = lambda self: own_encoder(self) if self == TOY else StubEncoder
    run_process(main)
