"""Every model of a run is checked before the first image is opened. Spec: docs/spec/stage2.md#preview-models"""

import json

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.store.ledger import Ledger
from tests.helpers.product import imagemill, photos, product, snapshot

KINDS = [spec.kind for spec in embedding_specs()]


def use_model(root, kind, model):
    root.config_file.write_text(json.dumps({"encoders": {kind: {"model": model}}}))


@pytest.mark.parametrize("kind", KINDS)
def test_missing_model_is_refused_before_any_file_is_written(data_root, kind):
    photos(data_root.approved, 2)
    use_model(data_root, kind, "no such model")

    said = product(data_root, "run", code=1)

    assert f"{kind}: no such model cannot be found" in said
    assert not list(data_root.derived.rglob("*.npy"))
    with Ledger(data_root.ledger) as ledger:
        assert ledger.sources() == {}, "no image was opened"


def test_model_other_than_the_recorded_one_is_refused_before_any_file_is_written(data_root):
    """A model with the same name but other files is refused too, although `check_recorded` considers it equal."""
    photos(data_root.approved, 1)
    product(data_root, "run")
    photos(data_root.approved, 2)
    before = snapshot(data_root.derived)
    use_model(data_root, "t5_hidden", "another")

    assert "model is not the one that made the existing files" in product(data_root, "run", code=1)

    assert snapshot(data_root.derived) == before


def test_model_of_an_unrequested_pass_is_not_looked_up(data_root):
    photos(data_root.approved, 1)
    use_model(data_root, "t5_hidden", "no such model")

    assert "dinov3_npy 1 made" in product(data_root, "stage2", "--pass", "dinov3")


def test_model_is_not_needed_for_complete_files(data_root, tmp_path):
    """Complete files remain usable on a machine without the model, also after a copy."""
    photos(data_root.approved, 1)
    use_model(data_root, "t5_hidden", "the real one")
    product(data_root, "run")
    data_root.path.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(data_root.path)
    for path in data_root.approved.iterdir():
        path.write_bytes(path.read_bytes())  # a new mtime makes the next run open the image again
    for path in data_root.derived.rglob("*.npy"):
        path.write_bytes(path.read_bytes())

    assert (
        "t5_hidden  0 made"
        in imagemill("run", "--data-root", data_root.path, stub=True, IMAGEMILL_STUB_NO_MODEL="the real one").stdout
    )
