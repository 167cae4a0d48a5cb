"""Settings of models and of the encoders of embedding kinds, as `imagemill.yaml` contains them.

The whole configuration is in imagemill/config.py.
"""

from typing import Annotated, Literal, TypeVar

import msgspec

PREVIEW = "preview"

Positive = Annotated[int, msgspec.Meta(ge=1)]
Device = Annotated[
    str, msgspec.Meta(pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)\Z", examples=["auto", "cpu", "cuda", "cuda:1", "mps"])
]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model, and the device and dtype that it runs with.

    Attributes:
        model: hub id or folder written by `save_pretrained`; `preview` for the small stand-in.
        revision: branch, tag or commit on the hub.
        subfolder: folder inside the model repository.
        device: `auto`, `cpu`, `mps`, `cuda` or one GPU as `cuda:1`; `auto` selects cuda (including ROCm), then mps, then cpu.
        dtype: compute dtype, `float32`, `bfloat16`, `float16` or `float64`; `auto` is that of the existing files, and before the
            first file `bfloat16` on cuda and `float32` elsewhere.
    """

    model: str = PREVIEW
    revision: str | None = None
    subfolder: str | None = None
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"


Settings = TypeVar("Settings", bound=ModelSettings)


def settings_on_nodes(settings: Settings, gpus: float) -> Settings:
    """Return the settings of a worker on a Ray node that asks for so many GPUs; Ray hides no GPU from one that asks for none."""
    return msgspec.structs.replace(settings, device="cpu") if settings.device == "auto" and not gpus else settings


class EncoderSettings(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the encoder of one embedding kind.

    Attributes:
        batch_size: maximum number of items in one model call. `auto` is 8 on a CPU; elsewhere the power of two from 8 to 256
            that is fastest in the first calls, which is recorded with the model and then used for all files of the kind.
        batch_pixels: maximum number of pixels in one model call, for kinds whose cost grows with the image.
    """

    batch_size: Positive | Literal["auto"] = "auto"
    batch_pixels: Positive = 4 * 1024 * 1024


class DinoV3Settings(EncoderSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `dinov3_npy`.

    Attributes:
        preprocessing: `exact`: pixels as the model's own processor makes them, bit for bit. `fast`: resized as whole grey levels,
            which takes a tenth of the time; values before normalisation differ by at most one grey level.
    """

    preprocessing: Literal["exact", "fast"] = "exact"

    @property
    def resize(self) -> str:
        """`preprocessing`, under its name in the facts of an identity, where `preprocessing` is a version."""
        return self.preprocessing


class TextSettings(EncoderSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an encoder of captions.

    Attributes:
        tokenizer_subfolder: folder of the tokenizer inside the model repository; if unset, that of the model.
    """

    tokenizer_subfolder: str | None = None


class T5Settings(TextSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `t5_hidden`, for encoders of the T5 and UMT5 architectures of any width.

    Attributes:
        tokens: number of positions of a stored state, from 8 to 512; longer captions are truncated.
        padding: `zero`: the model sees the caption alone, and rows after its end are zeros. `attended`: the model also sees the
            padding and all rows are kept, as the FLUX and SD3 pipelines compute them.
    """

    tokens: Annotated[int, msgspec.Meta(ge=8, le=512)] = 77
    padding: Literal["zero", "attended"] = "zero"

    @property
    def pad_rows(self) -> str:
        """`padding`, under its name in the facts of an identity."""
        return self.padding


class ClipTextSettings(TextSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `clip_text`.

    Attributes:
        layer: `last`: the states of the last layer, normalised. `penultimate`: those of the layer before it, as SDXL and SD3 use.
        pooled: `eos`: the normalised state at the end token, as FLUX uses. `projected`: its projection, as SDXL and SD3 use.
    """

    layer: Literal["last", "penultimate"] = "last"
    pooled: Literal["eos", "projected"] = "eos"


class VaeSettings(EncoderSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `vae_latents`.

    Attributes:
        size: size of the picture that the VAE encodes: `original`, or `bucket` for the centred crop of the bucket's aspect ratio,
            resized to the bucket.
        max_upscale: with `bucket`, images that would be enlarged more than this many times are refused; if unset, none is.
    """

    size: Literal["original", "bucket"] = "original"
    max_upscale: Annotated[float, msgspec.Meta(ge=1)] | None = None
