"""Small JSON documents (manifests), and file checksums.

The contents of manifests are defined by their writers, such as pipeline/shards/shard_writer.py. Files of many records belong
in formats/jsonl.py.
"""

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from imagemill.errors import ImagemillError, MissingInput
from imagemill.fs.atomic import write_bytes_atomic
from imagemill.text.strict_json import NOT_JSON, decode_json

T = TypeVar("T")


def json_bytes(obj: Any) -> bytes:
    """Encode a document with sorted keys, two spaces of indent and a final newline: equal objects give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(obj, order="sorted"), indent=2) + b"\n"


def write_json(path: Path, obj: Any) -> None:
    """Replace a document with `json_bytes` atomically."""
    write_bytes_atomic(path, json_bytes(obj))


def read_json(path: Path) -> Any:
    """Return the value of a document.

    Raises:
        MissingInput: if the file does not exist.
        ImagemillError: if it is not JSON.
    """
    try:
        return decode_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):  # a file where its folder should be
        raise MissingInput(f"no {path.name}", where=path) from None
    except NOT_JSON as error:
        raise ImagemillError(
            f"{path.name} is not valid JSON",
            where=path,
            why=str(error),
            do="restore the file, or remove it and run imagemill again",
        ) from error


def read_document(path: Path, kind: type[T]) -> T | None:
    """Return the document as a value of this type, or None if it is missing or anything else."""
    try:
        return msgspec.convert(read_json(path), kind)
    except (ImagemillError, msgspec.ValidationError):
        return None


def nested_value(document: object, *names: str) -> Any:
    """Return the value below nested names; None if a level is missing or no object."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes in hex, which identifies published files."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
