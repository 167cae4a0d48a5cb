"""Sets of several places, such as those of shares, are read as one.

Spec: docs/spec/shards.md#several-places
"""

import json

import numpy as np
import pytest

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.manifest import read_json
from imagemill.fs.blobs import StorageSettings
from imagemill.fs.location import parse_location
from imagemill.fs.objects import Objects
from imagemill.pipeline.push import Publisher, PushRequest
from imagemill.pipeline.shards.shard_sets import MANIFEST
from imagemill.reading import ShardDataset, ShardSet, ShardsReplaced
from imagemill.store.ledger import Ledger
from tests.helpers.s3 import s3_server
from tests.helpers.shard_sets import change_manifest, change_values, identities, publish, shard_set

SIZES = {f"wide{n:02d}": (1216, 832) for n in range(11)} | {f"square{n:02d}": (1024, 1024) for n in range(10)}
OPTIONS = {"batch_size": 2, "members": ("json", "vae", "dinov3"), "seed": 3}


@pytest.fixture
def roots(tmp_path):
    """Three data roots with equal base names; the last has one bucket."""
    ids = list(SIZES)
    parts = [ids[0:6] + ids[11:15], ids[6:9] + ids[15:], ids[9:11]]
    return [shard_set(tmp_path / f"{n}/data", {i: SIZES[i] for i in part}) for n, part in enumerate(parts)]


def folders(roots):
    return [root.shards for root in roots]


def ids_of(batches):
    return [image_id for batch in batches for image_id in batch["image_id"]]


def test_every_sample_of_every_place_once(roots):
    dataset = ShardDataset(folders(roots), **OPTIONS)
    seen = list(dataset)

    assert sorted(ids_of(seen)) == sorted(SIZES)
    assert [bucket.name for bucket in dataset.buckets] == ["1024x1024", "1216x832"]
    assert dataset.samples == len(SIZES)
    single = {image_id: sample for root in roots for image_id, sample in ShardSet.open(root.shards).items()}
    for batch in seen:
        for image_id, latent, vector in zip(batch["image_id"], batch["vae"], batch["dinov3"], strict=True):
            np.testing.assert_array_equal(latent, single[image_id]["vae"])
            np.testing.assert_array_equal(vector, single[image_id]["dinov3"])


def test_a_batch_has_samples_of_several_places(roots):
    place = {i: n for n, root in enumerate(roots) for i in ShardSet.open(root.shards)}

    batches = ShardDataset(folders(roots), **OPTIONS)

    assert any(len({place[i] for i in batch["image_id"]}) > 1 for batch in batches)


@pytest.mark.parametrize("order", ["permutation", "stream"])
def test_orders_keep_the_tars_of_places_apart(roots, order):
    dataset = ShardDataset(folders(roots), **OPTIONS, order=order)

    assert sorted(ids_of(dataset)) == sorted(SIZES)
    tars = [len(np.unique(layout.shards)) for layout in dataset.plan.buckets]
    assert tars == [sum(len(part.manifest.shards) for part in bucket.parts) for bucket in dataset.buckets]


def test_samples_by_id(roots):
    shards = ShardSet.open(folders(roots))

    assert sorted(shards) == sorted(SIZES)
    for root in roots:
        for image_id, sample in ShardSet.open(root.shards).items():
            assert shards[image_id]["caption"] == sample["caption"]
            np.testing.assert_array_equal(shards[image_id]["vae"], sample["vae"])


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(roots, workers):
    whole = ids_of(ShardDataset(folders(roots), **OPTIONS).loader(workers))
    for steps in (1, 4):
        dataset = ShardDataset(folders(roots), **OPTIONS)
        batches = iter(dataset.loader(workers))
        first = ids_of(next(batches) for _ in range(steps))
        state = json.loads(json.dumps(dataset.state_dict()))
        again = ShardDataset(folders(roots), **OPTIONS)
        again.load_state_dict(state)

        assert first + ids_of(again.loader(workers)) == whole


def test_state_has_the_digest_of_every_set_in_order(roots):
    samples = ShardDataset(folders(roots), **OPTIONS).state_dict()["samples"]
    single = [ShardDataset(root.shards, **OPTIONS).state_dict()["samples"] for root in roots]

    assert samples == {
        "1024x1024": f"{single[0]['1024x1024']} {single[1]['1024x1024']}",
        "1216x832": " ".join(each["1216x832"] for each in single),
    }


