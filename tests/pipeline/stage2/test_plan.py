"""Plan of a pass, computed from values alone.

Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#staleness, docs/spec/conventions.md#refused-and-failed
"""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.fs.fingerprints import posix_signature
from imagemill.inputs.scan import Scan, SourceFile
from imagemill.pipeline.stage2.current_plans import all_jobs
from imagemill.pipeline.stage2.plan import LedgerSnapshot, ids_of, missing_caption, plan_embedding
from imagemill.store.ledger import CaptionRow, FileRow, Ledger, Problem, SourceRow
from tests.helpers.stage2 import embed, photos, picture, plan_of, surveyed

IMAGE, TOUCHED = posix_signature(100, 1, 7), posix_signature(100, 2, 7)
FILE, OTHER_FILE = posix_signature(4224, 3, 8), posix_signature(4224, 4, 9)


def source(image_id="a", stat=IMAGE, caption=None):
    return SourceFile(image_id, f"{image_id}.png", stat, caption, 0, () if caption is None else (f"{image_id}.txt",))


def facts(image_id="a", stat=IMAGE, fingerprint="pixels"):
    return SourceRow(image_id, f"{image_id}.png", stat, fingerprint, 24, 32, "none")


def caption(image_id="a", fingerprint="words"):
    return CaptionRow(image_id, None, "some words", "sidecar", fingerprint)


def made(spec, image_id="a", stat=FILE, source="pixels"):
    return FileRow(spec.kind, image_id, stat, source, "content", "model")


def refusal(reason="undecodable", stat=IMAGE, asset="vae_latents", outcome="refused", image_id="a"):
    return Problem(image_id, asset, outcome, reason, "why", "do", stat)


def plan(
    spec=DINOV3, *, ids: Sequence[str] = ("a",), sources=None, known=(), captions=(), problems=(), files=(), listing=None
):  # fmt: skip
    refusals = {}
    for problem in problems:
        if problem.outcome == "refused":
            refusals.setdefault(problem.item, []).append(problem)
    return plan_embedding(
        spec,
        ids,
        Scan({s.image_id: s for s in ([source()] if sources is None else sources)}, []),
        LedgerSnapshot({row.image_id: row for row in known}, {row.image_id: row for row in captions}, refusals),
        {(row.image_id, row.stat): row for row in files},
        listing or {},
    )


def test_image_without_a_file_is_a_job_with_its_ledger_rows():
    planned = plan(known=[facts()])

    (job,) = planned.jobs
    assert (job.image_id, job.file_name, job.stat) == ("a", "a.png", IMAGE)
    assert job.facts == facts()
    assert job.present is None
    assert (planned.done, planned.refused, planned.absent) == ([], [], [])


def test_file_that_matches_its_ledger_row_is_done():
    planned = plan(known=[facts()], files=[made(DINOV3)], listing={"a": FILE})

    assert planned.done == ["a"]
    assert planned.jobs == []


def test_caption_kind_is_done_if_its_caption_is_unchanged():
    """A changed caption makes a T5 file stale; a changed image does not."""
    same = plan(
        T5, known=[facts()], captions=[caption()], files=[made(T5, source="words")], listing={"a": FILE}
    )  # fmt: skip
    edited = plan(
        T5, known=[facts()], captions=[caption(fingerprint="other words")], files=[made(T5, source="words")],
        listing={"a": FILE},
    )  # fmt: skip

    assert len(same.done) == 1
    (job,) = edited.jobs
    assert (job.caption, job.caption_fingerprint) == ("some words", "other words")


@pytest.mark.parametrize("spec", [DINOV3, VAE])
def test_file_made_from_other_bytes_is_a_job(spec):
    """A replaced image makes its files stale."""
    planned = plan(spec, known=[facts(fingerprint="new")], files=[made(spec, source="old")], listing={"a": FILE})

    assert [job.present for job in planned.jobs] == [FILE]
    assert planned.done == []


def test_image_with_a_new_mtime_is_a_job_but_not_stale():
    """Equal bytes are not stale. Only the worker reads the bytes and can compare them."""
    planned = plan(sources=[source(stat=TOUCHED)], known=[facts(stat=IMAGE)], files=[made(DINOV3)], listing={"a": FILE})

    (job,) = planned.jobs
    assert job.facts is None, "the facts are those of another stat triple"
    assert made(DINOV3) in job.known


@pytest.mark.parametrize("listing", [{"a": OTHER_FILE}, {}])
def test_file_that_differs_from_its_ledger_row_is_a_job(listing):
    planned = plan(known=[facts()], files=[made(DINOV3)], listing=listing)

    assert [job.present for job in planned.jobs] == [listing.get("a")]


def test_file_that_was_adopted_without_a_source_is_a_job():
    """Packing adopts files without opening an image, so the next pass determines the source."""
    planned = plan(known=[facts()], files=[made(DINOV3, source=None)], listing={"a": FILE})

    assert [job.known for job in planned.jobs] == [(made(DINOV3, source=None),)]


def test_job_contains_exactly_the_rows_of_its_image():
    rows = [made(DINOV3), made(DINOV3, stat=OTHER_FILE, source="old"), made(DINOV3, image_id="b")]

    (job,) = plan(files=rows).jobs

    assert sorted(row.stat for row in job.known) == [FILE, OTHER_FILE]


def test_image_missing_from_the_folder_is_absent():
    planned = plan(ids=["a", "gone"], known=[facts()])

    assert planned.absent == ["gone"]
    assert [job.image_id for job in planned.jobs] == ["a"]


