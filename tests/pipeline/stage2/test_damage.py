"""npy files whose bytes differ from the recorded ones, although size, time and inode are equal."""

import numpy as np
import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.formats.npy import NpyStore
from imagemill.fs.fingerprints import fingerprint_file
from imagemill.pipeline.shards.copies import with_copies
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.stage2.damage import DAMAGED, damaged_files, note_damage
from imagemill.store.ledger import Ledger
from imagemill.validation.validator import Options, validate, verify_stage2
from tests.helpers.passes import run_pass
from tests.helpers.rot import rot
from tests.helpers.sessions import recorded_contents
from tests.helpers.shard_runs import SQUARE
from tests.helpers.stage2 import picture, plan_of, ready, stage2, with_encoder, worker_of
from tests.helpers.stubs import StubEncoder


@pytest.fixture
def root(data_root):
    """Three square images, embedded and recorded."""
    stage2(data_root, "a", "b", "c", size=(24, 24))
    return data_root


def pack(root, existing="replace"):
    plan = plan_shards(ready(root, [SQUARE]).ready, [SQUARE], root.shards, ShardParameters(2), existing)
    return write_bucket(plan, plan.plans[0], root.derived, {})


def file_of(root, spec, image_id):
    return root.derived / spec.folder / f"{image_id}.npy"


def verified(root):
    contents = recorded_contents(root)
    return verify_stage2(root.stage2_jsonl, root.derived, contents), contents.damaged


def noted(root, *damaged):
    with Ledger(root.ledger) as ledger:
        note_damage(ledger, damaged)


def embedded_again(root, spec):
    """Run one pass of a kind like its asset; return the counters and the plan."""
    with Ledger(root.ledger) as ledger:
        plan = plan_of(root, spec, ledger)
        jobs = with_copies(plan.jobs, root.shards)
        return run_pass(worker_of(root, with_encoder(spec, StubEncoder)), jobs, ledger), plan


@pytest.mark.parametrize("position", [-1, 0, 200], ids=["value", "magic", "values"])
@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_verification_names_the_damaged_file(root, spec, position):
    rot(file_of(root, spec, "b"), position)

    report, damaged = verified(root)

    (found,) = report.findings
    assert (found.rule, found.file, found.item) == ("damaged", f"{spec.folder}/b.npy", "b")
    assert "imagemill stage2 --verify" in found.remedy
    assert damaged == [(spec.kind, "b")]


def test_undamaged_files_give_no_finding(root):
    report, damaged = verified(root)

    assert (report.findings, damaged) == ([], [])


def test_file_replaced_by_another_program_is_not_damaged(root):
    """It has no row in the ledger, and the next run reads all of it."""
    path = file_of(root, VAE, "b")
    np.save(path, np.zeros((16, 3, 3), np.float16))

    assert verified(root)[1] == []


def test_packing_error_names_the_damaged_file_instead_of_the_tar(root):
    pack(root)
    rot(file_of(root, VAE, "b"))
    contents = recorded_contents(root)

    report = validate(root.shards / f"bucket_{SQUARE}", options=Options(derived=root.derived, contents=contents))

    (found,) = report.findings
    assert (found.rule, found.file) == ("damaged", "vae_latents/b.npy")


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_recorded_damage_is_restored_bit_for_bit_from_the_shard(root, spec):
    path = file_of(root, spec, "b")
    before = path.read_bytes()
    with Ledger(root.ledger) as ledger:
        (recorded,) = ledger.files(spec.kind, ["b"]).values()
    pack(root)
    rot(path)
    noted(root, (spec.kind, "b"))

    counts, _ = embedded_again(root, spec)

    assert (counts["restored"], counts["computed"], counts["calls"]) == (1, 0, 0)
    assert path.read_bytes() == before
    with Ledger(root.ledger) as ledger:
        (row,) = ledger.files(spec.kind, ["b"]).values()
        assert (row.content, row.model_key, row.source) == (recorded.content, recorded.model_key, recorded.source)
        assert row.stat == NpyStore(path.parent, spec).stat("b")
        assert ledger.problems() == []


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_damaged_file_without_a_copy_is_regenerated(root, spec):
    path = file_of(root, spec, "b")
    before = path.read_bytes()
    rot(path)
    noted(root, (spec.kind, "b"))

    counts, _ = embedded_again(root, spec)

    assert (counts["computed"], counts["replaced"]) == (1, 1)
    assert path.read_bytes() == before
    assert verified(root)[1] == []


