"""The registry of embedding kinds, used by passes, shards, checks, counters and the command line.

To add a kind: one `EmbeddingSpec` here, one encoder module in encoders/ (with its preview recipe), one line in
assets/embeddings.py. Everything else follows from the registry.

Spec: docs/spec/stage2.md#embeddings, docs/spec/shards.md#members
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

DINOV3_WIDTH = 1024
VAE_CHANNELS = 16
VAE_DOWNSAMPLING = 8
# Above this the VAE's mid attention, quadratic in pixels, needs tens of gigabytes. The number of pixels alone decides,
# never free memory: tiled and untiled latents differ, and the same image must always get the same latent.
TILED_ABOVE_PIXELS = 4 * 1024 * 1024
TILE_PIXELS = 1024
TILE_OVERLAP = 0.25
T5_TOKENS = 77
T5_WIDTH = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A kind of model, to find or build one.

    Attributes:
        encoder: `module:Class` with a classmethod `load(settings)`; imported only when a file has to be made.
        default_model: hub id for real work, with `default_subfolder` inside it.
        own_section: section of its settings, if it is not that of an embedding kind.
    """

    kind: str
    encoder: str
    default_model: str
    default_subfolder: str | None = None
    own_section: str | None = None

    @property
    def section(self) -> str:
        """Name of its section in the configuration file."""
        return self.own_section or f"encoders.{self.kind}"

    def encoder_class(self) -> Any:
        """Import and return the encoder class. Call it late, because it imports torch."""
        module, _, name = self.encoder.partition(":")
        return getattr(importlib.import_module(module), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec(ModelSpec):
    """One embedding kind.

    Attributes:
        kind: name of the asset, also used in ledger, provenance and configuration.
        pass_name: its name for `--pass`.
        folder: folder below `derived/` with one `{image_id}.npy` per image.
        member: tar member suffix in a shard (`dinov3.npy`).
        source: the input, a change of which makes the file stale: the image's pixels or its caption.
        dtype: NumPy name of the stored dtype.
        shape: (height, width) of the oriented image in pixels → shape of the stored array.
        encoder: `module:Class` with a classmethod `load(settings)`; imported only when a file has to be made.
        default_model: hub id for real runs, with `default_subfolder` inside it.
        default_subfolder: folder of the model in its repository, if any.
        inline_field: field of a Stage 1 record that contained this array, if any.
        pixels_computed: (height, width) → pixels that the model computes, by which progress is measured.
    """

    pass_name: str
    folder: str
    member: str
    source: Literal["pixels", "caption"]
    dtype: str
    shape: Callable[[int, int], tuple[int, ...]]
    inline_field: str | None = None
    pixels_computed: Callable[[int, int], int] = lambda height, width: height * width


def latent_shape(height: int, width: int) -> tuple[int, int, int]:
    """Return (16, H // 8, W // 8)."""
    return VAE_CHANNELS, height // VAE_DOWNSAMPLING, width // VAE_DOWNSAMPLING


def tiled_pixels(height: int, width: int) -> int:
    """Return the number of pixels that the VAE computes: if an image is tiled, those of all tiles, which overlap."""
    if height * width <= TILED_ABOVE_PIXELS:
        return height * width
    step = int(TILE_PIXELS * (1 - TILE_OVERLAP))
    down, across = (sum(min(TILE_PIXELS, side - at) for at in range(0, side, step)) for side in (height, width))
    return down * across


_SPECS: dict[str, EmbeddingSpec] = {}


def register(spec: EmbeddingSpec) -> EmbeddingSpec:
    """Register a kind; raise ValueError if its pass name, folder or member belongs to another kind."""
    for other in _SPECS.values():
        for field in ("pass_name", "folder", "member"):
            if other.kind != spec.kind and getattr(other, field) == getattr(spec, field):
                raise ValueError(
                    f"embedding kind {spec.kind}: {field} {getattr(spec, field)!r} belongs to {other.kind}"
                )
    _SPECS[spec.kind] = spec
    return spec


def embedding_specs() -> tuple[EmbeddingSpec, ...]:
    """Return every kind in order of registration, which is also the order of members in a shard."""
    return tuple(_SPECS.values())


DINOV3 = register(
    EmbeddingSpec(
        kind="dinov3_npy",
        pass_name="dinov3",
        folder="dinov3",
        member="dinov3.npy",
        source="pixels",
        dtype="float32",
        shape=lambda height, width: (DINOV3_WIDTH,),
        encoder="imagemill.encoders.dinov3:DinoV3Encoder",
        default_model="facebook/dinov3-vitl16-pretrain-lvd1689m",
        inline_field="dinov3_embedding",
    )
)
VAE = register(
    EmbeddingSpec(
        kind="vae_latents",
        pass_name="vae",
        folder="vae_latents",
        member="vae.npy",
        source="pixels",
        dtype="float16",
        shape=latent_shape,
        pixels_computed=tiled_pixels,
        encoder="imagemill.encoders.flux_vae:FluxVaeEncoder",
        default_model="black-forest-labs/FLUX.1-dev",
        default_subfolder="vae",
    )
)
T5 = register(
    EmbeddingSpec(
        kind="t5_hidden",
        pass_name="t5",
        folder="t5_hidden",
        member="t5h.npy",
        source="caption",
        dtype="float16",
        shape=lambda height, width: (T5_TOKENS, T5_WIDTH),
        encoder="imagemill.encoders.t5:T5Encoder",
        default_model="google-t5/t5-large",
    )
)