def test_state_of_another_order_of_places_is_refused(roots):
    state = ShardDataset(folders(roots), **OPTIONS).state_dict()

    with pytest.raises(WrongUsage, match="samples was"):
        ShardDataset(folders(roots)[::-1], **OPTIONS).load_state_dict(state)


def test_a_replaced_place_is_noticed(roots):
    dataset = ShardDataset(folders(roots), **OPTIONS)
    change_values(roots[1], *ShardSet.open(roots[1].shards))
    publish(roots[1], "replace", models=identities())

    with pytest.raises(ShardsReplaced):
        list(dataset)


def test_an_id_in_two_places_is_refused(roots, tmp_path):
    other = shard_set(tmp_path / "3/data", {"wide00": SIZES["wide00"]})

    with pytest.raises(ImagemillError) as refused:
        ShardSet.open([*folders(roots), other.shards])

    assert "'wide00' is in two of the places" in str(refused.value)
    assert str(other.shards) in str(refused.value)
    assert str(roots[0].shards) in str(refused.value)


def test_a_place_given_twice_is_refused(roots):
    with pytest.raises(WrongUsage, match="is given twice"):
        ShardSet.open([roots[0].shards, roots[1].shards, roots[0].shards])


def test_no_place_is_refused():
    with pytest.raises(WrongUsage, match="no place"):
        ShardDataset([], **OPTIONS)


def other_vae(manifest):
    other = {"key": "0" * 16, "facts": {"scaling_factor": 0.3, "shift_factor": 0.25}}
    return {"provenance": manifest["provenance"] | {"vae_latents": manifest["provenance"]["vae_latents"] | other}}


def other_members(manifest):
    return {"members": [name for name in manifest["members"] if name != "dinov3.npy"]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_vae, "vae_latents was made by m and by m, which differ in scaling_factor"),
        (other_members, "dinov3.npy"),
    ],
)
def test_sets_that_do_not_go_together_are_refused(roots, change, why):
    bucket = roots[2].shards / "bucket_1216x832"
    change_manifest(bucket, **change(read_json(bucket / MANIFEST)))

    with pytest.raises(ImagemillError) as refused:
        ShardSet.open(folders(roots))

    assert "do not go together" in str(refused.value)
    assert why in str(refused.value)


STORAGE = {"allow_http": True}


def push(root, url):
    store = Objects(parse_location(url, "the URL"), StorageSettings(**STORAGE))
    with Ledger(root.ledger) as ledger:
        Publisher(store, root.shards, ledger, url, "a test").push(PushRequest())


def test_places_of_both_kinds(roots, monkeypatch):
    """Two published shares and a folder; a state opens the versions that it was made with."""
    whole = ids_of(ShardDataset(folders(roots), **OPTIONS))
    with s3_server() as server:
        server.make_bucket("training")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        urls = [f"s3://training/share{n}" for n in range(2)]

        for root, url in zip(roots, urls, strict=False):
            push(root, url)
        places = [*urls, roots[2].shards]
        dataset = ShardDataset(places, **OPTIONS, object_storage=STORAGE)
        batches = iter(dataset)
        first = ids_of(next(batches) for _ in range(3))
        state = json.loads(json.dumps(dataset.state_dict()))

        assert [sets is None for sets in state["sets"]] == [False, False, True]
        change_values(roots[1], *ShardSet.open(roots[1].shards))
        publish(roots[1], "replace", models=identities())
        push(roots[1], urls[1])
        again = ShardDataset(places, **OPTIONS, object_storage=STORAGE)
        assert again.state_dict()["samples"] != state["samples"]
        again.load_state_dict(state)
        assert first + ids_of(again) == whole
        pinned = ShardDataset(places, **OPTIONS, object_storage=STORAGE, set_id=state["sets"])
        assert ids_of(pinned) == whole
        server.make_bucket("copies")
        push(roots[0], "s3://copies/cats")
        with pytest.raises(ImagemillError, match="is in two of the places") as refused:
            ShardSet.open([urls[0], "s3://copies/cats"], object_storage=STORAGE)
        assert "training/share0" in str(refused.value)
        assert "copies/cats" in str(refused.value)
        for other in (urls[0], urls):
            with pytest.raises(WrongUsage, match="samples was"):
                ShardDataset(other, **OPTIONS, object_storage=STORAGE).load_state_dict(state)
        with pytest.raises(WrongUsage, match="set_id does not go with 3 places"):
            ShardDataset(places, **OPTIONS, object_storage=STORAGE, set_id=state["sets"][0])
