"""Shards read back by three clients that we did not write: `webdataset`, Hugging Face `datasets`, Megatron-Energon.

Every member of every sample must come out as the npy file and the record that went in, also of odd ids, and after appending.

"""

import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
import webdataset

from imagemill.domain.buckets import BUCKETS, assign_bucket
from imagemill.domain.embedding_specs import T5, VAE, embedding_specs
from imagemill.domain.ids import id_of_member_key, member_key
from imagemill.formats.energon import META, METADATASET, SQLITE
from imagemill.pipeline.shards.shard_card import write_card, write_metadataset
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from tests.helpers.shard_sets import shard_set
from tests.helpers.stage2 import ready

SQUARE, TALL = "1024x1024", "704x1344"
# Keys with dots, braces, other alphabets, more than the 100 bytes of a tar header; latents of several shapes.
SIZES = {
    "a.b": (64, 64), "c{1,2}": (72, 64), "日本": (64, 72), "x" * 120: (64, 64), "7": (64, 64), "changed": (64, 64),
    "withdrawn": (64, 64), "tall": (32, 64), "taller": (32, 72),
}  # fmt: skip
WITHDRAWN, CHANGED = "withdrawn", "changed"
LIVE = set(SIZES) - {WITHDRAWN}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two buckets, four tars. Read only."""
    root = shard_set(tmp_path_factory.mktemp("readback"), SIZES)
    _tell(root)
    return root


@pytest.fixture(scope="module")
def appended(tmp_path_factory):
    """The same, then one sample withdrawn and one changed: two tombstones, one key in two tars. Read only."""
    root = shard_set(tmp_path_factory.mktemp("appended"), SIZES)
    np.save(root.derived / VAE.folder / f"{CHANGED}.npy", np.ones((16, 8, 8), VAE.dtype))
    left = [sample for sample in ready(root, BUCKETS).ready if sample.image_id != WITHDRAWN]
    plans = plan_shards(
        left, list(BUCKETS), root.shards, ShardParameters(shard_size=3), "append", withdrawn={WITHDRAWN}
    )
    for plan in plans.plans:
        write_bucket(plans, plan, root.derived, {})
    _tell(root)
    return root


def _tell(root):
    write_card(root.shards)
    write_metadataset(root.shards)


def records(root):
    lines = [json.loads(line) for line in root.stage2_jsonl.read_text().splitlines()]
    return {record["image_id"]: record for record in lines}


def tars(root, bucket="*"):
    return sorted(map(str, root.shards.glob(f"bucket_{bucket}/*.tar")))


def check_sample(root, sample):
    """Members by their names in the tar, as arrays or lists of numbers; returns the sample's id."""
    image_id = sample["json"]["image_id"]
    record = records(root)[image_id]
    assert sample["__key__"] == member_key(image_id)
    assert sample["json"] == record
    for spec in embedding_specs():
        expected = np.load(root.derived / spec.folder / f"{image_id}.npy")
        found = np.asarray(sample[spec.member], expected.dtype)
        assert expected.shape == found.shape
        assert expected.tobytes() == found.tobytes()
    assert record["t5_attention_mask"] == np.asarray(sample["t5m.npy"]).tolist()
    return image_id


# ---- webdataset


def test_webdataset_decodes_every_member_as_it_was_stored(root):
    samples = list(webdataset.WebDataset(tars(root), shardshuffle=False).decode())

    assert Counter(check_sample(root, sample) for sample in samples) == Counter(list(SIZES))
    assert {sample["vae.npy"].dtype.name for sample in samples} == {"float16"}
    assert {sample["t5m.npy"].dtype.name for sample in samples} == {"uint8"}
    assert {id_of_member_key(sample["__key__"]) for sample in samples} == set(SIZES)


# ---- Hugging Face datasets


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed: pip install '.[dev]'")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


@pytest.mark.parametrize("streaming", [True, False])
def test_datasets_reads_tars_by_name(root, datasets, streaming):
    """Offline: conftest sets HF_HUB_OFFLINE."""
    rows = datasets.load_dataset("webdataset", data_files={"train": tars(root)}, split="train", streaming=streaming)

    assert Counter(check_sample(root, row) for row in rows) == Counter(list(SIZES))
    assert rows.features["vae.npy"].feature.feature.feature.dtype == "float16"


def test_datasets_reads_the_folder_by_its_card(root, datasets):
    """The card's front matter names all buckets together, and each."""
    everything = datasets.load_dataset(str(root.shards), split="train", streaming=True)
    tall = datasets.load_dataset(str(root.shards), TALL, split="train", streaming=True).with_format("numpy")

    assert Counter(check_sample(root, row) for row in everything) == Counter(list(SIZES))
    assert [row["json"]["image_id"] for row in tall] == ["tall", "taller"]


