"""Records as packing needs them, told by a look at their lines.

Most lines are as this program writes them: the eight fields in order, plain text, no escapes. One regular expression tells
those, a thousand lines at a time, and no object is built. A line spelled otherwise (another field or order, an escape, a
space) is decoded by itself, once by type for what it is and once whole for its member. What is still unusual (a size as 24.0,
another mask than a tokenizer's, anything broken) is left to the slow path, which alone gives verdicts.
"""

import re
from functools import partial
from itertools import compress
from typing import Literal, NamedTuple

import msgspec

from imagemill.buckets import BUCKETS
from imagemill.embedding_specs import T5_TOKENS
from imagemill.files import fingerprint
from imagemill.formats.jsonl import encode_sorted, parse_object
from imagemill.records import FORMAT_VERSION, INLINE_VECTOR, Record, Side


class SlimRecord(NamedTuple):
    """A valid record: `member`, the sample's json in the tar; `caption`, fingerprint of its text. Sizes in pixels."""

    image_id: str
    bucket: str
    mask: tuple[int, ...]
    height: int
    width: int
    caption: str
    member: bytes


# A mask is passed over by its length (77 digits and their commas) and then looked up as a whole, in `_MASKS`.
# JSON text without escapes stands for itself; this begins with no blank. Ids beyond these letters may hold what no file name
# may: decoding tells. No part could end elsewhere, so none is tried again where the rest does not fit (`*+`). A line of any
# other form matches too, with nothing in its groups: there is a match per line.
_TEXT = rb'[!#-\[\]-~\x80-\xff][^"\\\x00-\x1f\x7f]*+'
_LINES = re.compile(
    rb'\{"image_id":"([A-Za-z0-9_-][A-Za-z0-9_.-]*+)","image_path":"(' + _TEXT + rb')","caption":"(' + _TEXT + rb')",'
    rb'"t5_attention_mask":(\[.{%d}\]),"height":([1-9][0-9]{0,8}+),"width":([1-9][0-9]{0,8}+),'
    rb'"aspect_bucket":"([0-9x]++)","format_version":2\}\r?\n|.*\n' % (2 * T5_TOKENS - 1)
)  # fmt: skip
_BUCKETS = {bucket.encode(): bucket for bucket in BUCKETS}
# As tokenizers make them (so many tokens, the rest padding), as msgspec spells a list and as `json` does.
_MASKS = {
    spelled: mask
    for tokens in range(1, T5_TOKENS + 1)
    for mask in [(1,) * tokens + (0,) * (T5_TOKENS - tokens)]
    for spelled in [msgspec.json.encode(mask), msgspec.json.encode(mask).replace(b",", b", ")]
}

_MEMBER = (
    b'{"aspect_bucket":"%b","caption":"%b","format_version":2,"height":%b,"image_id":"%b","image_path":"%b",'
    b'"t5_attention_mask":%b,"width":%b}\n'
)

_Row = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]


class _Typed(msgspec.Struct, gc=False):
    """The fields by which a record is told, whatever stands beside them. The mask, the most work to parse, stays bytes."""

    image_id: str
    image_path: str
    caption: str
    t5_attention_mask: msgspec.Raw
    height: Side
    width: Side
    aspect_bucket: Literal[BUCKETS]  # type: ignore[valid-type]
    format_version: Literal[FORMAT_VERSION] = FORMAT_VERSION  # type: ignore[valid-type]


_decode = msgspec.json.Decoder(_Typed).decode
_NO_NAMES = {"", ".", ".."}


def slim_records(lines: bytes) -> list[SlimRecord | bytes]:
    """What each line holds: its record, or the line as it is where only the slow path can tell.

    Of a record told here the slow path says the same.
    """
    found = _LINES.findall(lines if lines.endswith(b"\n") else lines + b"\n")
    plain = [row[6] in _BUCKETS and row[3] in _MASKS for row in found]
    if not lines.isascii():
        plain = [told and _says_something(row[1], row[2]) for told, row in zip(plain, found, strict=True)]
    if all(plain):
        return [*_plain(found)]
    told = iter(_plain(list(compress(found, plain))))
    return [
        next(told) if is_plain else _decoded(line) for is_plain, line in zip(plain, lines.split(b"\n"), strict=False)
    ]


def _plain(found: list[_Row]) -> list[SlimRecord]:
    """The records of lines of the usual form, column by column."""
    if not found:
        return []
    ids, paths, captions, spelled, heights, widths, named = zip(*found, strict=True)
    members = map(_MEMBER.__mod__, zip(named, captions, heights, ids, paths, spelled, widths, strict=True))
    names = b"/".join(ids).decode().split("/")
    rows = zip(
        names, map(_BUCKETS.__getitem__, named), map(_MASKS.__getitem__, spelled), map(int, heights), map(int, widths),
        map(fingerprint, captions), members, strict=True,
    )  # fmt: skip
    # Past the named constructor: half the time, and there is one per record.
    return list(map(partial(tuple.__new__, SlimRecord), rows))


def _says_something(*texts: bytes) -> bool:
    """UTF-8, and more than blanks of some script."""
    try:
        return all(text.decode("utf-8").strip() for text in texts)
    except UnicodeDecodeError:
        return False


def _decoded(line: bytes) -> SlimRecord | bytes:
    """The record of a line of any spelling; the line itself where it is not plainly a valid one."""
    try:
        typed = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return line
    image_id, caption = typed.image_id, typed.caption
    mask = _MASKS.get(bytes(typed.t5_attention_mask))
    named = image_id.isprintable() and "/" not in image_id and "\\" not in image_id and image_id not in _NO_NAMES
    if not (mask and named and caption.strip() and typed.image_path.strip()):
        return line
    # Whole, which the look by type is not: a member has every field, and a fault in one makes the line malformed.
    record = parse_object(line)
    if record is None or INLINE_VECTOR in record:
        return line
    text = fingerprint(caption.encode("utf-8"))
    return SlimRecord(image_id, typed.aspect_bucket, mask, typed.height, typed.width, text, encode_sorted(record))


def slim_of(record: Record) -> SlimRecord:
    """The same of a record that the slow path has found valid."""
    return SlimRecord(
        record["image_id"],
        record["aspect_bucket"],
        tuple(record["t5_attention_mask"]),
        record["height"],
        record["width"],
        fingerprint(record["caption"].encode("utf-8")),
        encode_sorted(record),
    )
