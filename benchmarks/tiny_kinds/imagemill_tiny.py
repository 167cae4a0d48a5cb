"""Three embedding kinds of 16 bytes each, so that a million images measure imagemill and not the disk."""

from imagemill.domain.embedding_specs import Contract, EmbeddingSpec


def _four(contract: Contract, height: int, width: int) -> tuple[int, ...]:
    """Return (4,)."""
    return (4,)


TINY_A, TINY_B, TINY_C = (
    EmbeddingSpec(
        kind=f"tiny_{letter}",
        description=f"Nothing: float32 (4,), in `derived/tiny_{letter}/{{image_id}}.npy`.",
        pass_name=f"tiny_{letter}",
        folder=f"tiny_{letter}",
        member=f"tiny_{letter}.npy",
        source="pixels",
        dtype="float32",
        array_shape=_four,
        encoder="benchmarks.common.free_encoder:FreeEncoder",
        default_model="preview",
    )
    for letter in "abc"
)
