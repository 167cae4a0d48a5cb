"""Layouts that imagemill did not write, and equal bytes wherever and however they are packed.

Spec: docs/spec/conventions.md#adoption
"""

import io
import json
import os
import shutil

import numpy as np
import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.tar import read_shard
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.pipeline.shards.shard_sets import read_manifest
from imagemill.store.ledger import Ledger
from tests.helpers.product import imagemill, snapshot
from tests.helpers.shard_runs import SQUARE, TALL, ids_packed, packed_here, tars, written
from tests.helpers.spec_runs import product
from tests.helpers.stage2 import foreign, record_of

MASK = [1] * 5 + [0] * 72
WIDTH, HEIGHT = 28, 29  # not multiples of 8: latents are cropped to (16, 3, 3)

# Records as five other programs spell them: the same eight fields in another order, with spaces, escapes, their own fields.
FIELDS = {
    "aspect_bucket": SQUARE, "width": WIDTH, "height": HEIGHT, "t5_attention_mask": MASK, "format_version": 2,
}  # fmt: skip
RECORDS = {
    "plain": {"caption": "a plain one", "image_path": "data/approved/plain.jpg"},
    "spaced": {"caption": "spaces  and\ttabs stay\n", "image_path": "/mnt/elsewhere/pictures/spaced.JPG"},
    "cjk": {"caption": "猫が座っている \U0001f408 “quoted” \\ \u2028", "image_path": "other-prefix/猫.webp"},
    "extra": {"caption": "fields of its own", "image_path": "./extra.png", "score": 0.1, "tags": ["a", {"b": None}]},
    "unversioned": {"caption": "before there was a version", "image_path": "x\\unversioned.png"},
    "ünïcode.with dots": {"caption": "an id of its own", "image_path": "data/approved/ünïcode.with dots.jpg"},
}
SPELLINGS = {
    "plain": {"separators": (",", ":")},
    "spaced": {"separators": (" , ", " : ")},
    "cjk": {"ensure_ascii": True},
    "extra": {"ensure_ascii": False, "sort_keys": True},
    "unversioned": {},
    "ünïcode.with dots": {"ensure_ascii": False},
}


def record(image_id):
    fields = {**RECORDS[image_id], **FIELDS, "image_id": image_id}
    if image_id == "unversioned":
        del fields["format_version"]
    return fields


def npy(array, version):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version)
    return buffer.getvalue()


@pytest.fixture
def other(tmp_path):
    """Written by numpy and json alone: no images, no ledger, header versions in turn, CRLF and blank lines between records."""
    root = DataRoot(tmp_path / "data")
    random = np.random.default_rng(0)
    for spec in (DINOV3, VAE, T5):
        (root.derived / spec.folder).mkdir(parents=True)
        for n, image_id in enumerate(RECORDS):
            values = random.normal(size=spec.shape(HEIGHT, WIDTH)).astype(spec.dtype)
            (root.derived / spec.folder / f"{image_id}.npy").write_bytes(npy(values, [(1, 0), (2, 0), (3, 0)][n % 3]))
    lines = [json.dumps(record(i), **how).encode() for i, how in SPELLINGS.items()]
    root.stage2_jsonl.write_bytes(b"\r\n\n".join(lines))  # no newline at the end
    return root


@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_layout_of_another_program_is_packed_verbatim(other):
    """By the command itself, in a data root where nothing has run; and the checks that follow it pass."""
    done = imagemill("shards", "--data-root", other.path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "total_records=6 ready_records=6 skipped_incomplete=0 filtered=0 written_samples=6 written_shards=1"
    )
    samples = dict(zip(RECORDS, (members for _, members in read_shard(tars(other, SQUARE)[0])), strict=True))
    for image_id, members in samples.items():
        assert json.loads(members["json"]) == record(image_id)
        for spec in embedding_specs():
            assert members[spec.member] == (other.derived / spec.folder / f"{image_id}.npy").read_bytes()
        assert np.load(io.BytesIO(members["vae.npy"])).shape == (16, 3, 3)
    with Ledger(other.ledger) as ledger:
        assert {row.model_key for spec in embedding_specs() for row in ledger.files(spec.kind).values()} == {"unknown"}


@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_layout_of_another_program_is_reported_what_is_wrong_with_it(other):
    """Values in Fortran order would be read transposed by who skips the header; a file in other bytes is its owner's to mend."""
    latent = other.derived / VAE.folder / "plain.npy"
    np.save(latent, np.asfortranarray(np.ones((16, 3, 3), np.float16)))
    hidden = other.derived / T5.folder / "spaced.npy"
    np.save(hidden, np.load(hidden).astype(np.float32))

    said = product(other, "shards")

    assert "ready_records=4 skipped_incomplete=2" in said
    with Ledger(other.ledger) as ledger:
        assert {p.item: p.reason for p in ledger.problems()} == {"plain": "fortran_order", "spaced": "wrong_dtype"}


# ---- equal bytes


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Nine samples in two buckets. Read only."""
    root = DataRoot(tmp_path_factory.mktemp("source") / "data")
    foreign(
        root,
        *(record_of(f"square{n}", size=(24, 24)) for n in range(6)),
        *(record_of(f"tall{n}", size=(24, 36)) for n in range(3)),
    )
    return root


@pytest.mark.parametrize("flags", [{}, {"shuffle": "yes", "seed": 42, "limit": 8}], ids=["in order", "shuffled"])
def test_same_inputs_and_seed_give_the_same_checksums_everywhere(source, tmp_path, flags):
    """On 1 and on 2 workers, in two directories, with other modification times: tars, indexes and manifests."""
    copy = DataRoot(tmp_path / "copy" / "elsewhere")
    shutil.copytree(source.derived, copy.derived)
    for n, path in enumerate(copy.derived.rglob("*.npy")):
        os.utime(path, ns=(n, 10**18 + n))
        path.chmod(0o600)

    for root, workers in ((source, 1), (copy, 2)):
        output = str(tmp_path / f"by_{workers}")
        assert packed_here(root, workers=workers, shard_size=2, output_dir=output, **flags).success

    one, two = written(tmp_path / "by_1"), written(tmp_path / "by_2")
    assert one == two
    assert {name.rpartition("/")[2].rpartition(".")[2] for name in one} >= {"tar", "jsonl", "json"}
    for bucket in (SQUARE, TALL):
        manifest = read_manifest(tmp_path / "by_2" / f"bucket_{bucket}")
        assert manifest
        assert [shard.checksum for shard in manifest.shards] == [
            fingerprint_file(tar) for tar in tars(tmp_path / "by_1", bucket)
        ]
        assert len(manifest.shards) > 1


def test_touched_files_do_not_make_another_set(source, tmp_path):
    """Nothing is rewritten where only times changed: the set's digest is of contents."""
    root = DataRoot(tmp_path / "data")
    shutil.copytree(source.derived, root.derived)
    assert packed_here(root).success
    before = snapshot(root.shards)
    for path in root.derived.rglob("*.npy"):
        os.utime(path)

    assert packed_here(root).success
    assert snapshot(root.shards) == before
    assert ids_packed(root, TALL) == [["tall0", "tall1", "tall2"]]
