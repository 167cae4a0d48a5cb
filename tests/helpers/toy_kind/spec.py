"""First of the two files that add an embedding kind: its spec."""

from imagemill.domain.embedding_specs import EmbeddingSpec, register

COLOURS = 5


def colour_shape(contract, height, width):
    """Return (5,)."""
    return (COLOURS,)


TOY = register(
    EmbeddingSpec(
        kind="mean_colour",
        description="Mean colour of each image, float32 (5,), in `derived/mean_colour/{image_id}.npy`.",
        pass_name="toy",
        folder="mean_colour",
        member="colour.npy",
        source="pixels",
        dtype="float32",
        array_shape=colour_shape,
        encoder="tests.helpers.toy_kind.encoder:ToyEncoder",
        default_model="example/mean-colour",
    )
)
