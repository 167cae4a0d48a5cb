"""Opening text files whose encoding is not declared."""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from imagemill.inputs.metadata.rows import Unreadable
from imagemill.text.encodings import BadEncoding, encoding_of

# Longest value of a column, in characters.
MAX_FIELD = 1 << 20

_SAMPLE = 1 << 16


@contextmanager
def open_text(path: Path, otherwise: str) -> Iterator[TextIO]:
    """Open a text file: in UTF-8, in UTF-16, or in the encoding `otherwise`, as caption files are.

    Raises:
        Unreadable: if it is in none of them, also while the file is read.
    """
    try:
        with open(path, "rb") as file:
            sample = file.read(_SAMPLE)
        name = encoding_of(sample)
        if name == "utf-8-sig" and otherwise and not _is_utf8(path):
            name = otherwise
        with open(path, encoding=name, newline="") as file:
            yield file
    except (BadEncoding, UnicodeError) as error:
        do = "save it as UTF-8, or name its encoding as captions.encoding in imagemill.yaml"
        raise Unreadable(f"it is not text: {error}", do=do) from error


def _is_utf8(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(path, "rb") as file:
        try:
            while chunk := file.read(1 << 20):
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True
