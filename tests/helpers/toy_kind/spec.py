"""First of the three files that add an embedding kind: its spec."""

from imagemill.domain.embedding_specs import EmbeddingSpec, register

COLOURS = 5

TOY = register(
    EmbeddingSpec(
        kind="mean_colour",
        pass_name="toy",
        folder="mean_colour",
        member="colour.npy",
        source="pixels",
        dtype="float32",
        shape=lambda height, width: (COLOURS,),
        encoder="tests.helpers.toy_kind.encoder:ToyEncoder",
        default_model="example/mean-colour",
    )
)
