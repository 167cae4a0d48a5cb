"""Every scenario of the WebDataset shards: one test each, named after it.

Inputs are laid down as another program would write them (tests/helpers/stage2.py); shards are made by the asset, by run
configuration as the UI gives it, or by the command. A docstring names a departure from the original specification.
Depth is elsewhere: tests/pipeline, tests/io_managers, tests/cli.
Spec: docs/spec/shards.md#limits, docs/spec/shards.md#shard-counters, docs/spec/shards.md#duplicate-ids
"""

import io
import json
import logging
import tarfile
from itertools import chain

import numpy as np
import pytest

from imagemill.config import Config
from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import VAE, embedding_specs
from imagemill.domain.layout import DataRoot
from imagemill.formats.tar import read_shard
from imagemill.pipeline.shards.conflicts import refuse_conflicts
from imagemill.pipeline.shards.packing import PackRequest, plan_packing
from imagemill.pipeline.shards.shard_plan import PackPlan
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.store.ledger import Ledger
from tests.helpers.product import snapshot
from tests.helpers.shard_runs import (
    SQUARE,
    TALL,
    bucket_folders,
    counted,
    ids_packed,
    packed_here,
    planned_values,
    sizes_planned,
    tars,
    written,
)
from tests.helpers.spec_runs import product
from tests.helpers.stage2 import foreign, record_of, write_text

SIZES = {SQUARE: (24, 24), TALL: (24, 36)}
LAST_LINE = "total_records={} ready_records={} skipped_incomplete={} filtered={} written_samples={} written_shards={}"


def records(count, bucket=SQUARE, prefix="i"):
    return [record_of(f"{prefix}{n:05d}", size=SIZES[bucket]) for n in range(count)]


@pytest.fixture
def mixed(data_root):
    """Four square samples and two tall ones, in turns; nothing but records and npy files."""
    squares, talls = records(4), records(2, TALL, "tall")
    foreign(data_root, squares[0], talls[0], *squares[1:3], talls[1], squares[3])
    return data_root


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    """A hundred samples in tars of one each. Read only."""
    root = DataRoot(tmp_path_factory.mktemp("hundred") / "data")
    foreign(root, *records(100, TALL))
    assert packed_here(root, shard_size=1).success
    return root


# ---- load Stage 2 metadata and validate readiness


def test_complete_sample_is_identified_as_ready(data_root):
    """Load Stage 2 metadata: Complete sample is identified as ready."""
    foreign(data_root, record_of("complete"))

    result = packed_here(data_root)

    assert counted(data_root, result) == {
        "total_records": 1,
        "ready_records": 1,
        "skipped_incomplete": 0,
        "filtered": 0,
    }
    assert ids_packed(data_root, record_of("complete")["aspect_bucket"]) == [["complete"]]


def test_incomplete_sample_is_skipped(data_root):
    """Load Stage 2 metadata: Incomplete sample is skipped. Without a caption, with a bad mask, without a file of each kind."""
    incomplete = [
        record_of("no_caption", caption=" "),
        record_of("no_mask", t5_attention_mask=None),
        record_of("short_mask", t5_attention_mask=[1] * 76),
        record_of("odd_mask", t5_attention_mask=[2] * 77),
        *(record_of(f"no_{spec.kind}", size=(24, 24)) for spec in embedding_specs()),
    ]
    foreign(data_root, record_of("complete", size=(24, 24)), *incomplete)
    for spec in embedding_specs():
        (data_root.derived / spec.folder / f"no_{spec.kind}.npy").unlink()

    result = packed_here(data_root)

    assert counted(data_root, result) == {
        "total_records": 8,
        "ready_records": 1,
        "skipped_incomplete": 7,
        "filtered": 0,
    }
    assert ids_packed(data_root, SQUARE) == [["complete"]]


