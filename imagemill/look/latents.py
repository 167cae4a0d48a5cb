"""Latents as pictures: a linear map from channels to colours, fitted on the data root's own photographs.

    latents + photographs at one pixel per cell ──fit_colours──> LatentColours ──latents_picture──> PNG

It serves every kind whose arrays have shape (channels, H / f, W / f), in pixels of the encoded picture.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec
import numpy as np
from PIL import Image

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.domain.latent_boxes import encoded_box
from imagemill.domain.layout import DataRoot
from imagemill.errors import InvalidNpy, Refused
from imagemill.formats.npy import NpyStore, read_npy
from imagemill.look.cache import PictureCache
from imagemill.look.pictures import PictureChanged, Pictures
from imagemill.store.inputs import PixelRule
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import UNKNOWN, UNKNOWN_PREVIEW, read_identity, spec_in_force

PHOTOGRAPHS = 64
CELLS = 200

# Two pictures whose sides are divisible by 64: arrays of one cell size have a whole number of cells of each.
_SQUARE, _UPRIGHT = (1024, 1024), (1216, 832)


class LatentColours(msgspec.Struct, frozen=True):
    """A linear map from the channels of a latent to colours.

    Attributes:
        matrix: a row of red, green and blue, from 0 to 1, for each channel, and a last one that is added.
        r2: share of the colours' variance that the map explains, at most 1.
        photographs: number of them that it was fitted on.
        files: number of files that the model had made by then.
    """

    matrix: tuple[tuple[float, float, float], ...]
    r2: float
    photographs: int = 0
    files: int = 0


def cell_pixels(spec: EmbeddingSpec) -> int | None:
    """Return f of a kind whose arrays have shape (channels, H / f, W / f); None for other kinds."""
    if spec.source != "pixels" or spec.parts:
        return None
    square, upright = spec.shape(*_SQUARE), spec.shape(*_UPRIGHT)
    if len(square) != 3 or not 0 < square[1] <= _SQUARE[0]:
        return None
    cell = _SQUARE[0] // square[1]
    shapes = [(square[0], height // cell, width // cell) for height, width in (_SQUARE, _UPRIGHT)]
    return cell if shapes == [square, upright] else None


def fit_colours(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> LatentColours:
    """Return the map with the least squared error. The same pairs give the same map.

    Args:
        pairs: latents, shape (channels, h, w), each with its photograph at one pixel per cell, shape (h, w, 3), from 0 to 255. At
            most `CELLS` cells of each pair are used.

    Raises:
        ValueError: without a pair.
    """
    inputs, outputs = [], []
    for number, (latent, picture) in enumerate(pairs):
        cells = latent.reshape(len(latent), -1).T.astype(np.float64)
        chosen = np.random.default_rng(number).permutation(len(cells))[:CELLS]
        inputs.append(np.pad(cells[chosen], ((0, 0), (0, 1)), constant_values=1))
        outputs.append(picture.reshape(-1, 3)[chosen] / 255)
    given, expected = np.concatenate(inputs), np.concatenate(outputs)
    matrix = np.linalg.lstsq(given, expected, rcond=None)[0]
    missed = float(((expected - given @ matrix) ** 2).sum())
    variance = float(((expected - expected.mean(0)) ** 2).sum())
    # Photographs of one colour have no variance to explain.
    r2 = 1 - missed / variance if variance > 1e-9 else 0.0
    return LatentColours(tuple((row[0], row[1], row[2]) for row in matrix.tolist()), r2, len(inputs))


def latents_picture(array: np.ndarray, colours: LatentColours) -> bytes:
    """Return a latent of shape (channels, h, w) as a PNG of w x h pixels. Raises ValueError for another number of channels."""
    matrix = np.array(colours.matrix)
    values = np.tensordot(array.astype(np.float64), matrix[:-1], axes=(0, 0)) + matrix[-1]
    buffer = io.BytesIO()
    Image.fromarray((values.clip(0, 1) * 255).round().astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def root_colours(
    root: DataRoot, ledger: Ledger, spec: EmbeddingSpec, pictures: Pictures, cache: PictureCache
) -> LatentColours | None:
    """Return the map of a kind's files in a data root, fitted on at most `PHOTOGRAPHS` of them; None if none can be used.

    It is kept in the cache under the name of the kind and the key of its model. A map of fewer photographs is fitted again once
    the model has made twice as many files.
    """
    if cell_pixels(spec) is None:
        return None
    identity = read_identity(ledger, spec.kind)
    keys = [*([identity.key] if identity else []), UNKNOWN, UNKNOWN_PREVIEW]
    name = f"latents-{spec.kind}-{keys[0]}.json"
    kept = _decoded(cache.get(name))
    if kept and kept.photographs == PHOTOGRAPHS:
        return kept
    ids = ledger.ids_by_model(spec.kind, keys)
    if kept and len(ids) < 2 * kept.files:
        return kept
    pairs = list(_pairs(root, ledger, spec_in_force(spec, ledger), pictures, _spread(ids), keys))
    if not pairs:
        return None
    colours = msgspec.structs.replace(fit_colours(pairs), files=len(ids))
    cache.put(name, msgspec.json.encode(colours))
    return colours


def _decoded(data: bytes | None) -> LatentColours | None:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(data, type=LatentColours) if data else None
    return None


def _spread(ids: Sequence[str]) -> Sequence[str]:
    """Return at most `PHOTOGRAPHS` ids at equal distances."""
    return [ids[number * len(ids) // PHOTOGRAPHS] for number in range(PHOTOGRAPHS)] if len(ids) > PHOTOGRAPHS else ids


def _pairs(
    root: DataRoot, ledger: Ledger, spec: EmbeddingSpec, pictures: Pictures, ids: Sequence[str], keys: Sequence[str]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield latents by these models with their photographs at one pixel per cell; files that cannot be used are left out."""
    store, files, rule = (
        NpyStore(root.derived / spec.folder, spec),
        ledger.files(spec.kind, ids),
        PixelRule.read(ledger),
    )
    size, cell = spec.contract.get("size", "original"), cell_pixels(spec)
    for source in ledger.sources(ids).values():
        with suppress(OSError, InvalidNpy, PictureChanged, Refused):
            row = files.get((source.image_id, store.stat(source.image_id)))
            if row is None or row.model_key not in keys or not rule.is_current(row.source, source) or cell is None:
                continue
            latent = read_npy(store.path(source.image_id))
            if latent.shape == spec.shape(source.height, source.width) and np.isfinite(latent).all():
                box = encoded_box(source.width, source.height, size, cell=cell)
                yield latent, pictures.cells(source, box, (latent.shape[2], latent.shape[1]))
