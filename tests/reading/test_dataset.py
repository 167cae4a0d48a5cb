"""Batches for training: content, workers, ranks, position.

Reference: the docstring of `ShardDataset`.
Spec: docs/spec/shards.md#updating-a-set
"""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import webdataset

from imagemill.errors import ImagemillError, WrongUsage
from imagemill.formats.manifest import read_json
from imagemill.reading import ShardDataset, ShardSet, batches
from tests.helpers.product import PROJECT
from tests.helpers.shard_sets import FACTORS, bury, change_manifest, change_values, publish, shard_set
from tests.reading.conftest import SIZES


@pytest.fixture
def dataset(root):
    return lambda batch_size=2, **settings: ShardDataset(root.shards, batch_size, **settings)


def ids(batches):
    return [(batch["epoch"], batch["step"], batch["bucket"], batch["image_id"]) for batch in batches]


# ---- content


def test_values_are_those_of_the_files(root, dataset):
    opened = ShardSet.open(root.shards)

    batches = list(dataset(2, members=("json", "dinov3", "vae", "t5h", "t5m")))

    assert sorted(i for batch in batches for i in batch["image_id"]) == sorted(SIZES)
    for batch in batches:
        for n, image_id in enumerate(batch["image_id"]):
            expected = opened[image_id]
            assert (batch["bucket"], batch["caption"][n], batch["json"][n]) == (
                expected["bucket"], expected["caption"], expected["json"],
            )  # fmt: skip
            for name in ("dinov3", "vae", "t5h", "t5m"):
                np.testing.assert_array_equal(batch[name][n].numpy(), expected[name], strict=True)


def test_shapes_and_dtypes_are_those_of_the_docstring(dataset):
    batch = next(iter(dataset(2, latents="crop", members=("json", "vae", "t5h", "t5m", "dinov3"))))

    square = batch["bucket"] == "1024x1024"
    assert (batch["vae"].dtype, batch["vae"].shape) == (
        torch.float16,
        (2, 16, 128, 128) if square else (2, 16, 104, 152),
    )
    assert (batch["t5h"].dtype, batch["t5h"].shape) == (torch.float16, (2, 77, 1024))
    assert (batch["t5m"].dtype, batch["t5m"].shape) == (torch.uint8, (2, 77))
    assert (batch["dinov3"].dtype, batch["dinov3"].shape) == (torch.float32, (2, 1024))


def test_only_members_asked_for_are_delivered(dataset):
    batch = next(iter(dataset(members=("t5h",))))

    assert set(batch) == {"epoch", "step", "bucket", "image_id", "original_size", "crop_box", "t5h"}


