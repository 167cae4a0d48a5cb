"""Embedding kinds: their declaration, those that ship with imagemill, and those in use in this process.

Passes, assets, shards, checks, counters and the command line follow `embedding_specs()`. Kinds of other packages are found,
and the list of a data root is read, in imagemill/kinds.py.

Spec: docs/spec/stage2.md#kinds, docs/spec/stage2.md#embeddings, docs/spec/shards.md#members
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from imagemill.domain.buckets import assign_bucket, bucket_size, use_of_crop
from imagemill.domain.encoder_settings import ClipTextSettings, DinoV3Settings, EncoderSettings, T5Settings, VaeSettings

if TYPE_CHECKING:
    import numpy as np

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
CLIP_TOKENS = 77
CLIP_WIDTH = 768

# Settings of a kind that determine its arrays' shape or content, by name, as in the facts of a model's identity.
Contract = Mapping[str, Any]


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


class Refusal(NamedTuple):
    """Why the settings of a kind refuse an image."""

    reason: str
    detail: str
    remedy: str


class Part(NamedTuple):
    """One of several arrays that one forward call gives, and one file contains.

    Attributes:
        name: field of the file's structured array.
        ending: what the member's name has after that of the kind: "_pooled" for `clip_pooled.npy`.
        array_shape: (contract, height, width of the oriented image in pixels) → shape.
    """

    name: str
    ending: str
    array_shape: Callable[[Contract, int, int], tuple[int, ...]]


def no_refusal(settings: EncoderSettings, height: int, width: int) -> None:
    """Refuse nothing."""


def computed_pixels(contract: Contract, height: int, width: int) -> int:
    """Return the pixels of the image."""
    return height * width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingSpec(ModelSpec):
    """One embedding kind. Specs of one kind are equal; contract and settings are not compared.

    Attributes:
        kind: name of the asset, also used in ledger, provenance and configuration.
        description: of the asset, one sentence.
        pass_name: its name for `--pass`.
        folder: folder below `derived/` with one `{image_id}.npy` per image.
        member: tar member suffix in a shard (`dinov3.npy`).
        parts: arrays of a file that has several: its npy is a structured array without dimensions, with a field for each, and
            each is a member of its own in a shard. Empty for a file of one array.
        source: the input, a change of which makes the file stale: the image's pixels or its caption.
        dtype: NumPy name of the stored dtype.
        array_shape: (contract, height, width of the oriented image in pixels) → shape of the stored array; of a kind with parts,
            of the first.
        work_pixels: (contract, height, width) → pixels that the model computes, by which progress is measured.
        settings_class: class of its settings in the configuration.
        contract: settings in force that determine shape or content; a name that is absent has its default.
        contract_names: names of these settings, in `OLD_VALUES`.
        model_names: those of them that the model's own configuration determines.
        settings: of a data root; None for a kind as declared.
        refusal: (settings, height, width) → why they refuse an image of this size, None if they do not.
        encoder: `module:Class` with a classmethod `load(settings)`; imported only when a file has to be made.
        default_model: hub id for real runs, with `default_subfolder` inside it.
        default_subfolder: folder of the model in its repository, if any.
        inline_field: field of a Stage 1 record that contained this array, if any.
        declared_as: kind of the declaration, for one that a data root lists under another name.
    """

    description: str = ""
    pass_name: str
    folder: str
    member: str
    source: Literal["pixels", "caption"]
    dtype: str
    array_shape: Callable[[Contract, int, int], tuple[int, ...]]
    work_pixels: Callable[[Contract, int, int], int] = computed_pixels
    settings_class: type[EncoderSettings] = EncoderSettings
    contract: Contract = field(default_factory=dict)
    contract_names: tuple[str, ...] = ()
    model_names: tuple[str, ...] = ()
    settings: EncoderSettings | None = None
    refusal: Callable[[EncoderSettings, int, int], Refusal | None] = no_refusal
    inline_field: str | None = None
    parts: tuple[Part, ...] = ()
    declared_as: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddingSpec) and other.kind == self.kind

    def __hash__(self) -> int:
        return hash(self.kind)

    def shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of the array of an image; height and width in pixels, after orientation."""
        return self.array_shape(self.contract, height, width)

    def layout(self, height: int, width: int) -> tuple[tuple[int, ...], "np.dtype"]:
        """Return shape and dtype of the npy file of an image."""
        import numpy as np  # not by the validator, which launch scripts call

        if not self.parts:
            return self.shape(height, width), np.dtype(self.dtype)
        fields = [(part.name, self.dtype, part.array_shape(self.contract, height, width)) for part in self.parts]
        return (), np.dtype(fields)

    @property
    def members(self) -> list[str]:
        """Tar member suffixes of the file's arrays, in order."""
        stem = self.member.removesuffix(".npy")
        return [f"{stem}{part.ending}.npy" for part in self.parts] or [self.member]

    def shapes(self, height: int, width: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each member of an image."""
        shapes = [part.array_shape(self.contract, height, width) for part in self.parts]
        return dict(zip(self.members, shapes or [self.shape(height, width)], strict=True))

    def named(self, name: str) -> "EmbeddingSpec":
        """Return the kind under another name, which is also that of its pass, folder and members."""
        return replace(
            self,
            kind=name,
            pass_name=name,
            folder=name,
            member=f"{name}.npy",
            description=self.description.replace(f"derived/{self.folder}/", f"derived/{name}/"),
            declared_as=self.declared_as or self.kind,
        )

    def pixels_computed(self, height: int, width: int) -> int:
        """Return the pixels that the model computes for an image, by which progress is measured."""
        return self.work_pixels(self.contract, height, width)

    def refuses(self, height: int, width: int) -> Refusal | None:
        """Return why the settings refuse an image of this size, None if they do not."""
        return None if self.settings is None else self.refusal(self.settings, height, width)

    def requested(self, settings: EncoderSettings) -> "EmbeddingSpec":
        """Return the spec with the settings of its contract that a configuration can choose replaced by these."""
        chosen = {name: getattr(settings, name) for name in self.contract_names if hasattr(settings, name)}
        return replace(self, contract={**self.contract, **chosen}, settings=settings)

    def recorded(self, facts: Mapping[str, Any]) -> "EmbeddingSpec":
        """Return the spec with the contract of a recorded model, whose facts may lack what later releases added."""
        return replace(self, contract={name: facts.get(name, OLD_VALUES.get(name)) for name in self.contract_names})


OLD_VALUES: Contract = {
    "size": "original",
    "tokens": T5_TOKENS,
    "width": T5_WIDTH,
    "pad_rows": "zero",
    "resize": "exact",
    "memory_format": "channels_last",
}
"""Facts of an identity that later releases added, with the value implied by identities without them."""


def latent_shape(height: int, width: int) -> tuple[int, int, int]:
    """Return (16, H // 8, W // 8)."""
    return VAE_CHANNELS, height // VAE_DOWNSAMPLING, width // VAE_DOWNSAMPLING


def vector_shape(contract: Contract, height: int, width: int) -> tuple[int]:
    """Return (1024,)."""
    return (DINOV3_WIDTH,)


def encoded_size(contract: Contract, height: int, width: int) -> tuple[int, int]:
    """Return (height, width) in pixels of the picture that the VAE encodes: the image's own size, or that of its bucket."""
    if contract.get("size") == "bucket":
        width, height = bucket_size(assign_bucket(width, height))
    return height, width


def vae_shape(contract: Contract, height: int, width: int) -> tuple[int, int, int]:
    """Return the shape of a latent: 16 channels, an eighth of the encoded picture's height and width."""
    return latent_shape(*encoded_size(contract, height, width))


def tiled_pixels(contract: Contract, height: int, width: int) -> int:
    """Return the number of pixels that the VAE computes: if a picture is tiled, those of all tiles, which overlap."""
    height, width = encoded_size(contract, height, width)
    if height * width <= TILED_ABOVE_PIXELS:
        return height * width
    step = int(TILE_PIXELS * (1 - TILE_OVERLAP))
    down, across = (sum(min(TILE_PIXELS, side - at) for at in range(0, side, step)) for side in (height, width))
    return down * across


def refuse_enlarged(settings: EncoderSettings, height: int, width: int) -> Refusal | None:
    """Refuse an image whose crop would be enlarged more than `max_upscale` times to become its bucket."""
    if not isinstance(settings, VaeSettings) or settings.size != "bucket" or settings.max_upscale is None:
        return None
    if (times := use_of_crop(width, height).enlargement) <= settings.max_upscale:
        return None
    detail = f"{width}x{height}: its crop would be enlarged {times:.2f} times to {assign_bucket(width, height)}"
    return Refusal("enlarged_too_much", detail, "replace the image by a larger one, or raise vae_latents.max_upscale")


def mask_length(specs: Iterable[EmbeddingSpec]) -> int:
    """Return the length of attention masks of a data root or set with these kinds in force: `tokens` of `t5_hidden`."""
    return next((spec.contract.get("tokens", T5_TOKENS) for spec in specs if spec.kind == "t5_hidden"), T5_TOKENS)


def text_shape(contract: Contract, height: int, width: int) -> tuple[int, int]:
    """Return (tokens, width of the model), by default (77, 1024)."""
    return contract.get("tokens", T5_TOKENS), contract.get("width", T5_WIDTH)


def clip_hidden_shape(contract: Contract, height: int, width: int) -> tuple[int, int]:
    """Return (tokens, width of the model), both from its configuration."""
    return contract.get("tokens", CLIP_TOKENS), contract.get("width", CLIP_WIDTH)


def clip_pooled_shape(contract: Contract, height: int, width: int) -> tuple[int]:
    """Return (width of the pooled state,)."""
    return (contract.get("pooled_width", CLIP_WIDTH),)


_SPECS: dict[str, EmbeddingSpec] = {}


_IN_USE: list[EmbeddingSpec] = []

# Names of kinds, passes, folders and members (without `.npy`).
NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]*\Z"
_RESERVED = {
    "kind": {"approved_images", "stage2_jsonl", "bucket_shards", "captions", "captioner"},
    "pass_name": {"migrate", "all"},
    "folder": {"latent_statistics"},
    "member": {"json", "t5m.npy"},
}


def check_specs(specs: Iterable[EmbeddingSpec]) -> None:
    """Raise ValueError if a name of a kind is not an identifier, is reserved, or belongs to another kind too."""
    taken: dict[tuple[str, str], str] = {
        (name, value): "imagemill" for name, values in _RESERVED.items() for value in values
    }
    for spec in specs:
        used = {"kind": [spec.kind], "pass_name": [spec.pass_name], "folder": [spec.folder], "member": spec.members}
        for name, value in [(name, value) for name, values in used.items() for value in values]:
            if not re.match(NAME, value.removesuffix(".npy") if name == "member" else value):
                raise ValueError(
                    f"embedding kind {spec.kind}: {name} {value!r} contains characters other than A-Z a-z 0-9 _ -"
                )
            if name == "member" and not value.endswith(".npy"):
                raise ValueError(f"embedding kind {spec.kind}: member {value!r} does not end in .npy")
            if (other := taken.setdefault((name, value), spec.kind)) != spec.kind:
                raise ValueError(f"embedding kind {spec.kind}: {name} {value!r} belongs to {other}")


def register(spec: EmbeddingSpec) -> EmbeddingSpec:
    """Add a kind to those that every data root has by default. Raises as `check_specs`."""
    check_specs([*(other for other in _SPECS.values() if other != spec), spec])
    _SPECS[spec.kind] = spec
    return spec


def embedding_specs() -> tuple[EmbeddingSpec, ...]:
    """Return the kinds in use, in the order of members in a shard: by default, the registered ones."""
    return tuple(_IN_USE or _SPECS.values())


def default_specs() -> tuple[EmbeddingSpec, ...]:
    """Return the kinds of a data root whose configuration lists none."""
    return tuple(_SPECS.values())


def shipped_specs() -> tuple[EmbeddingSpec, ...]:
    """Return the default kinds, and those that a configuration has to list."""
    return (*_SPECS.values(), CLIP_TEXT)


def use_kinds(specs: Iterable[EmbeddingSpec]) -> None:
    """Put these kinds into use in this process, or the default ones if the list is empty. Raises as `check_specs`.

    Call it before the code location is loaded.
    """
    chosen = list(specs)
    check_specs(chosen)
    _IN_USE[:] = chosen


DINOV3 = register(
    EmbeddingSpec(
        kind="dinov3_npy",
        description="DINOv3 pooled output of each image, float32 (1024,), in `derived/dinov3/{image_id}.npy`: for similarity "
        "search, near-duplicate checks and curation.",
        pass_name="dinov3",
        folder="dinov3",
        member="dinov3.npy",
        source="pixels",
        dtype="float32",
        array_shape=vector_shape,
        settings_class=DinoV3Settings,
        contract_names=("resize",),
        encoder="imagemill.encoders.dinov3:DinoV3Encoder",
        default_model="facebook/dinov3-vitl16-pretrain-lvd1689m",
        inline_field="dinov3_embedding",
    )
)
VAE = register(
    EmbeddingSpec(
        kind="vae_latents",
        description="Flux VAE latent of each image at its original size, or at that of its bucket, float16 (16, H//8, W//8), in "
        "`derived/vae_latents/{image_id}.npy`: posterior mean, neither scaled nor shifted.",
        pass_name="vae",
        folder="vae_latents",
        member="vae.npy",
        source="pixels",
        dtype="float16",
        array_shape=vae_shape,
        work_pixels=tiled_pixels,
        settings_class=VaeSettings,
        contract_names=("size", "memory_format"),
        refusal=refuse_enlarged,
        encoder="imagemill.encoders.flux_vae:FluxVaeEncoder",
        default_model="black-forest-labs/FLUX.1-dev",
        default_subfolder="vae",
    )
)
T5 = register(
    EmbeddingSpec(
        kind="t5_hidden",
        description="T5 hidden states of each caption, float16, (77, 1024) by default, zeros where the mask is 0, in "
        "`derived/t5_hidden/{image_id}.npy`. Images without a caption are captioned first, where a captioner is configured.",
        pass_name="t5",
        folder="t5_hidden",
        member="t5h.npy",
        source="caption",
        dtype="float16",
        array_shape=text_shape,
        settings_class=T5Settings,
        contract_names=("tokens", "pad_rows", "width"),
        model_names=("width",),
        encoder="imagemill.encoders.t5:T5Encoder",
        default_model="google-t5/t5-large",
    )
)
CLIP_TEXT = EmbeddingSpec(
    kind="clip_text",
    description="CLIP text states of each caption, float16, `hidden` (77, width) and `pooled` (width,) of one forward call, in "
    "`derived/clip_text/{image_id}.npy`.",
    pass_name="clip",
    folder="clip_text",
    member="clip.npy",
    source="caption",
    dtype="float16",
    array_shape=clip_hidden_shape,
    parts=(Part("hidden", "", clip_hidden_shape), Part("pooled", "_pooled", clip_pooled_shape)),
    settings_class=ClipTextSettings,
    contract_names=("layer", "pooled", "tokens", "width", "pooled_width"),
    model_names=("tokens", "width", "pooled_width"),
    encoder="imagemill.encoders.clip_text:ClipTextEncoder",
    default_model="black-forest-labs/FLUX.1-dev",
    default_subfolder="text_encoder",
)
