"""The encoding of text files that do not declare it.

Spec: docs/spec/stage2.md#caption-text
"""

import codecs


class BadEncoding(ValueError):
    """Bytes that are not text in a known encoding."""


def encoding_of(data: bytes) -> str:
    """Return the encoding of text by its byte-order mark, else by the places of its zero bytes, else UTF-8.

    Raises:
        BadEncoding: if zero bytes are neither those of UTF-16 with little nor with big end.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if b"\0" not in data or data.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    # Most characters have a zero byte, always the same one.
    even, odd = 0 in data[::2], 0 in data[1::2]
    if even and odd:
        raise BadEncoding("has zero bytes that UTF-16 does not explain")
    return "utf-16-be" if even else "utf-16-le"


def decode_text(data: bytes, otherwise: str = "") -> str:
    """Return the text of a file in `encoding_of` it; else in the encoding `otherwise`, if there is one.

    Raises:
        BadEncoding: if it is in none of them.
    """
    name = encoding_of(data)
    try:
        return data.decode(name)
    except UnicodeDecodeError as error:
        if not otherwise or name != "utf-8-sig":
            raise BadEncoding(f"is not {error.encoding.upper()}: {error.reason}") from error
    try:
        return data.decode(otherwise)
    except UnicodeError as error:  # some codecs raise no UnicodeDecodeError
        raise BadEncoding(f"is neither UTF-8 nor {otherwise}: {error}") from error
