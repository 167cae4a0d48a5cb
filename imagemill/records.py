"""Stage 2 records: the eight fields, how one is built, what makes one valid.

    {"image_id": "abc", "image_path": "data/approved/abc.jpg", "caption": "…", "t5_attention_mask": [1, …, 0],
     "height": 768, "width": 1024, "aspect_bucket": "1280x768", "format_version": 2}

Belongs here: one record as a value.
Belongs elsewhere: the file of records (formats/jsonl.py), merging old and new ones (pipeline/stage2/merge.py), rules about whole
files (validation/).
Source: seed 000 "JSONL metadata format"; CONTRACTS section 1 "record", section 2 "Readiness".
"""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from imagemill.buckets import BUCKETS, assign_bucket
from imagemill.embedding_specs import DINOV3, T5_TOKENS
from imagemill.geometry import MAX_SIDE
from imagemill.ids import id_problem

FORMAT_VERSION = 2

# Stage 1 kept the vector in the record; Stage 2 never does.
INLINE_VECTOR = DINOV3.inline_field or ""

Record = dict[str, Any]

# The width or height of an image, for typed decoding; `positive_int` is the same rule for values.
Side = Annotated[int, msgspec.Meta(gt=0, le=MAX_SIDE)]


class Stage2Record(msgspec.Struct, frozen=True):
    """The eight fields, typed: what a strict decoder accepts at speed. Extra fields are ignored here, kept on disk."""

    image_id: str
    image_path: str
    caption: str
    t5_attention_mask: list[int]
    height: int
    width: int
    aspect_bucket: str
    format_version: int


RECORD_FIELDS: tuple[str, ...] = Stage2Record.__struct_fields__


def build_record(
    *,
    image_id: str,
    image_path: str,
    caption: str,
    mask: Sequence[int],
    height: int,
    width: int,
    base: Record | None = None,
) -> Record:
    """A Stage 2 record; fields of `base` beyond the eight are kept behind them, and its `image_path` where it has one."""
    base = base or {}
    record: Record = {
        "image_id": image_id,
        "image_path": _kept_path(base.get("image_path"), image_path),
        "caption": caption,
        "t5_attention_mask": list(mask),
        "height": height,
        "width": width,
        "aspect_bucket": assign_bucket(width, height),
        "format_version": FORMAT_VERSION,
    }
    record.update((key, value) for key, value in base.items() if key not in record and key != INLINE_VECTOR)
    return record


def is_stage1(record: Record) -> bool:
    """Whether a record is not of this format yet: its vector is inside, or nothing says that it is version 2."""
    return INLINE_VECTOR in record or record.get("format_version") != FORMAT_VERSION


def _kept_path(old: object, path: str) -> str:
    """A record keeps the path it had, wherever its folder, as long as that names the same file."""
    return old if isinstance(old, str) and PurePath(old).name == PurePath(path).name else path


# `<|coord_1|>`, `<|box_start|>`: a tokenizer may read such text as one of its own tokens.
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]+\|>")
# Rule → what it demands, what to do. Text is kept as it is: only warnings.
TEXT_WARNINGS = {
    "control_character": ("text has no control characters", "remove them, if a model reads this text"),
    "special_token": ("text has nothing in the form <|…|>", "write it differently, if a model reads this text"),
}


class RecordProblem(msgspec.Struct, frozen=True):
    """One way in which a record is not valid: the field, the rule's name, what was found, what to do."""

    field: str
    rule: str
    message: str
    remedy: str


def record_problem(record: Record) -> RecordProblem | None:
    """The first thing wrong with a record, or None: the record's half of readiness.

    `True` and `1.0` equal 1 in Python and are not ints here.
    """
    return next(iter(record_problems(record)), None)


def record_problems(record: Record) -> list[RecordProblem]:
    """Everything wrong with a record, one per field."""
    found = [
        _problem(
            "image_id",
            "id",
            id_problem(record.get("image_id")),
            "use the name of the image file without its extension as id",
        ),
        _problem("image_path", "path", _text_problem(record.get("image_path")), "give the image's path"),
        _problem(
            "caption",
            "caption",
            _text_problem(record.get("caption")),
            "write a caption beside the image, then run `imagemill run`",
        ),
        _problem(
            "t5_attention_mask", "mask", mask_problem(record.get("t5_attention_mask")), "run imagemill stage2 --pass t5"
        ),
        _problem("height", "size", _size_problem(record.get("height")), "run imagemill stage2"),
        _problem("width", "size", _size_problem(record.get("width")), "run imagemill stage2"),
        _problem(
            "aspect_bucket",
            "bucket",
            _bucket_problem(record.get("aspect_bucket")),
            f"write one of {', '.join(BUCKETS)}",
        ),
        _problem("format_version", "version", _version_problem(record), "run imagemill stage2"),
        _problem(
            INLINE_VECTOR, "inline", _inline_problem(record), "run imagemill stage2: it moves the vector to an npy file"
        ),
    ]
    return [problem for problem in found if problem]


def _problem(field: str, rule: str, message: str | None, remedy: str) -> RecordProblem | None:
    return RecordProblem(field, rule, message, remedy) if message else None


def text_warnings(field: str, text: str) -> list[RecordProblem]:
    """Return what is unusual in a caption or name: control characters, and what a tokenizer takes for its own tokens."""
    found = []
    if control := next((c for c in text if unicodedata.category(c) == "Cc"), None):
        found.append(("control_character", f"contains {control!r}"))
    if token := _SPECIAL_TOKEN.search(text):
        found.append(("special_token", f"contains {token[0][:40]!r}"))
    return [RecordProblem(field, rule, message, TEXT_WARNINGS[rule][1]) for rule, message in found]


def is_plain_text(text: str) -> bool:
    """True if a look suffices: `text_warnings` has surely nothing to say."""
    return text.isprintable() and "<|" not in text


def _text_problem(value: object) -> str | None:
    return None if isinstance(value, str) and value.strip() else "missing or blank"


def mask_problem(mask: object) -> str | None:
    """Why this is no T5 attention mask: 77 ints, each 0 or 1, at least one 1."""
    if not isinstance(mask, list) or len(mask) != T5_TOKENS:
        return f"not a list of {T5_TOKENS}"
    if not all(type(bit) is int and bit in (0, 1) for bit in mask):
        return "holds something other than the ints 0 and 1"
    return None if any(mask) else "holds no 1"


def _size_problem(value: object) -> str | None:
    return None if positive_int(value) else f"not an int from 1 to {MAX_SIDE}"


def positive_int(value: object) -> bool:
    """True if the value is a side in pixels. Python calls True an int and 24.0 equal to 24; neither is a size."""
    return type(value) is int and 0 < value <= MAX_SIDE


def _bucket_problem(value: object) -> str | None:
    return None if isinstance(value, str) and value in BUCKETS else f"{value!r} is not one of the seven"


def _version_problem(record: Record) -> str | None:
    # Readers take a record without the field; one with another number is another format.
    version = record.get("format_version", FORMAT_VERSION)
    return None if type(version) is int and version == FORMAT_VERSION else f"{version!r}, expected {FORMAT_VERSION}"


def _inline_problem(record: Record) -> str | None:
    return "an inline embedding" if INLINE_VECTOR in record else None
