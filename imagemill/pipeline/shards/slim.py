"""Records as packing needs them, told by a look at their lines.

Most lines are as this program writes them: the eight fields in order, plain text, no escapes. One regular expression tells
those, a thousand lines at a time, and no object is built. Whatever is unusual (another field or order, an escape, a size as
24.0, a space) is left to the slow path, which alone gives verdicts.
"""

import re
from functools import partial
from typing import NamedTuple

import msgspec

from imagemill.buckets import BUCKETS
from imagemill.embedding_specs import T5_TOKENS
from imagemill.files import fingerprint
from imagemill.formats.jsonl import encode_sorted
from imagemill.records import Record


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
# may: the slow path knows.
_TEXT = rb'[!#-\[\]-~\x80-\xff][^"\\\x00-\x1f\x7f]*'
_LINES = re.compile(
    rb'^\{"image_id":"([A-Za-z0-9_-][A-Za-z0-9_.-]*)","image_path":"(' + _TEXT + rb')","caption":"(' + _TEXT + rb')",'
    rb'"t5_attention_mask":(\[.{%d}\]),"height":([1-9][0-9]{0,8}),"width":([1-9][0-9]{0,8}),'
    rb'"aspect_bucket":"([0-9x]+)","format_version":2\}\r?\n' % (2 * T5_TOKENS - 1),
    re.MULTILINE,
)  # fmt: skip
_BUCKETS = {bucket.encode(): bucket for bucket in BUCKETS}
# As tokenizers make them: so many tokens, the rest padding.
_MASKS = {
    msgspec.json.encode(mask): mask
    for tokens in range(1, T5_TOKENS + 1)
    for mask in [(1,) * tokens + (0,) * (T5_TOKENS - tokens)]
}


_MEMBER = (
    b'{"aspect_bucket":"%b","caption":"%b","format_version":2,"height":%b,"image_id":"%b","image_path":"%b",'
    b'"t5_attention_mask":%b,"width":%b}\n'
)


def slim_records(lines: bytes) -> list[SlimRecord] | None:
    """The records of whole lines; None where only the slow path can tell, which says the same of what this accepts."""
    found = _LINES.findall(lines)
    if not found or len(found) != lines.count(b"\n"):
        return None
    ids, paths, captions, spelled, heights, widths, named = zip(*found, strict=True)
    buckets, masks = list(map(_BUCKETS.get, named)), list(map(_MASKS.get, spelled))
    if None in buckets or None in masks:
        return None
    if not (lines.isascii() or all(map(_says_something, paths + captions))):
        return None
    members = map(_MEMBER.__mod__, zip(named, captions, heights, ids, paths, spelled, widths, strict=True))
    names = b"/".join(ids).decode().split("/")
    rows = zip(
        names, buckets, masks, map(int, heights), map(int, widths), map(fingerprint, captions), members, strict=True
    )
    # Past the named constructor: half the time, and there is one per record.
    return list(map(partial(tuple.__new__, SlimRecord), rows))


def _says_something(text: bytes) -> bool:
    """UTF-8, and more than blanks of some script."""
    try:
        return bool(text.decode("utf-8").strip())
    except UnicodeDecodeError:
        return False


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