def test_malformed_jsonl_line_is_skipped_gracefully(data_root, caplog):
    """Load Stage 2 metadata: Malformed JSONL line is skipped gracefully. Logged with its line number; the next ones count."""
    foreign(data_root, *records(2))
    first, second = data_root.stage2_jsonl.read_bytes().splitlines()
    write_text(data_root.stage2_jsonl, first, b'{"image_id": "torn', b"\xff\xfe", second)

    with caplog.at_level(logging.WARNING):
        result = packed_here(data_root)

    assert counted(data_root, result) == {
        "total_records": 4,
        "ready_records": 2,
        "skipped_incomplete": 2,
        "filtered": 0,
    }
    for number in (2, 3):
        assert f"{data_root.stage2_jsonl.name}:{number} is skipped" in caplog.text
    assert ids_packed(data_root, SQUARE) == [["i00000", "i00001"]]


# ---- group samples by aspect ratio bucket


def test_samples_are_grouped_by_bucket(mixed):
    """Group samples: Samples are grouped by bucket."""
    assert packed_here(mixed).success

    assert ids_packed(mixed, SQUARE) == [["i00000", "i00001", "i00002", "i00003"]]
    assert ids_packed(mixed, TALL) == [["tall00000", "tall00001"]]
    assert bucket_folders(mixed.shards) == [f"bucket_{SQUARE}", f"bucket_{TALL}"]


def test_bucket_filter_restricts_output(mixed):
    """Group samples: Bucket filter restricts output. By the command, and as a partition in the UI."""
    said = product(mixed, "shards", "--bucket", SQUARE)

    assert said.splitlines()[-1] == LAST_LINE.format(6, 4, 0, 2, 4, 1)
    assert bucket_folders(mixed.shards) == [f"bucket_{SQUARE}"]
    by_command = snapshot(mixed.shards / f"bucket_{SQUARE}")
    assert packed_here(mixed, TALL).success
    assert ids_packed(mixed, TALL) == [["tall00000", "tall00001"]]
    assert snapshot(mixed.shards / f"bucket_{SQUARE}") == by_command


# ---- WebDataset naming convention


def test_tar_entry_contains_all_five_files(data_root):
    """Tar shards: Tar entry contains all five files. Adjacent, in the specified order, read by `tarfile`."""
    foreign(data_root, record_of("abc123", size=(24, 24)), record_of("def456", size=(24, 24)))
    packed_here(data_root)

    (tar,) = tars(data_root, SQUARE)
    with tarfile.open(tar) as opened:
        names = opened.getnames()
    suffixes = ["json", "dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy"]
    assert names == [f"{image_id}.{suffix}" for image_id in ("abc123", "def456") for suffix in suffixes]


def test_json_metadata_includes_required_fields(data_root):
    """Tar shards: JSON metadata includes required fields. The whole record, with its extra fields."""
    record = record_of("abc123", size=(24, 24), caption='Ein Fuß, 足, "quoted"', score=0.5)
    foreign(data_root, record)
    packed_here(data_root)

    ((_, members),) = read_shard(tars(data_root, SQUARE)[0])
    assert json.loads(members["json"]) == record
    assert {"image_id", "aspect_bucket", "caption", "image_path", "height", "width"} <= record.keys()


def test_t5_attention_mask_is_saved_as_npy(data_root):
    """Tar shards: T5 attention mask is saved as .npy. uint8, as `np.load` reads it."""
    record = record_of("abc123", size=(24, 24), caption="three words here")
    foreign(data_root, record)
    packed_here(data_root)

    ((_, members),) = read_shard(tars(data_root, SQUARE)[0])
    mask = np.load(io.BytesIO(members["t5m.npy"]))
    assert (mask.dtype, mask.shape) == (np.uint8, (77,))
    assert mask.tolist() == record["t5_attention_mask"]
    assert 0 < mask.sum() < 77


# ---- output directory


def test_bucket_directory_is_created(data_root, tmp_path):
    """Output directory: Bucket directory is created. Below `shards/`, or below a folder that is not there yet."""
    foreign(data_root, *records(1, TALL))
    output = tmp_path / "not" / "yet"

    packed_here(data_root)
    assert bucket_folders(data_root.shards) == ["bucket_832x1216"]
    packed_here(data_root, output_dir=str(output))
    assert bucket_folders(output) == ["bucket_832x1216"]


