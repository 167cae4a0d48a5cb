"""Decoding of one sample from its tar: the record as a dict, npy members as views of the buffer it was read into.

Members have the names that training scripts use. Samples are located in sets.py, bytes are read in tars.py, and formats
are in formats/tar.py and formats/npy.py.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.jsonl import parse_object
from imagemill.formats.npy import parse_npy
from imagemill.formats.tar import view_sample
from imagemill.fs.location import Location
from imagemill.pipeline.shards.shard_sets import IndexLine
from imagemill.reading.published import PublishedTars
from imagemill.reading.tars import OpenedTars

Tars = OpenedTars | PublishedTars
Place = Path | Location


def short_name(suffix: str) -> str:
    """Return a member's name in a sample or batch: `vae.npy` → `vae`."""
    return suffix.removesuffix(".npy")


def chosen_suffixes(names: Iterable[str], available: Sequence[str], where: Place) -> list[str]:
    """Return the suffixes of the members with these names; raise WrongUsage for a name that the set does not have."""
    suffixes = {short_name(suffix): suffix for suffix in available}
    names = list(names)
    if unknown := [name for name in names if name not in suffixes]:
        raise WrongUsage(
            f"no member {unknown[0]!r}",
            where=where,
            why="the manifest lists none",
            do=f"choose from {', '.join(suffixes)}",
        )
    return [suffixes[name] for name in names]


def read_members(tars: Tars, line: IndexLine, suffixes: Sequence[str], buffer: memoryview) -> dict[str, Any]:
    """Decode only these members of one sample, by short name: `json` as a dict, the rest as arrays.

    Args:
        tars: tars of the set.
        line: position of the sample.
        suffixes: of the members.
        buffer: of `line.size` bytes or more; the sample is read into it, and the arrays are views of it.

    Raises:
        ShardsReplaced: if the tar no longer belongs to this set.
        ImagemillError: if the sample is not at its position, or a member is missing or damaged.
    """
    filled = tars.read_into(line.shard, line.offset, buffer[: line.size])
    return decode_members(tars, line, suffixes, buffer[:filled])


def decode_members(tars: Tars, line: IndexLine, suffixes: Sequence[str], data: memoryview) -> dict[str, Any]:
    """Decode members of a sample that was read already; see `read_members`."""
    path = tars.folder / line.shard
    values = view_sample(data, line.entry, path)
    if missing := [suffix for suffix in suffixes if suffix not in values]:
        raise _damaged(path, line, f"it has no member {missing[0]}")
    return {short_name(suffix): _decoded(suffix, values[suffix], path, line) for suffix in suffixes}


def _decoded(suffix: str, data: memoryview, path: Place, line: IndexLine) -> Any:
    if suffix != "json":
        return parse_npy(data, path / f"{line.key}.{suffix}")
    record = parse_object(bytes(data))
    if record is None or not isinstance(record.get("caption"), str):
        raise _damaged(path, line, "its json is not a record with a caption")
    return record


def _damaged(path: Place, line: IndexLine, why: str) -> ImagemillError:
    return ImagemillError(
        f"sample {line.image_id!r} is damaged",
        where=f"{path}, byte {line.offset}",
        why=why,
        do="write the set again: imagemill shards --overwrite",
    )
