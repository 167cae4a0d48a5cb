"""The embedding kind `patch_tokens`: DINOv3's patch tokens of the bucket's crop. The declaration imports no torch."""

from typing import Annotated

import msgspec

from imagemill.domain.buckets import assign_bucket, bucket_size
from imagemill.domain.embedding_specs import Contract, EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings

PATCH = 16
WIDTH = 1024


class PatchTokenSettings(EncoderSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `patch_tokens`.

    Attributes:
        reduce: the picture has the bucket's size divided by this.
    """

    reduce: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1


def picture_size(contract: Contract, height: int, width: int) -> tuple[int, int]:
    """Return (height, width) in pixels of the picture that the model sees, multiples of a patch."""
    wide, high = bucket_size(assign_bucket(width, height))
    reduce = contract.get("reduce", 1)
    return high // reduce // PATCH * PATCH, wide // reduce // PATCH * PATCH


def token_shape(contract: Contract, height: int, width: int) -> tuple[int, int, int]:
    """Return (rows, columns, 1024): one token per patch."""
    high, wide = picture_size(contract, height, width)
    return high // PATCH, wide // PATCH, WIDTH


PATCH_TOKENS = EmbeddingSpec(
    kind="patch_tokens",
    description="DINOv3 patch tokens of the bucket's crop, float16 (rows, columns, 1024), in `derived/patch_tokens/`.",
    pass_name="patch-tokens",
    folder="patch_tokens",
    member="patches.npy",
    source="pixels",
    dtype="float16",
    array_shape=token_shape,
    settings_class=PatchTokenSettings,
    contract_names=("reduce",),  # a change of this setting needs other files
    encoder="imagemill_patch_tokens.encoder:PatchTokenEncoder",
    default_model="facebook/dinov3-vitl16-pretrain-lvd1689m",
)