# ---- Megatron-Energon


@pytest.fixture
def energon():
    return pytest.importorskip("megatron.energon", reason="megatron-energon is not installed: pip install '.[dev]'")


def crude_samples(energon, path, *, batch_size=1, limit=None, **options):
    """Batches of one epoch, or the first few, as lists of the members' dicts; one shape in a batch."""

    @energon.stateless
    def cook(sample):
        return Cooked(**energon.basic_sample_keys(sample), members=dict(sample))

    @energon.edataclass
    class Cooked(energon.Sample):
        members: dict

    class Encoder(energon.TaskEncoder):
        cookers = [energon.Cooker(cook)]  # noqa: RUF012

        def encode_sample(self, sample):
            return sample

        def batch_group_criterion(self, sample):
            return sample.__subflavors__["bucket"], batch_size

        def batch(self, samples):
            return [sample.members for sample in samples]

    dataset = energon.get_train_dataset(
        path, task_encoder=Encoder(), worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=None, shuffle_buffer_size=4, max_samples_per_sequence=None, **options,
    )  # fmt: skip
    return [batch for batch, _ in zip(energon.get_loader(dataset), range(limit or 10**6), strict=False)]


def test_energon_mounts_a_bucket_as_it_is(root, energon):
    """No `energon prepare`: every sample once an epoch, every member as it was stored."""
    batches = crude_samples(energon, root.shards / f"bucket_{SQUARE}", repeat=False)

    square = [image_id for image_id, size in SIZES.items() if assign_bucket(*size) == SQUARE]
    assert Counter(check_sample(root, sample) for batch in batches for sample in batch) == Counter(square)


def test_energon_passes_over_tombstones(appended, energon):
    """Of a changed sample's two places in the tars, the one that counts."""
    batches = crude_samples(energon, appended.shards / f"bucket_{SQUARE}", repeat=False)

    expected = [image_id for image_id in LIVE if assign_bucket(*SIZES[image_id]) == SQUARE]
    assert Counter(check_sample(appended, sample) for batch in batches for sample in batch) == Counter(expected)


def test_energon_blends_buckets_in_batches_of_one(appended, energon):
    """metadataset.yaml; `batch_group_criterion` by the subflavor that dataset.yaml gives."""
    batches = crude_samples(energon, appended.shards / METADATASET, batch_size=2, limit=40)

    assert {len(batch) for batch in batches} == {2}
    assert {len({assign_bucket(s["json"]["width"], s["json"]["height"]) for s in batch}) for batch in batches} == {1}
    assert {check_sample(appended, sample) for batch in batches for sample in batch} == LIVE


def test_energon_reads_every_sample_of_all_buckets_once(root, energon):
    """metadataset.yaml with `repeat=False`, as for an evaluation."""
    batches = crude_samples(energon, root.shards / METADATASET, repeat=False)

    assert Counter(check_sample(root, sample) for batch in batches for sample in batch) == Counter(list(SIZES))


def test_energon_finds_samples_by_key(appended, energon):
    """index.sqlite, as joins and auxiliary datasets use it."""
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath

    store = WebdatasetFileStore(EPath(appended.shards / f"bucket_{SQUARE}"))

    for image_id in (CHANGED, "a.b", "日本", "x" * 120):
        for spec in (VAE, T5):
            file = appended.derived / spec.folder / f"{image_id}.npy"
            assert file.read_bytes() == store[f"{member_key(image_id)}.{spec.member}"][0]
    with pytest.raises(KeyError):
        store[f"{WITHDRAWN}.vae.npy"]


def test_energons_own_prepare_writes_the_same(root, energon, tmp_path):
    """`energon prepare` over the bare tars: equal `.idx` bytes, rows and counts."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    ours = root.shards / f"bucket_{SQUARE}"
    names = sorted(path.name for path in ours.glob("*.tar"))
    for name in names:
        shutil.copy(ours / name, tmp_path / name)
    WebdatasetPreparator.prepare_dataset(EPath(tmp_path), names, split_parts_ratio=[("train", 1.0)], workers=1)

    assert [(tmp_path / f"{name}.idx").read_bytes() for name in names] == [
        (ours / f"{name}.idx").read_bytes() for name in names
    ]
    assert _tables(tmp_path) == _tables(ours)
    counts = [json.loads((folder / META / ".info.json").read_text())["shard_counts"] for folder in (tmp_path, ours)]
    assert counts[0] == counts[1]


def _tables(folder):
    with closing(sqlite3.connect(folder / META / SQLITE)) as database:
        return {
            name: sorted(database.execute(f"SELECT * FROM {name}").fetchall())
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
