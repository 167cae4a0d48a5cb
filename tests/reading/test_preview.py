"""Sets that a preview model made, or may have made."""

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import ImagemillError
from imagemill.formats.manifest import read_json, write_json
from imagemill.pipeline.shards.shard_manifest import SEAL
from imagemill.reading import ShardDataset, ShardSet
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from tests.helpers.shard_sets import FACTORS
from tests.helpers.stage2 import record_identity_of

SQUARE = "bucket_1024x1024"


def as_of_an_earlier_release(root, **vae):
    """Take the digest out of the manifest, and change what it records of the VAE."""
    path = root.shards / SQUARE / "manifest.json"
    document = read_json(path)
    del document[SEAL]
    document["provenance"]["vae_latents"].update(vae)
    write_json(path, document)


def record_models(root, *, preview=False, model="m"):
    """Record these models in the data root, for every kind."""
    Ledger(root.ledger).close()
    for spec in embedding_specs():
        identity = ModelIdentity(kind=spec.kind, model=model, preview=preview, facts=FACTORS)
        record_identity_of(root, identity)


@pytest.mark.parametrize("open_set", [ShardSet.open, lambda folder: ShardDataset(folder, 1)])
def test_manifest_edited_after_writing_is_refused(own_root, open_set):
    path = own_root.shards / SQUARE / "manifest.json"
    document = read_json(path)
    document["provenance"]["vae_latents"]["model"] = "another"
    write_json(path, document)

    with pytest.raises(ImagemillError, match="changed after it was written"):
        open_set(own_root.shards)


def test_set_without_a_digest_opens_if_the_data_root_records_the_same_models(own_root):
    record_models(own_root)
    as_of_an_earlier_release(own_root)

    with pytest.warns(UserWarning, match="earlier release"):
        opened = ShardSet.open(own_root.shards)
    assert len(opened) == 5


@pytest.mark.parametrize(
    ("recorded", "vae"),
    [
        ({"preview": True}, {"preview": False}),
        ({"model": "real"}, {}),
        ({}, {"key": "0" * 16}),
        (None, {}),
        (None, {"preview": None, "key": None}),
    ],
    ids=["preview edited away", "another model", "another key", "no data root", "no data root, no model"],
)
def test_set_without_a_digest_counts_as_preview_if_nothing_confirms_its_models(own_root, recorded, vae):
    own_root.ledger.unlink(missing_ok=True)
    if recorded is not None:
        record_models(own_root, **recorded)
    as_of_an_earlier_release(own_root, **vae)

    with pytest.warns(UserWarning, match="earlier release"), pytest.raises(ImagemillError, match="may hold"):
        ShardSet.open(own_root.shards)
    with pytest.warns(UserWarning, match="earlier release"):
        assert len(ShardSet.open(own_root.shards, allow_preview=True)) == 5


def test_kind_that_the_manifest_leaves_out_is_not_confirmed(own_root):
    record_models(own_root)
    path = own_root.shards / SQUARE / "manifest.json"
    document = read_json(path)
    del document[SEAL], document["provenance"]["vae_latents"]
    write_json(path, document)

    with pytest.warns(UserWarning, match="earlier"), pytest.raises(ImagemillError, match=r"may hold .*vae_latents"):
        ShardSet.open(own_root.shards)