def test_shard_files_use_zero_padded_naming(hundred):
    """Output directory: Shard files use zero-padded naming."""
    names = [tar.name for tar in tars(hundred, TALL)]

    assert len(names) == 100
    assert (names[0], names[1], names[99]) == ("shard-000000.tar", "shard-000001.tar", "shard-000099.tar")


# ---- samples per shard


def test_single_shard_for_small_bucket():
    """Samples per shard: Single shard for small bucket. The plan alone: 800 values, no file."""
    assert sizes_planned(planned_values(800), SQUARE) == [800]


def test_multiple_shards_for_large_bucket(hundred, tmp_path):
    """Samples per shard: Multiple shards for large bucket. 2,500 as a plan; a hundred with 40 to a tar as files."""
    assert sizes_planned(planned_values(2500), SQUARE) == [1000, 1000, 500]

    assert packed_here(hundred, shard_size=40, output_dir=str(tmp_path / "forty")).success
    found = sorted((tmp_path / "forty" / f"bucket_{TALL}").glob("*.tar"))
    assert [tar.name for tar in found] == ["shard-000000.tar", "shard-000001.tar", "shard-000002.tar"]
    assert [sum(1 for _ in read_shard(tar)) for tar in found] == [40, 40, 20]


# ---- sample count limit


def test_limit_restricts_total_output(mixed):
    """Sample count limit: Limit restricts total output. 100 of 5,000 as a plan; over all buckets, not in each, as files."""
    planned = planned_values(2500, TALL, offset=1) + planned_values(2500, SQUARE)
    assert sum(sizes_planned(planned, *BUCKETS, limit=100)) == 100

    said = product(mixed, "shards", "--limit", 3)

    assert said.splitlines()[-1] == LAST_LINE.format(6, 6, 0, 0, 3, 2)
    assert (ids_packed(mixed, SQUARE), ids_packed(mixed, TALL)) == ([["i00000", "i00001"]], [["tall00000"]])


def test_limit_applies_after_shuffle(hundred, tmp_path):
    """Sample count limit: Limit applies after shuffle. The first ten of the shuffled hundred, not a shuffle of the first ten."""
    every, ten = tmp_path / "every", tmp_path / "ten"
    packed_here(hundred, shuffle="yes", output_dir=str(every))
    packed_here(hundred, shuffle="yes", limit=10, output_dir=str(ten))

    (shuffled,) = ids_packed(every, TALL)
    assert ids_packed(ten, TALL) == [shuffled[:10]]
    assert set(shuffled[:10]) != {f"i{n:05d}" for n in range(10)}


# ---- shuffle mode


def test_shuffle_produces_different_order(hundred, tmp_path):
    """Shuffle mode: Shuffle produces different order. The same samples; over several tars too."""
    packed_here(hundred, shuffle="yes", shard_size=30, output_dir=str(tmp_path))

    in_order = list(chain(*ids_packed(hundred, TALL)))
    shuffled = list(chain(*ids_packed(tmp_path, TALL)))
    assert in_order == sorted(in_order)
    assert shuffled != in_order
    assert sorted(shuffled) == in_order


def test_seed_ensures_reproducibility(hundred, tmp_path):
    """Shuffle mode: Seed ensures reproducibility. Equal bytes for equal seeds, another order for another seed."""
    for name, seed in (("one", 42), ("two", 42), ("other", 43)):
        packed_here(hundred, shuffle="yes", seed=seed, output_dir=str(tmp_path / name))

    assert written(tmp_path / "one") == written(tmp_path / "two")
    assert ids_packed(tmp_path / "one", TALL) != ids_packed(tmp_path / "other", TALL)


# ---- existing shards


def test_existing_shard_blocks_write(mixed):
    """Existing shards: Existing shard blocks write. A FileExistsError, which the command tells with the remedy: exit 1."""
    product(mixed, "shards", "--bucket", TALL)
    before = snapshot(mixed.shards)

    said = product(mixed, "shards", code=1)

    assert "bucket_832x1216/shard-000000.tar exists" in said
    assert "--overwrite" in said
    assert snapshot(mixed.shards) == before, "no bucket is written where one is refused"
    with pytest.raises(FileExistsError, match=r"shard-000000\.tar"):
        refuse_conflicts(conflicting(mixed))


