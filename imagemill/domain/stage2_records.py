"""Stage 2 records: the eight fields, construction, and the rules for valid ones.

    {"image_id": "abc", "image_path": "data/approved/abc.jpg", "caption": "…", "t5_attention_mask": [1, …, 0],
     "height": 768, "width": 1024, "aspect_bucket": "1280x768", "format_version": 2}

`violations` defines validity; `is_plain` is its fast path for typed records. The file of records is read and written in
formats/jsonl.py; old and new records are merged in pipeline/stage2/merge.py.

Spec: docs/spec/stage2.md#record-fields, docs/spec/shards.md#readiness
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from imagemill.domain.buckets import BUCKETS, assign_bucket, bucket_crop
from imagemill.domain.embedding_specs import (
    DINOV3,
    T5_TOKENS,
    VAE_DOWNSAMPLING,
    embedding_specs,
    latent_shape,
)
from imagemill.domain.geometry import MAX_SIDE
from imagemill.domain.ids import id_problem
from imagemill.domain.inputs import folder_repeats
from imagemill.domain.violations import Violation

FORMAT_VERSION = 2

# Stage 1 stored the vector in the record; Stage 2 never does.
INLINE_VECTOR = DINOV3.inline_field or ""

Record = dict[str, Any]

# Width or height of an image in pixels, for typed decoding; `is_side` is the same rule for values.
Side = Annotated[int, msgspec.Meta(gt=0, le=MAX_SIDE)]
_LatentSide = Annotated[int, msgspec.Meta(ge=VAE_DOWNSAMPLING, le=MAX_SIDE)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class Stage2Record(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The eight fields, typed. The mask is kept as bytes: parsing its numbers costs more than all other fields."""

    image_id: _Text
    image_path: _Text
    caption: _Text
    t5_attention_mask: msgspec.Raw
    height: _LatentSide
    width: _LatentSide
    aspect_bucket: Literal[BUCKETS]  # type: ignore[valid-type]
    format_version: Literal[FORMAT_VERSION]  # type: ignore[valid-type]
    crop_box: tuple[int, int, int, int] | msgspec.UnsetType = msgspec.UNSET
    captions: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    repeats: int | msgspec.UnsetType = msgspec.UNSET


CROP_BOX, CAPTIONS, REPEATS = "crop_box", "captions", "repeats"

# Fields that are added where they apply: latents of the bucket's size, several captions, folders with repeats.
OPTIONAL_FIELDS: tuple[str, ...] = (CROP_BOX, CAPTIONS, REPEATS)

# The fields of every record.
RECORD_FIELDS: tuple[str, ...] = tuple(name for name in Stage2Record.__struct_fields__ if name not in OPTIONAL_FIELDS)


def build_record(
    *,
    image_id: str,
    image_path: str,
    caption: str,
    mask: Sequence[int] | msgspec.Raw,
    height: int,
    width: int,
    cropped: bool = False,
    captions: Sequence[str] = (),
    repeats: int | None = None,
    base: Record | None = None,
) -> Record:
    """Return a Stage 2 record.

    Args:
        image_id: id of the image.
        image_path: its path; that of `base` is kept if it ends in the same path below `approved/`.
        caption: its caption, the first one of several.
        mask: attention mask of the caption, or its JSON.
        height: of the oriented image, in pixels.
        width: the same.
        cropped: whether the record names the crop that the VAE encodes.
        captions: all captions if there are several.
        repeats: how often training draws the sample in an epoch; None if the data root does not say.
        base: a record whose other fields are appended, except optional fields that this format wrote.
    """
    record: Record = {
        "image_id": image_id,
        "image_path": _kept_path(base.get("image_path"), image_path) if base else image_path,
        "caption": caption,
        "t5_attention_mask": mask if isinstance(mask, msgspec.Raw) else list(mask),
        "height": height,
        "width": width,
        "aspect_bucket": assign_bucket(width, height),
        "format_version": FORMAT_VERSION,
    }
    if cropped:
        record[CROP_BOX] = list(bucket_crop(width, height))
    if len(captions) > 1:
        record[CAPTIONS] = list(captions)
    if repeats is not None:
        record[REPEATS] = repeats
    if base:
        ours = (name for name, is_ours in _WRITTEN_HERE.items() if is_ours(base))
        gone = {*record, *ours, INLINE_VECTOR}
        record.update((key, value) for key, value in base.items() if key not in gone)
    return record


def replaced_extras(old: Record, new: Record) -> list[str]:
    """Return the optional fields of a record that another program wrote and that the new record replaces."""
    return [name for name, is_ours in _WRITTEN_HERE.items() if name in new and name in old and not is_ours(old)]


def _has_crop_box(record: Record) -> bool:
    """Return whether `crop_box` is the crop of the image's bucket, as this format writes it, rather than an extra field."""
    value, width, height = record.get(CROP_BOX), record.get("width"), record.get("height")
    return isinstance(value, list) and is_side(width) and is_side(height) and value == list(bucket_crop(width, height))


def _has_captions(record: Record) -> bool:
    """Return whether `captions` is a list of several captions whose first one is the record's, as this format writes it."""
    value = record.get(CAPTIONS)
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(each, str) for each in value):
        return False
    return value[0] == record.get("caption") and len({*value}) == len(value)


def captions_of(record: Record) -> tuple[str, ...]:
    """Return all captions of a record that has a caption."""
    return tuple(record[CAPTIONS]) if _has_captions(record) else (record["caption"],)


