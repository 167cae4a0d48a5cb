"""Hostile inputs out of good ones: the same bytes for the same random numbers."""

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

DEEP = (60, 200, 5_000, 100_000)
HUGE = (b"1e308", b"-1e308", b"1e999", b"9" * 400, b"9" * 5000, b"-0", b"2147483648", b"NaN", b"-Infinity")
PIECES = (
    b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\\ud800", b"\\u0000", b'"', b"'", b"\\", b"\n", b"\r\n", b"\t",
    b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"../../../victim", b"&a ", b"*a", b"<<: ", b"!!int ", b"? ",
    b"- ", b"~", b"<|coord_1|>",
)  # fmt: skip
VALUES = (
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**64, -(2**63), 10**400, 0.5, 1e308, -1e308, float("nan"), float("inf"),
    "", " ", "\0", "\ud800", "../../../victim/precious", "/tmp/victim", "a" * 300, "a\\b", "C:x", "http://[", "~unknown/x",
    "<|box_start|>", "\u2028", [], {}, [[]], [None], [1, 2, 3, 4], [1e308] * 4, ["<|coord_1|>"] * 4, {"a": 1}, [[[[[[1]]]]]],
)  # fmt: skip


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with one to three faults."""
    data = random.choice(seeds)
    for _ in range(random.randint(1, 3)):
        data = random.choice(_FAULTS)(random, data, seeds)
    return data


def _at(random: Random, data: bytes) -> int:
    return random.randint(0, len(data))


def _flip(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(random.choice((1, 1, 4, 16))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: _at(random, data)]


def _insert(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _at(random, data)
    return data[:at] + random.choice((random.choice(PIECES), random.randbytes(random.randint(1, 8)))) + data[at:]


def _cut(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _at(random, data)
    return data[:at] + data[at + random.choice((1, 4, 40, 512)) :]


def _splice(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = random.choice(seeds)
    return data[: _at(random, data)] + other[_at(random, other) :]


def _repeat(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _at(random, data)
    return data[:at] + data[at : at + random.choice((16, 512, 10_240))] * 2 + data[at:]


def _number(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", data[:20_000]))
    if not numbers:
        return data
    found = random.choice(numbers)
    return data[: found.start()] + random.choice(HUGE) + data[found.end() :]


def _nest(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at, depth = _at(random, data), random.choice(DEEP)
    opened, closed = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"{a: ", b"}"), (b"- ", b"")))
    return data[:at] + opened * depth + (b"1" + closed * depth if random.random() < 0.5 else b"") + data[at:]


def _duplicate_key(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    keys = list(re.finditer(rb'"\w+" ?:', data[:20_000]))
    if not keys:
        return data
    found = random.choice(keys)
    return data[: found.start()] + found[0] + b"0," + data[found.start() :]


def _value(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Another value at some place of one line's JSON, or of the whole document."""
    lines = data.splitlines() or [b""]
    whole = random.random() < 0.5
    n = random.randrange(len(lines))
    try:
        value = json.loads(data if whole else lines[n])
    except (ValueError, RecursionError):
        return data
    text = json.dumps(_replaced(random, value), ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    return text if whole else b"\n".join([*lines[:n], text, *lines[n + 1 :], b""])


def _replaced(random: Random, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or random.random() < 0.1:
        return random.choice(VALUES)
    if isinstance(value, list):
        n = random.randrange(len(value))
        return [*value[:n], _replaced(random, value[n]), *value[n + 1 :]]
    name = random.choice([*value])
    if random.random() < 0.2:
        return {key: inner for key, inner in value.items() if key != name}
    return {**value, name: _replaced(random, value[name])}


_FAULTS: tuple[Callable[[Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip, _truncate, _insert, _insert, _cut, _splice, _repeat, _number, _number, _nest, _duplicate_key, _value, _value, _value,
)  # fmt: skip