def test_latents_as_stored_come_as_a_list_whatever_their_sizes(dataset):
    batches = list(dataset(4))

    assert all(isinstance(batch["vae"], list) for batch in batches)
    shapes = {i: tuple(z.shape) for batch in batches for i, z in zip(batch["image_id"], batch["vae"], strict=True)}
    assert shapes == {i: (16, height // 8, width // 8) for i, (width, height) in SIZES.items()}


@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_latents_fitted_to_the_bucket_have_one_shape_per_bucket(dataset, fit):
    shapes = {(batch["bucket"], tuple(batch["vae"].shape[1:])) for batch in dataset(3, latents=fit)}

    assert shapes == {("1024x1024", (16, 128, 128)), ("1216x832", (16, 104, 152))}


@pytest.mark.parametrize("fit", ["as_stored", "crop"])
def test_tensors_are_writable_without_a_warning(root, fit):
    """A tensor over the bytes that were read causes one warning by torch per process, and could modify them."""
    code = f"from imagemill.reading import ShardDataset; list(ShardDataset({str(root.shards)!r}, 2, latents={fit!r}))"
    ignored = "ignore:bucket_:UserWarning"  # of these small images, enlarged many times

    done = subprocess.run(
        [sys.executable, "-W", ignored, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("fit", ["as_stored", "crop"])
def test_sample_with_a_pax_header_gives_no_warning_in_a_worker(tmp_path, fit):
    """Its values are copied when the header is parsed; torch warns about tensors over read-only bytes."""
    root = shard_set(tmp_path / "data", {"日本": (64, 64), "x" * 120: (64, 64)})
    code = (
        "from imagemill.reading import ShardDataset; "
        f"list(ShardDataset({str(root.shards)!r}, 2, latents={fit!r}).loader(num_workers=1))"
    )
    ignored = "ignore:bucket_:UserWarning"  # of these small images, enlarged many times

    done = subprocess.run(
        [sys.executable, "-W", ignored, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_latent_without_a_value_is_reported_with_its_sample(own_root, monkeypatch):
    """A record of another program may describe an image with a side below 8 pixels."""
    monkeypatch.setattr(batches, "read_members", lambda *_: {"vae": np.zeros((16, 0, 12), np.float16)})

    as_stored = next(iter(ShardDataset(own_root.shards, 1, members=("vae",))))

    assert as_stored["vae"][0].shape == (16, 0, 12)
    for fit in ("crop", "resize"):
        with pytest.raises(
            ImagemillError, match=r"(?s)empty.*where: +\S*bucket_1024x1024, '[a-e]'.*\(16, 0, 12\).*withdraw"
        ):
            next(iter(ShardDataset(own_root.shards, 1, members=("vae",), latents=fit)))


def test_random_windows_are_others_each_epoch_and_the_same_for_the_same_seed(dataset):
    def windows(seed, epoch):
        random = dataset(11, latents="crop", crop="random", seed=seed, members=("vae",))
        random.set_epoch(epoch)
        return {
            i: z.numpy().tobytes() for batch in random for i, z in zip(batch["image_id"], batch["vae"], strict=True)
        }

    first, again, later, other = windows(1, 0), windows(1, 0), windows(1, 1), windows(2, 0)

    assert first == again
    assert first["large"] not in {later["large"], other["large"]}
    assert first["own"] == later["own"]  # there is no room for a choice


def test_normalized_latents_are_shifted_and_scaled_as_the_manifest_says(dataset):
    plain = {i: z for batch in dataset() for i, z in zip(batch["image_id"], batch["vae"], strict=True)}

    for batch in dataset(normalized=True):
        for image_id, z in zip(batch["image_id"], batch["vae"], strict=True):
            expected = (plain[image_id].float() - FACTORS["shift_factor"]) * FACTORS["scaling_factor"]
            assert z.dtype == torch.float32
            torch.testing.assert_close(z, expected)


def test_normalizing_by_unknown_factors_is_refused_at_once(own_root):
    bucket = own_root.shards / "bucket_1024x1024"
    change_manifest(bucket, provenance={"vae_latents": {"facts": None}})

    with pytest.raises(ImagemillError, match="does not record how"):
        ShardDataset(own_root.shards, 2, normalized=True)


# ---- workers and ranks


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loader_delivers_the_plan_in_order_with_any_number_of_workers(dataset, workers):
    expected = ids(dataset())

    assert ids(dataset().loader(num_workers=workers)) == expected


@pytest.mark.parametrize("fit", ["as_stored", "crop"])
def test_values_are_the_same_from_a_worker(dataset, fit):
    """In workers tensors are built in shared memory; either way the trainer may modify them."""
    in_process, from_workers = (
        list(batches) for batches in (dataset(latents=fit), dataset(latents=fit).loader(num_workers=2))
    )

    for expected, batch in zip(in_process, from_workers, strict=True):
        for name in ("vae", "t5h", "t5m"):
            torch.testing.assert_close(batch[name], expected[name], rtol=0, atol=0)
            batch[name][0].zero_()


def test_worker_that_is_started_afresh_delivers_the_same(dataset):
    """With start method `spawn` the dataset is pickled, and workers inherit nothing."""
    expected = ids(dataset(rank=1, world_size=2))

    assert ids(dataset(rank=1, world_size=2).loader(num_workers=2, multiprocessing_context="spawn")) == expected


def test_every_sample_comes_once_over_ranks_and_real_workers(dataset):
    batches = [
        batch for rank in range(2) for batch in dataset(rank=rank, world_size=2, members=("t5m",)).loader(num_workers=2)
    ]

    assert sorted(i for batch in batches for i in batch["image_id"]) == sorted(SIZES)


def test_pipeline_is_a_webdataset_pipeline_for_any_data_loader(dataset):
    pipeline = dataset().pipeline().compose(webdataset.map(lambda batch: batch["image_id"]))

    delivered = torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=0)

    assert isinstance(pipeline, webdataset.DataPipeline)
    assert list(delivered) == [batch["image_id"] for batch in dataset()]


def test_ranks_are_read_from_the_environment_of_torchrun(root, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")

    assert ids(ShardDataset(root.shards, 1)) == ids(ShardDataset(root.shards, 1, rank=1, world_size=3))
    assert ids(ShardDataset(root.shards, 1)) != ids(ShardDataset(root.shards, 1, rank=0, world_size=1))


def test_ranks_are_those_of_an_initialised_process_group(root, tmp_path):
    """torch.distributed without environment variables, also in workers that do not inherit the group."""
    code = f"""
import torch.distributed as dist
from imagemill.reading import ShardDataset
if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://{tmp_path}/rendezvous", rank=0, world_size=1)
    dist.get_world_size = lambda group=None: 2
    dist.get_rank = lambda group=None: 1
    dataset = ShardDataset({str(root.shards)!r}, 2)
    print(dataset.rank, dataset.plan.world_size)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)

    assert done.stdout == "1 2\n", done.stderr


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 0}, {"batch_size": 1.5}, {"seed": -1}, {"buffer": -1}, {"order": "sorted"}, {"tail": "keep"},
     {"latents": "squeeze"}, {"crop": "left"}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}],
    ids=str,
)  # fmt: skip
def test_bad_settings_are_refused_with_what_to_do(dataset, settings):
    with pytest.raises(WrongUsage, match="do: "):
        dataset(**settings)


def test_step_that_no_bucket_can_fill_is_reported(dataset):
    with pytest.raises(WrongUsage, match=r"(?s)no batch for rank 0.*a step takes 8 samples.*11 in all.*pad"):
        dataset(8, tail="drop")


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
def test_length_is_the_number_of_batches(dataset, tail):
    loaded = dataset(tail=tail)

    assert len(loaded) == len(loaded.loader()) == len(list(loaded))


@pytest.mark.parametrize(
    ("option", "message"),
    [({"batch_size": 2}, "give batch_size to ShardDataset"), ({"shuffle": True}, "choose order and seed"),
     ({"sampler": [0]}, "order and seed"), ({"batch_sampler": [[0]]}, "batch_size to ShardDataset"),
     ({"drop_last": True}, 'tail="drop"'), ({"collate_fn": list}, "change each batch as it comes"),
     ({"in_order": False}, "leave it out"), ({"num_workers": -1}, "at least 0")],
    ids=str,
)  # fmt: skip
def test_option_of_a_loader_that_the_dataset_decides_is_refused_with_what_to_do(dataset, option, message):
    """The error is not a TypeError, and the position is not silently lost."""
    with pytest.raises(WrongUsage, match=f"(?s){next(iter(option))}.*do: .*{message}"):
        dataset().loader(**option)


@pytest.mark.parametrize("settings", [{}, {"batch_size": None, "num_workers": 1}, {"shuffle": True}], ids=str)
def test_plain_data_loader_over_the_dataset_says_what_to_do(dataset, settings):
    """In its workers the position would be lost silently: the same order in every epoch, and no resume."""
    with pytest.raises(WrongUsage, match=r"(?s)dataset.loader\(.*dataset.pipeline\(\), batch_size=None"):
        next(iter(torch.utils.data.DataLoader(dataset(), **settings)))


# ---- position


def test_next_epoch_has_another_order_and_the_same_samples(dataset):
    once = dataset()
    first, second = list(once), list(once)

    assert {batch["epoch"] for batch in second} == {1}
    assert ids(first) != ids(second)
    assert sorted(i for b in first for i in b["image_id"]) == sorted(i for b in second for i in b["image_id"])


def test_rank_without_samples_in_the_last_step_goes_to_the_next_epoch_too(own_root):
    """Five samples, steps of four: the fifth belongs to the other rank."""
    short = ShardDataset(own_root.shards, 2, rank=0, world_size=2)

    assert [batch["epoch"] for batch in short] == [0]
    assert [batch["epoch"] for batch in short] == [1]


def test_repeat_goes_on_over_epochs_in_worker_processes_too(dataset):
    once = dataset()
    expected = ids(itertools.chain(once, once, once))[:14]

    assert ids(itertools.islice(dataset(repeat=True).loader(num_workers=2), 14)) == expected


@pytest.mark.parametrize(("workers", "again_with"), [(0, 0), (2, 0), (0, 2), (2, 1)])
def test_training_goes_on_at_every_step_as_if_uninterrupted(dataset, workers, again_with):
    """A state is loaded through JSON into another dataset, read by another number of workers."""
    settings = {"members": ("t5m",), "repeat": True}
    expected = ids(itertools.islice(dataset(**settings), 16))

    for taken in range(0, 13, 1 if workers == again_with == 0 else 4):
        first = dataset(**settings)
        before = ids(itertools.islice(first.loader(num_workers=workers), taken))
        state = json.loads(json.dumps(first.state_dict()))
        second = dataset(**settings)
        second.load_state_dict(state)
        after = ids(itertools.islice(second.loader(num_workers=again_with), 16 - taken))

        assert before + after == expected


def test_state_in_the_loop_counts_the_batch_in_hand(dataset):
    running = dataset()
    states = [running.state_dict() for _ in running]

    assert [(state["epoch"], state["step"]) for state in states] == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 0)]


def test_going_on_reads_no_tar_of_what_went_before(own_root):
    whole = ShardDataset(own_root.shards, 1, buffer=0)
    batches = ids(whole)
    first_tar = ShardSet.open(own_root.shards)._places[batches[0][3][0]][1].shard
    kept = [batch for batch in batches if ShardSet.open(own_root.shards)._places[batch[3][0]][1].shard != first_tar]
    again = ShardDataset(own_root.shards, 1, buffer=0)
    again.load_state_dict({**again.state_dict(), "step": len(batches) - len(kept)})

    (own_root.shards / "bucket_1024x1024" / first_tar).unlink()

    assert ids(again) == kept


def test_state_goes_on_with_other_ranks_where_a_step_has_the_same_samples(dataset):
    two = dataset(2, rank=0, world_size=2)
    steps = [batch["step"] for batch in itertools.islice(two, 2)]
    one = dataset(4, rank=0, world_size=1)

    one.load_state_dict(two.state_dict())

    assert steps == [0, 1]
    assert ids(one) == [batch for batch in ids(dataset(4)) if batch[1] >= 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 5}, "seed was 0, now 5"), ({"batch_size": 3}, "global_batch was 2, now 3"),
     ({"order": "permutation"}, "order was stream, now permutation"), ({"tail": "pad"}, "tail was short, now pad"),
     ({"buffer": 7}, "buffer was 1000, now 7"), ({"world_size": 2, "rank": 0}, "global_batch was 2, now 4")],
    ids=str,
)  # fmt: skip
def test_state_of_another_plan_is_refused(dataset, changes, message):
    state = dataset(order="stream").state_dict()

    with pytest.raises(WrongUsage, match=rf"(?s)another plan: {message}.*set_epoch"):
        dataset(**changes).load_state_dict(state)


@pytest.mark.parametrize("absent", [(), ("order",), ("order", "buffer")], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_state_of_an_earlier_release_continues_in_its_own_order(dataset, absent, workers):
    """Its default order was `stream`."""
    earlier = dataset(order="stream")
    expected = ids(itertools.chain(earlier, earlier))
    samples = dataset().state_dict()["samples"]
    state = {
        "epoch": 0, "step": 2, "seed": 0, "order": "stream", "buffer": 1000, "tail": "short", "global_batch": 2,
        "samples": samples,
    }  # fmt: skip
    now = dataset()

    now.load_state_dict({name: value for name, value in state.items() if name not in absent})

    assert now.state_dict() == state
    assert ids(itertools.chain(now.loader(num_workers=workers), now.loader(num_workers=workers))) == expected[2:]
    with pytest.raises(WrongUsage, match="order was stream, now permutation"):
        dataset(order="permutation").load_state_dict(state)


def test_state_continues_in_its_own_order_and_buffer(dataset):
    state = dataset(buffer=0).state_dict()
    now = dataset()
    permuted = ids(dataset())

    now.load_state_dict(state)

    assert (state["order"], state["buffer"]) == ("stream", 0)
    assert ids(now) == ids(dataset(order="stream", buffer=0)) != permuted


def test_refused_state_changes_nothing(dataset):
    now = dataset()
    expected = ids(dataset())

    for state in ({**dataset(seed=5, order="stream").state_dict(), "step": 3}, {**now.state_dict(), "order": "sorted"}):
        with pytest.raises(WrongUsage, match="another plan"):
            now.load_state_dict(state)

    assert ids(now) == expected


def test_samples_are_permuted_unless_a_buffer_is_given(dataset):
    permuted, streamed = ids(dataset(order="permutation")), ids(dataset(order="stream", buffer=0))

    assert ids(dataset()) == permuted != streamed
    assert ids(dataset(buffer=0)) == streamed


def test_state_of_another_set_of_samples_is_refused(own_root):
    """Withdrawing one sample moves every later position."""
    state = ShardDataset(own_root.shards, 2).state_dict()
    bury(own_root.shards / "bucket_1024x1024", "c")

    with pytest.raises(WrongUsage, match="another plan: samples was"):
        ShardDataset(own_root.shards, 2).load_state_dict(state)


def test_state_of_other_contents_in_the_same_places_is_refused(own_root):
    """The values of a file change but not its length, and the set is repacked."""
    state = ShardDataset(own_root.shards, 2).state_dict()
    publish(own_root, "replace")
    ShardDataset(own_root.shards, 2).load_state_dict(state)  # the same samples: the same set
    change_values(own_root, "c")
    publish(own_root, "replace")

    with pytest.raises(WrongUsage, match="another plan: samples was"):
        ShardDataset(own_root.shards, 2).load_state_dict(state)


def test_epoch_can_be_chosen(dataset):
    once = dataset()
    list(once)
    expected = ids(once)
    other = dataset()

    other.set_epoch(1)

    assert ids(other) == expected


# ---- beside it


def test_tars_are_read_by_plain_webdataset_too(root, dataset):
    expected = {i: z for batch in dataset() for i, z in zip(batch["image_id"], batch["vae"], strict=True)}

    tars = [str(path) for path in sorted(root.shards.glob("bucket_*/*.tar"))]
    plain = webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).decode()

    found = {sample["json"]["image_id"]: sample["vae.npy"] for sample in plain}
    assert found.keys() == expected.keys()
    for image_id, latent in found.items():
        np.testing.assert_array_equal(latent, expected[image_id].numpy())


def test_importing_the_reader_loads_no_heavy_library():
    code = (
        "import sys, imagemill.reading; print(sorted({'torch', 'webdataset', 'dagster', 'pandas'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


def test_batches_of_one_bucket_name_the_bucket_of_its_manifest(root):
    folder = root.shards / "bucket_1216x832"

    assert {batch["bucket"] for batch in ShardDataset(folder, 2)} == {read_json(folder / "manifest.json")["bucket"]}
