"""Latents as pictures: the fitted map, the kinds that it serves, and its file."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from imagemill.domain.embedding_specs import CLIP_TEXT, DINOV3, T5, VAE, EmbeddingSpec
from imagemill.domain.inputs import NEW_INPUTS
from imagemill.encoders.flux_vae import FluxVaeEncoder
from imagemill.look import latents as module
from imagemill.look.cache import PictureCache
from imagemill.look.latents import LatentColours, cell_pixels, fit_colours, latents_picture, root_colours
from imagemill.look.pictures import Pictures
from imagemill.models import Prepared
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import read_identity, record_identity
from tests.helpers.product import coco_photos
from tests.helpers.stage2 import embed, photos
from tests.helpers.stubs import StubEncoder


def kind(shape, *, source="pixels", **contract):
    """Return a kind whose arrays have this shape: (height, width) → shape."""
    return EmbeddingSpec(
        kind="grid", pass_name="grid", folder="grid", member="grid.npy", source=source, dtype="float32", contract=contract,
        array_shape=lambda contract, height, width: shape(height, width), encoder="", default_model="preview",
    )  # fmt: skip


# ---- the map


@given(st.integers(1, 32), st.integers(0, 10**6), st.floats(0, 0.2))
@settings(max_examples=30, deadline=None)
def test_known_map_is_recovered(channels, seed, noise):
    """To 1e-3 without noise; with noise, R² is the share that is not noise."""
    random = np.random.default_rng(seed)
    matrix = random.uniform(-0.5, 0.5, (channels + 1, 3))
    pairs = []
    for _ in range(20):
        latent = random.normal(size=(channels, 24, 32)).astype(np.float32)
        colours = np.tensordot(latent, matrix[:-1], axes=(0, 0)) + matrix[-1]
        pairs.append((latent, 255 * (colours + noise * random.normal(size=colours.shape))))

    fitted = fit_colours(pairs)

    signal = (matrix[:-1] ** 2).sum()
    assert fitted.r2 == pytest.approx(signal / (signal + 3 * noise**2), abs=0.1)
    assert fitted.photographs == 20
    if noise < 1e-4:
        assert np.abs(np.array(fitted.matrix) - matrix).max() < 1e-3
        assert fitted.r2 > 0.999


def test_same_pairs_give_the_same_map_from_a_bounded_number_of_cells(monkeypatch):
    random = np.random.default_rng(1)
    pairs = [(random.normal(size=(4, 30, 40)), random.integers(0, 256, (30, 40, 3))) for _ in range(3)]
    given_cells, lstsq = [], np.linalg.lstsq
    monkeypatch.setattr(np.linalg, "lstsq", lambda a, b, **o: given_cells.append(len(a)) or lstsq(a, b, **o))

    assert fit_colours(pairs) == fit_colours(pairs)
    assert given_cells == [600, 600]


def test_photographs_of_one_colour_and_equal_channels_are_fitted_as_well():
    """Neither has a unique map."""
    flat = fit_colours([(np.zeros((4, 8, 8)), np.full((8, 8, 3), 51))])
    assert flat.r2 == 0
    assert (
        np.asarray(Image.open(io.BytesIO(latents_picture(np.zeros((4, 8, 8)), flat)))).tolist() == [[[51] * 3] * 8] * 8
    )

    slope = np.broadcast_to(np.arange(64.0).reshape(8, 8), (4, 8, 8))
    assert fit_colours([(slope, np.repeat(slope[0][..., None], 3, 2))]).r2 > 0.999


def test_nothing_to_fit_is_an_error_of_the_caller():
    with pytest.raises(ValueError, match="concatenate"):
        fit_colours([])


def test_picture_has_a_pixel_per_cell_and_colours_within_their_range():
    colours = LatentColours(((1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 0.5)), 1.0)
    latent = np.array([[[0.0, 1.0, -5.0]], [[0.0, 1.0, 0.25]]], np.float16)

    image = Image.open(io.BytesIO(latents_picture(latent, colours)))

    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (3, 1))
    assert np.asarray(image).tolist() == [[[0, 0, 128], [255, 255, 128], [0, 128, 128]]]
    with pytest.raises(ValueError, match="shape"):
        latents_picture(np.zeros((3, 2, 2)), colours)


# ---- kinds


@pytest.mark.parametrize(
    ("spec", "cell"),
    [
        (VAE, 8),
        (VAE.recorded({"size": "bucket"}), 8),
        (kind(lambda h, w: (4, h // 14, w // 14)), 14),
        (kind(lambda h, w: (128, h // 16, w // 16)), 16),
        (kind(lambda h, w: (3, h, w)), 1),
        (kind(lambda h, w: (4, h // 8, w // 8), source="caption"), None),
        (kind(lambda h, w: (h // 16, w // 16, 1024)), None),
        (kind(lambda h, w: (8, 14, 14)), None),
        (kind(lambda h, w: (8, 0, 0)), None),
        (DINOV3, None),
        (T5, None),
        (CLIP_TEXT, None),
    ],
)
def test_map_serves_every_kind_of_an_array_of_cells(spec, cell):
    assert cell_pixels(spec) == cell


# ---- the map of a data root


class Averages(StubEncoder):
    """A latent of three channels that are the mean colours of its cells, and 13 that are zero."""

    def prepare(self, item):
        return Prepared(item, item.shape, pixels=item.shape[0] * item.shape[1])

    def encode(self, batch):
        self.calls += 1
        return [self._latent(item.payload) for item in batch]

    def _latent(self, pixels):
        shape = self.spec.shape(*pixels.shape[:2])
        rows, columns = shape[1:]
        latent = np.zeros(shape, self.spec.dtype)
        cells = pixels[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8, 3).mean((1, 3))
        latent[:3] = cells.transpose(2, 0, 1) / 100
        return latent


class Reader:
    """The parts that read a data root's colours."""

    def __init__(self, root):
        self.root, self.cache = root, PictureCache(root.look)
        self.pictures = Pictures(root, NEW_INPUTS, self.cache)

    def colours(self, spec=VAE):
        with Ledger(self.root.ledger) as ledger:
            return root_colours(self.root, ledger, spec, self.pictures, self.cache)