def test_copy_with_the_same_damage_is_not_used(root):
    path = file_of(root, VAE, "b")
    before = path.read_bytes()
    pack(root)
    rot(root.shards / f"bucket_{SQUARE}" / "shard-000000.tar", path_in_tar(root, path))
    rot(path)
    noted(root, (VAE.kind, "b"))

    counts, _ = embedded_again(root, VAE)

    assert (counts["computed"], path.read_bytes()) == (1, before)


def path_in_tar(root, path):
    """Return the position of the file's last byte in the tar that contains it."""
    tar = (root.shards / f"bucket_{SQUARE}" / "shard-000000.tar").read_bytes()
    data = path.read_bytes()
    return tar.index(data) + len(data) - 1


def test_file_recorded_as_damaged_with_correct_bytes_is_kept(root):
    before = file_of(root, VAE, "b").stat()
    noted(root, (VAE.kind, "b"))

    counts, _ = embedded_again(root, VAE)

    assert (counts["kept"], counts["computed"]) == (1, 0)
    assert file_of(root, VAE, "b").stat().st_mtime_ns == before.st_mtime_ns
    with Ledger(root.ledger) as ledger:
        assert damaged_files(ledger.problems()) == set()


def test_file_of_a_replaced_image_is_regenerated_instead_of_restored(root):
    """The recorded bytes belong to the earlier image."""
    pack(root)
    rot(file_of(root, VAE, "b"))
    noted(root, (VAE.kind, "b"))
    picture(root.approved / "b.png", size=(24, 24), seed=99)

    counts, _ = embedded_again(root, VAE)

    assert counts["computed"] == 1


def test_file_of_a_missing_image_is_restored(root):
    """A missing source makes nothing stale, and its file cannot be regenerated."""
    path = file_of(root, VAE, "b")
    before = path.read_bytes()
    pack(root)
    (root.approved / "b.png").unlink()
    rot(path)
    noted(root, (VAE.kind, "b"))

    counts, _ = embedded_again(root, VAE)

    assert (counts["restored"], path.read_bytes()) == (1, before)


def test_file_of_a_missing_image_without_a_copy_is_kept_and_reported(root):
    path = file_of(root, DINOV3, "b")
    rot(path)
    damaged = path.read_bytes()
    (root.approved / "b.png").unlink()
    noted(root, (DINOV3.kind, "b"))

    counts, _ = embedded_again(root, DINOV3)

    assert (counts["failed"], path.read_bytes()) == (1, damaged)
    with Ledger(root.ledger) as ledger:
        (problem,) = [problem for problem in ledger.problems() if problem.asset == DINOV3.kind]
    assert (problem.reason, problem.item) == (DAMAGED, "b")
    assert "restore the image" in problem.remedy


# ---- packing


@pytest.mark.parametrize("existing", ["replace", "repack"])
@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_packing_uses_the_recorded_bytes_of_the_old_shard(root, spec, existing):
    pack(root)
    tars = {tar.name: tar.read_bytes() for tar in root.shards.rglob("*.tar")}
    rot(file_of(root, spec, "b"))
    stage2(root, "d", size=(24, 24))

    result = pack(root, existing)

    assert (result.status, result.samples) == ("written", 4)
    assert result.rotten.files == ((spec.kind, "b"),)
    assert result.rotten.lost == set()
    assert (root.shards / f"bucket_{SQUARE}" / "shard-000000.tar").read_bytes() == tars["shard-000000.tar"]


def test_packing_excludes_a_sample_without_its_recorded_bytes(root):
    rot(file_of(root, VAE, "b"))

    result = pack(root)

    assert (result.status, result.samples, result.rotten.lost) == ("written", 2, {"b"})
    report = validate(root.shards / f"bucket_{SQUARE}", derived=root.derived)
    assert (report.findings, report.checked) == ([], 2)


def test_packing_only_damaged_samples_keeps_the_existing_set(root):
    """No sample can be packed, so the set with the earlier bytes stays."""
    pack(root)
    before = {path: path.read_bytes() for path in root.shards.rglob("*") if path.is_file()}
    for image_id in "abc":
        rot(file_of(root, T5, image_id))
    for tar in root.shards.rglob("*.tar"):
        tar.write_bytes(bytes(tar.stat().st_size))

    result = pack(root)

    assert (result.status, result.rotten.lost) == ("unchanged", {"a", "b", "c"})
    assert {path for path in root.shards.rglob("*") if path.is_file()} == before.keys()


def test_appending_checks_the_bytes_it_reads(root):
    pack(root)
    stage2(root, "d", size=(24, 24))
    rot(file_of(root, VAE, "d"))

    result = pack(root, "append")

    assert (result.samples, result.rotten.lost) == (3, {"d"})
    assert fingerprint_file(root.shards / f"bucket_{SQUARE}" / "shard-000000.tar")
