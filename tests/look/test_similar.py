"""The most similar images of one. Spec: docs/spec/conventions.md#viewer"""

import numpy as np
import pytest

from imagemill.domain.embedding_specs import DINOV3, DINOV3_WIDTH
from imagemill.formats.npy import NpyStore
from imagemill.look import similar
from imagemill.look.similar import Similar


def write(root, image_id, vector):
    folder = root.derived / DINOV3.folder
    folder.mkdir(parents=True, exist_ok=True)
    np.save(NpyStore(folder, DINOV3).path(image_id), vector)


@pytest.fixture
def vectors(data_root):
    """Vectors of different lengths at known angles to that of `a`."""
    generator = np.random.default_rng(0)
    axis, other = np.linalg.qr(generator.normal(size=(DINOV3_WIDTH, 2)))[0].T
    angles = {"a": 0.0, "b": 0.5, "c": 0.1, "d": 1.2, "e": 3.0}
    for image_id, angle in angles.items():
        vector = (np.cos(angle) * axis + np.sin(angle) * other) * generator.uniform(0.1, 30)
        write(data_root, image_id, vector.astype(np.float32))
    return data_root, angles


def test_images_are_in_order_of_their_cosine(vectors):
    root, angles = vectors
    found = Similar().to(root, "a", angles, 3)

    assert [each.image_id for each in found] == ["c", "b", "d"]
    assert [each.cosine for each in found] == pytest.approx([np.cos(0.1), np.cos(0.5), np.cos(1.2)], abs=2e-3)


def test_only_given_images_are_returned_and_new_vectors_are_read(vectors):
    root, _ = vectors
    search = Similar()
    assert [each.image_id for each in search.to(root, "a", {"d", "e"}, 3)] == ["d", "e"]
    write(root, "f", np.load(NpyStore(root.derived / DINOV3.folder, DINOV3).path("a")))

    assert search.to(root, "a", {"d", "f"}, 1)[0].image_id == "f"


@pytest.mark.parametrize("bad", [np.zeros(DINOV3_WIDTH), np.full(DINOV3_WIDTH, np.nan), np.ones(3)])
def test_vector_that_has_no_direction_is_left_out(vectors, bad):
    root, angles = vectors
    write(root, "bad", bad.astype(np.float32))

    assert "bad" not in [each.image_id for each in Similar().to(root, "a", {*angles, "bad"}, 9)]
    assert Similar().to(root, "bad", angles, 3) == []
    assert Similar().to(root, "absent", angles, 3) == []
    assert Similar().to(root, "a\0", angles, 3) == []


def test_file_that_cannot_be_a_vector_is_left_out_and_the_others_are_compared(vectors):
    """A file of text, and one whose name is no image id."""
    root, angles = vectors
    write(root, "text", np.array(["text"] * DINOV3_WIDTH))
    np.save(root.derived / DINOV3.folder / "a\nb.npy", np.ones(DINOV3_WIDTH, np.float32))

    assert [each.image_id for each in Similar().to(root, "a", {*angles, "text"}, 1)] == ["c"]


def test_all_vectors_are_compared_when_they_are_read_in_parts(vectors, monkeypatch):
    root, angles = vectors
    whole = Similar().to(root, "a", angles, 9)
    monkeypatch.setattr(similar, "_BLOCK", 2)

    found = Similar().to(root, "a", angles, 9)
    assert [each.image_id for each in found] == [each.image_id for each in whole] == ["c", "b", "d", "e"]
    assert [each.cosine for each in found] == pytest.approx([each.cosine for each in whole], abs=1e-5)


def test_root_with_too_many_images_is_not_searched(vectors, monkeypatch):
    root, angles = vectors
    monkeypatch.setattr(similar, "MOST_IMAGES", 4)

    assert Similar().to(root, "a", angles, 3) == []