def _has_repeats(record: Record) -> bool:
    """Return whether `repeats` is the number in the name of the image's folder, as this format writes it."""
    value, path = record.get(REPEATS), record.get("image_path")
    return type(value) is int and isinstance(path, str) and value == folder_repeats(path.partition("/approved/")[2])


def repeats_of(record: Record) -> int:
    """Return how often training draws a sample in an epoch: 1 unless the record says otherwise, by its image's folder."""
    return record[REPEATS] if _has_repeats(record) else 1


_WRITTEN_HERE: Mapping[str, Callable[[Record], bool]] = {
    CROP_BOX: _has_crop_box,
    CAPTIONS: _has_captions,
    REPEATS: _has_repeats,
}


def is_stage1(record: Record) -> bool:
    """Return whether a record is not in this format yet: it contains its vector, or has no format version 2."""
    return INLINE_VECTOR in record or record.get("format_version") != FORMAT_VERSION


def _kept_path(old: object, path: str) -> str:
    """Return the old path if it ends in the new one below `approved/`, wherever the data root was; else the new path."""
    if not isinstance(old, str) or old == path:
        return path
    below = PurePath(path.partition("/approved/")[2] or PurePath(path).name).parts
    return old if PurePath(old).parts[-len(below) :] == below else path


# ---- validity


class FieldRule(NamedTuple):
    """The rule for one field.

    `rule`: its name. `problem`: maps a value to what is wrong with it (None: valid). `default`: the value of a missing
    field.
    """

    rule: str
    problem: Callable[[Any], str | None]
    remedy: str
    default: object = None


def _text_problem(value: object) -> str | None:
    return None if isinstance(value, str) and value.strip() else "missing or blank"


def mask_problem(mask: object, tokens: int = T5_TOKENS) -> str | None:
    """Return the reason why this is not a T5 attention mask: `tokens` ints, each 0 or 1, at least one 1."""
    if not isinstance(mask, list) or len(mask) != tokens:
        return f"not a list of {tokens}"
    # As JSON, because `True` and `1.0` equal 1 in Python but are not ints here: only a digit takes one character.
    encoded = msgspec.json.encode(mask)
    if len(encoded) > 2 * tokens + 1 or encoded.translate(None, b"[,]01"):
        return "contains values other than the ints 0 and 1"
    return None if 1 in mask else "contains no 1"


def is_side(value: object) -> bool:
    """Return True if the value is a side in pixels. True and 24.0 are not, although Python counts them as ints or equal."""
    return type(value) is int and 0 < value <= MAX_SIDE


def _size_problem(value: Any) -> str | None:
    if not is_side(value):
        return f"not an int from 1 to {MAX_SIDE}"
    return None if all(latent_shape(value, value)) else f"{value} pixels are too few for a latent"


def _bucket_problem(value: object) -> str | None:
    return None if isinstance(value, str) and value in BUCKETS else f"{value!r} is not one of the seven"


def _version_problem(value: object) -> str | None:
    return None if type(value) is int and value == FORMAT_VERSION else f"{value!r}, expected {FORMAT_VERSION}"


_SIZE = FieldRule("size", _size_problem, "run imagemill stage2")
FIELD_RULES: Mapping[str, FieldRule] = {
    "image_id": FieldRule("id", id_problem, "use the name of the image file without its extension as id"),
    "image_path": FieldRule("path", _text_problem, "give the image's path"),
    "caption": FieldRule("caption", _text_problem, "write a caption beside the image, then run `imagemill run`"),
    "t5_attention_mask": FieldRule("mask", mask_problem, "run imagemill stage2 --pass t5"),
    "height": _SIZE,
    "width": _SIZE,
    "aspect_bucket": FieldRule("bucket", _bucket_problem, f"write one of {', '.join(BUCKETS)}"),
    # A record without the field is accepted; one with another number has another format.
    "format_version": FieldRule("version", _version_problem, "run imagemill stage2", FORMAT_VERSION),
}


def violations(record: Mapping[str, Any], tokens: int = T5_TOKENS) -> list[Violation]:
    """Return all violations of a record, in order of its fields: the part of readiness that depends on the record alone.

    `tokens`: length of a mask, as configured for `t5_hidden`.
    """
    masked: Callable[[Any], str | None] = partial(mask_problem, tokens=tokens)
    found = [
        Violation(field, rule.rule, problem, rule.remedy)
        for field, rule in FIELD_RULES.items()
        if (problem := (masked if field == "t5_attention_mask" else rule.problem)(record.get(field, rule.default)))
    ]
    remedy = "run imagemill stage2: it moves the vector to an npy file"
    inline = [spec.inline_field for spec in embedding_specs() if spec.inline_field in record]
    return found + [Violation(field, "inline", "an inline embedding", remedy) for field in inline if field]


DECODER = msgspec.json.Decoder(Stage2Record)


def is_plain(record: Stage2Record, masks: Mapping[bytes, Any]) -> bool:
    """Return True if a typed record certainly has no violation; False means that `violations` must decide.

    Args:
        record: the record.
        masks: encodings of the usual masks (`usual_masks`).
    """
    return (
        bytes(record.t5_attention_mask) in masks
        and not id_problem(record.image_id)
        and not (record.caption.isspace() or record.image_path.isspace())
    )


def usual_masks(tokens: int = T5_TOKENS) -> dict[bytes, tuple[int, ...]]:
    """Return the masks that tokenizers produce (tokens followed by padding), by their JSON encoding."""
    masks = [(1,) * ones + (0,) * (tokens - ones) for ones in range(1, tokens + 1)]
    return {msgspec.json.encode(mask): mask for mask in masks}