def conflicting(root) -> PackPlan:
    with Ledger(root.ledger) as ledger:
        return plan_packing(Inventory(root), Config(), ledger, PackRequest(BUCKETS, root.shards, "refuse"))[1]


def test_overwrite_flag_allows_replacement(mixed):
    """Existing shards: Overwrite flag allows replacement. The whole set at once, no stale shard stays."""
    product(mixed, "shards", "--shard-size", 1)
    assert len(tars(mixed, SQUARE)) == 4

    product(mixed, "shards", "--overwrite", "--shard-size", 3)

    assert ids_packed(mixed, SQUARE) == [["i00000", "i00001", "i00002"], ["i00003"]]
    assert ids_packed(mixed, TALL) == [["tall00000", "tall00001"]]


# ---- dry-run mode


def test_dry_run_does_not_write_files(mixed):
    """Dry-run mode: Dry run does not write files. The counters are those of the run; not even a ledger is made."""
    before = snapshot(mixed.path)

    said = product(mixed, "shards", "--dry-run", "--shard-size", 2, "--limit", 5)

    assert said.splitlines()[-1] == "dry run, nothing written: " + LAST_LINE.format(6, 6, 0, 0, 5, 3)
    assert snapshot(mixed.path) == before
    assert product(mixed, "shards", "--shard-size", 2, "--limit", 5).splitlines()[-1] in said


def test_dry_run_validates_inputs(data_root):
    """Dry-run mode: Dry run validates inputs. Exit 1 with the file's name and what to run; nothing is listed or made."""
    said = product(data_root, "shards", "--dry-run", code=1)

    assert str(data_root.stage2_jsonl) in said
    assert "imagemill stage2" in said
    assert "total_records" not in said
    assert [path.name for path in data_root.path.iterdir()] == ["approved"]


# ---- progress reporting


def test_progress_during_scan(data_root):
    """Progress reporting: Progress during scan. Every 500 ready records, the default; skipped ones do not count."""
    foreign(data_root, *records(1, TALL))
    line = data_root.stage2_jsonl.read_text()
    lines = [line.replace("i00000", f"i{n:05d}") for n in range(1003)]
    lines.insert(10, "torn\n")
    data_root.stage2_jsonl.write_text("".join(lines))
    for spec in embedding_specs():
        first = data_root.derived / spec.folder / "i00000.npy"
        for n in range(1, 1003):
            (first.with_name(f"i{n:05d}.npy")).hardlink_to(first)

    said = product(data_root, "shards", "--dry-run")

    lines = [line for line in said.splitlines() if line.startswith("total_records=")]
    assert lines == [f"total_records=1004 ready_records={n} skipped_incomplete=1" for n in (500, 1000)]


def test_final_summary(mixed):
    """Progress reporting: Final summary. The last line, with `filtered`."""
    (mixed.derived / VAE.folder / "i00003.npy").unlink()

    said = product(mixed, "shards", "--bucket", SQUARE, "--shard-size", 2)

    assert said.splitlines()[-1] == LAST_LINE.format(6, 3, 1, 2, 3, 2)


# ---- npy files


def test_npy_files_are_copied_as_is(data_root):
    """Preserve existing npy files: NPY files are copied as-is. The original's latent: float16, (16, 128, 96)."""
    record = record_of("abc123", size=(768, 1024))
    foreign(data_root, record)
    packed_here(data_root)

    ((_, members),) = read_shard(tars(data_root, record["aspect_bucket"])[0])
    latent = np.load(io.BytesIO(members["vae.npy"]))
    assert (latent.shape, latent.dtype) == ((16, 128, 96), np.float16)
    for spec in embedding_specs():
        assert members[spec.member] == (data_root.derived / spec.folder / "abc123.npy").read_bytes()
