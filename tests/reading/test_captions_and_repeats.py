"""Several captions of one image, and samples that are drawn several times in an epoch.

Spec: docs/spec/shards.md#captions-and-repeats
"""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import WrongUsage
from imagemill.pipeline.shards.shard_sets import load_manifest, read_index
from imagemill.reading import ShardDataset
from imagemill.reading.plan import BucketLayout, Plan
from imagemill.validation.shards import shard_set as check_set
from tests.helpers.shard_sets import change_manifest, publish, shard_set

TEXTS = ["a picture called 3_red%2Fa", "something red", "red"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One bucket: `3_red/a` is drawn three times and has three captions, `b` and `c` are drawn once and have one."""
    root = shard_set(tmp_path_factory.mktemp("repeats") / "data", dict.fromkeys(("3_red%2Fa", "b", "c"), (64, 64)))
    records = [json.loads(line) for line in root.stage2_jsonl.read_text().splitlines()]
    for record in records:
        if record["image_id"] == "3_red%2Fa":
            record |= {"image_path": "data/approved/3_red/a.jpg", "captions": TEXTS, "repeats": 3}
        elif record["image_id"] == "b":
            record |= {"repeats": "often", "captions": "of another program"}
    root.stage2_jsonl.write_text("".join(json.dumps(record) + "\n" for record in records))
    publish(root, "replace")
    return root


@pytest.fixture
def dataset(root):
    return lambda batch_size=2, **settings: ShardDataset(root.shards, batch_size, **settings)


def drawn(batches):
    return [image_id for batch in batches for image_id in batch["image_id"]]


def test_batches_have_all_captions_and_the_repeats_of_records(dataset):
    batches = list(dataset())
    captions = {i: each for batch in batches for i, each in zip(batch["image_id"], batch["captions"], strict=True)}
    repeats = {i: each for batch in batches for i, each in zip(batch["image_id"], batch["repeats"], strict=True)}

    assert captions == {"3_red%2Fa": TEXTS, "b": ["a picture called b"], "c": ["a picture called c"]}
    assert repeats == {"3_red%2Fa": 3, "b": 1, "c": 1}
    assert all(batch["caption"] == [texts[0] for texts in batch["captions"]] for batch in batches)


def test_each_sample_is_drawn_once_unless_repeats_are_requested(dataset):
    assert Counter(drawn(dataset())) == {"3_red%2Fa": 1, "b": 1, "c": 1}
    assert Counter(drawn(dataset(repeats=True))) == {"3_red%2Fa": 3, "b": 1, "c": 1}
    assert len(dataset(repeats=True, tail="pad")) == 3


def test_sample_is_packed_once_and_the_manifest_sums_repeats(root):
    (folder,) = root.shards.glob("bucket_*")
    manifest = load_manifest(folder)

    assert (manifest.samples, manifest.repeats) == (3, 5)
    assert sum("repeats" in line for line in (folder / "index.jsonl").read_text().splitlines()) == 1
    assert not [found for found in check_set(folder) if not isinstance(found, int)]


def test_other_sum_in_the_manifest_is_a_finding(tmp_path):
    root = shard_set(tmp_path / "data", {"a": (64, 64)})
    (folder,) = root.shards.glob("bucket_*")
    assert "repeats" not in json.loads((folder / "manifest.json").read_text())

    change_manifest(folder, repeats=7)

    found = [each for each in check_set(folder) if not isinstance(each, int)]
    assert [(each.rule, each.field) for each in found] == [("statistics", "repeats")]


def test_random_captions_come_from_the_seed(dataset):
    def texts(seed, epochs=8):
        source = dataset(seed=seed, captions="random")
        return [
            text
            for _ in range(epochs)
            for batch in source
            for i, text in zip(batch["image_id"], batch["caption"], strict=True)
            if i == "3_red%2Fa"
        ]

    assert texts(0) == texts(0) != texts(1)
    assert set(texts(0, 30)) == set(TEXTS)


def test_draws_of_one_epoch_have_captions_of_their_own(dataset):
    found = Counter()
    source = dataset(captions="random", repeats=True)
    for _ in range(20):
        texts = [t for b in source for i, t in zip(b["image_id"], b["caption"], strict=True) if i == "3_red%2Fa"]
        found[len(set(texts))] += 1
    assert found[2] + found[3] > found[1]


def test_no_state_or_mask_of_a_text_with_random_captions(dataset):
    batch = next(iter(dataset(captions="random")))
    assert {"vae", "caption"} <= batch.keys()
    assert not {"t5h", "t5m"} & batch.keys()


@pytest.mark.parametrize("members", [("json", "t5h"), ("json", "t5m"), ("vae",)])
def test_members_that_do_not_go_with_random_captions_are_refused(dataset, members):
    with pytest.raises(WrongUsage, match="captions"):
        dataset(captions="random", members=members)


@pytest.mark.parametrize("world", [1, 2])
def test_training_continues_exactly_with_repeats_and_random_captions(dataset, world):
    settings = {"repeats": True, "captions": "random", "tail": "pad", "seed": 4}

    def run(source, steps):
        found = []
        for _ in range(steps // len(source) + 1):
            for batch in source:
                found.append((batch["image_id"], batch["caption"]))
                if len(found) == steps:
                    return found
        return found

    def of_step(found):  # captions and ids of both ranks
        return [
            tuple([*itertools.chain(*part)] for part in zip(*each, strict=True)) for each in zip(*found, strict=True)
        ]

    whole = run(dataset(2, rank=0, world_size=1, **settings), 6)
    first = dataset(2, rank=0, world_size=1, **settings)
    run(first, 2)
    state = json.loads(json.dumps(first.state_dict()))
    ranks = []
    for rank in range(world):
        source = dataset(2 // world, rank=rank, world_size=world, **settings)
        source.load_state_dict(state)
        ranks.append(run(source, 4))

    assert of_step(ranks) == of_step([whole[2:]])


@pytest.mark.parametrize("settings", [{"repeats": True}, {"captions": "random"}])
def test_state_with_another_way_of_drawing_is_refused(dataset, settings):
    with pytest.raises(WrongUsage, match="another plan"):
        dataset().load_state_dict(dataset(**settings).state_dict())
    with pytest.raises(WrongUsage, match="another plan"):
        dataset(**settings).load_state_dict(dataset().state_dict())


@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=9), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from(["stream", "permutation"]),
)
def test_every_sample_is_drawn_as_often_as_it_repeats(repeats, world, order):
    layouts = [BucketLayout(str(n), np.arange(len(r)) // 2, np.array(r)) for n, r in enumerate(repeats)]
    plan = Plan(layouts, 2, world, seed=1, order=order, buffer=3)

    found = Counter((p.bucket, int(row)) for rank in range(world) for p in plan.pieces(0, rank) for row in p.rows)

    assert found == {(b, n): times for b, of_bucket in enumerate(repeats) for n, times in enumerate(of_bucket)}


def test_repeats_of_one_change_no_order():
    shards = np.arange(20) // 5
    once, ones = (Plan([BucketLayout("a", shards, each)], 4) for each in (None, np.ones(20, int)))
    assert [p.rows.tolist() for p in once.pieces(0, 0)] == [p.rows.tolist() for p in ones.pieces(0, 0)]


def test_index_of_a_sample_drawn_once_has_no_field_for_it(tmp_path):
    root = shard_set(tmp_path / "data", {"a": (64, 64)})
    (folder,) = root.shards.glob("bucket_*")
    assert "repeats" not in (folder / "index.jsonl").read_text()
    assert not read_index(folder)[0].repeats