@pytest.fixture
def fits(monkeypatch):
    """Number of photographs of each fit."""
    made, fit = [], module.fit_colours
    monkeypatch.setattr(module, "fit_colours", lambda pairs: made.append(len(pairs)) or fit(pairs))
    return made


def test_map_of_a_data_root_is_fitted_once_and_kept(data_root, fits):
    for seed, name in enumerate("abc"):  # smooth, because the filter of pictures is not the mean of a cell
        colours = np.random.default_rng(seed).integers(60, 200, (3, 4, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((247, 186), Image.Resampling.BICUBIC).save(data_root.approved / f"{name}.png")
    embed(data_root, VAE, encoder=Averages)

    found = Reader(data_root).colours()

    assert np.abs(np.array(found.matrix)[:3] - np.eye(3) * 100 / 255).max() < 0.02
    assert found.r2 > 0.98
    assert (found.photographs, found.files) == (3, 3)
    assert Reader(data_root).colours() == found
    assert fits == [3]
    (file,) = data_root.look.glob("latents-vae_latents-*.json")
    file.write_bytes(b"damaged")
    assert Reader(data_root).colours() == found
    assert fits == [3, 3]


def test_map_is_fitted_again_for_another_model_and_for_twice_as_many_files(data_root, fits):
    photos(data_root, "a", "b")
    embed(data_root, VAE, encoder=Averages)
    reader = Reader(data_root)
    assert reader.colours().photographs == 2

    photos(data_root, "c")
    embed(data_root, VAE, encoder=Averages)
    assert reader.colours().photographs == 2
    photos(data_root, "d")
    embed(data_root, VAE, encoder=Averages)
    assert reader.colours().photographs == 4

    with Ledger(data_root.ledger) as ledger:
        identity = read_identity(ledger, VAE.kind)
        record_identity(ledger, type(identity)(kind=VAE.kind, model="other", facts={"other": 1}))
    assert reader.colours() is None, "the model has made no file yet"
    assert fits == [2, 4]


def test_files_that_do_not_match_their_photograph_are_left_out(data_root):
    photos(data_root, *"abcd")
    embed(data_root, VAE, encoder=Averages)
    (data_root.derived / "vae_latents" / "a.npy").write_bytes(b"damaged")
    (data_root.approved / "b.png").write_bytes(b"<html>")
    (data_root.approved / "c.png").unlink()

    assert Reader(data_root).colours().photographs == 1


def test_root_without_files_or_with_a_kind_of_vectors_has_no_map(data_root):
    photos(data_root, "a")
    embed(data_root, DINOV3)
    assert Reader(data_root).colours(VAE) is None
    assert Reader(data_root).colours(DINOV3) is None


def test_at_most_64_photographs_at_equal_distances_are_used():
    ids = [f"{n:04d}" for n in range(1000)]
    chosen = module._spread(ids)
    assert len(set(chosen)) == 64
    assert chosen[0] == "0000"
    assert chosen[-1] > "0950"
    assert module._spread(ids[:64]) == ids[:64]


@pytest.mark.parametrize("size", ["original", pytest.param("bucket", marks=pytest.mark.soak)])
def test_map_explains_half_of_the_colours_of_preview_latents(coco128, data_root, size):
    """128 photographs, the preview model, the passes of the product."""
    coco_photos(coco128, data_root.approved)
    counts = embed(data_root, VAE.recorded({"size": size}), encoder=FluxVaeEncoder, device="cpu", size=size)
    assert counts[VAE.kind]["computed"] == 128

    colours = Reader(data_root).colours()

    print(json.dumps({"size": size, "r2": colours.r2}))
    assert colours.photographs == 64
    assert colours.r2 >= 0.5