# ---- refused


@pytest.mark.parametrize("reason", ["undecodable", "too_small", "too_large"])
@pytest.mark.parametrize("spec", [DINOV3, VAE, T5])
def test_image_that_one_asset_could_not_open_is_refused_for_every_kind(spec, reason):
    """`too_small` refuses the image for every kind, including captions. Spec: docs/spec/stage2.md#vae-latents"""
    planned = plan(spec, captions=[caption()], problems=[refusal(reason)])

    assert planned.refused == [refusal(reason)]
    assert planned.jobs == []


def test_refusal_is_dropped_if_the_file_changes():
    """A refused input is retried only after it changes."""
    planned = plan(sources=[source(stat=TOUCHED)], problems=[refusal(stat=IMAGE)])

    assert planned.refused == []
    assert len(planned.jobs) == 1


@pytest.mark.parametrize(
    "problem", [refusal(outcome="failed", reason="read_error"), refusal("missing_caption"), refusal("bad_caption")]
)
def test_problem_not_caused_by_the_image_is_retried(problem):
    planned = plan(problems=[problem])

    assert planned.refused == []
    assert len(planned.jobs) == 1


def test_image_without_a_caption_is_refused_only_for_the_caption_kind():
    assert [problem.reason for problem in plan(T5).refused] == ["missing_caption"]
    assert len(plan(DINOV3).jobs) == 1


def test_missing_and_blank_captions_are_distinguished():
    missing, blank = missing_caption("t5_hidden", source()), missing_caption("t5_hidden", source(caption=FILE))

    assert missing.detail == "no caption for a.png"
    assert blank.detail == "a.txt is blank"
    assert (missing.item, missing.asset, missing.stat) == ("a", "t5_hidden", IMAGE)
    assert "a.txt" in missing.remedy


def test_snapshot_reads_only_refusals_and_drops_sources_with_another_stat(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.record_sources([facts(), facts("b")])
        ledger.record_problems([refusal(), refusal(asset="dinov3_npy", outcome="failed"), refusal(image_id="b")])
        known = LedgerSnapshot.read(ledger, ["a"])

    assert list(known.refusals) == ["a"]
    assert [problem.asset for problem in known.refusals["a"]] == ["vae_latents"]
    assert known.facts(source()) == facts()
    assert known.facts(source(stat=TOUCHED)) is None
    assert known.facts(source("b")) is None


# ---- all rules together

stats = st.sampled_from([IMAGE, TOUCHED])
file_stats = st.sampled_from([FILE, OTHER_FILE])
ids = st.sampled_from(list("abcdef"))


@given(
    st.lists(ids, unique=True),
    st.lists(st.builds(source, ids, stats)),
    st.lists(st.builds(facts, ids, stats, st.sampled_from(["pixels", "new"]))),
    st.lists(st.builds(caption, ids, st.sampled_from(["words", "new words"]))),
    st.lists(st.builds(refusal, st.sampled_from(["undecodable", "bad_caption"]), stats, image_id=ids)),
    st.lists(st.builds(made, st.just(DINOV3), ids, file_stats, st.sampled_from(["pixels", "words", None]))),
    st.dictionaries(ids, file_stats),
    st.sampled_from([DINOV3, T5]),
)
def test_every_image_is_in_exactly_one_list(wanted, sources, known, captions, problems, files, listing, spec):
    files = [msgspec.structs.replace(file, kind=spec.kind) for file in files]  # the ledger's rows of the planned kind
    planned = plan(
        spec, ids=wanted, sources=sources, known=known, captions=captions, problems=problems, files=files, listing=listing
    )  # fmt: skip

    placed = [
        *(job.image_id for job in planned.jobs), *planned.done,
        *(problem.item for problem in planned.refused), *planned.absent,
    ]  # fmt: skip
    assert sorted(placed) == sorted(wanted)
    assert all(
        (spec.kind, image_id, listing[image_id]) in {(f.kind, f.image_id, f.stat) for f in files}
        for image_id in planned.done
    )


# ---- on disk


def test_images_with_work_are_the_incomplete_ones_in_name_order(data_root):
    photos(data_root, "b", "a", "c")
    embed(data_root)
    photos(data_root, "f", "e")
    (data_root.derived / DINOV3.folder / "c.npy").unlink()
    picture(data_root.approved / "broken.png")
    (data_root.approved / "broken.png").write_bytes(b"no picture")
    embed(data_root, VAE)  # Refuses the broken image, and writes latents of e and f.

    with Ledger(data_root.ledger) as ledger:
        inventory = surveyed(data_root, ledger)
        assert ids_of(all_jobs([DINOV3, VAE, T5], inventory, ledger)) == ["c", "e", "f"]
        assert ids_of(all_jobs([VAE], inventory, ledger)) == []
        assert [problem.item for problem in plan_of(data_root, DINOV3, ledger).refused] == ["broken"]


def test_ledger_is_read_once_for_all_kinds(data_root, monkeypatch):
    """Images, captions and problems do not depend on the kind."""
    photos(data_root, "a")
    read, readings = LedgerSnapshot.read, []
    monkeypatch.setattr(LedgerSnapshot, "read", lambda *given: readings.append(given) or read(*given))

    with Ledger(data_root.ledger) as ledger:
        jobs = all_jobs([DINOV3, VAE, T5], surveyed(data_root, ledger), ledger)

    assert [[job.image_id for job in of_kind] for of_kind in jobs.values()] == [["a"]] * 3
    assert len(readings) == 1
