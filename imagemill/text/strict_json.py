"""Strict JSON decoding: the limits that all parsers of this package share, and the exceptions to expect.

Files of JSON lines are read in formats/jsonl.py, small documents in formats/manifest.py.
"""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

# Every exception that msgspec raises for bytes that are not JSON, or not of the requested type.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Later steps encode, sort and print a decoded value recursively.
MAX_DEPTH = 100


def decode_json(data: bytes, kind: type[T] | Any = Any) -> T:
    """Decode one JSON value of a type.

    Raises:
        msgspec.DecodeError: if it is malformed, of another type, or nested deeper than `MAX_DEPTH`. `NOT_JSON` lists the others.
    """
    value = msgspec.json.decode(data, type=kind)
    if is_too_deep(data, value):
        raise msgspec.DecodeError("JSON is malformed: nested too deeply")
    return value


def is_too_deep(data: bytes, value: object) -> bool:
    """Return whether a value decoded from `data` is nested deeper than `MAX_DEPTH`."""
    # A value has at most as many levels as opening brackets, so counting them is enough for most lines.
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return False
    return True


def _children(value: object) -> list[Any]:
    """Return the lists and dicts directly inside a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, dict | list)]
