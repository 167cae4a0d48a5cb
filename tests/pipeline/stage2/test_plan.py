"""Plan of a pass, computed from values alone.

Spec: docs/spec/conventions.md#completion, docs/spec/conventions.md#staleness, docs/spec/conventions.md#refused-and-failed
"""

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, EmbeddingSpec, Refusal
from imagemill.fs.fingerprints import posix_signature
from imagemill.inputs.scan import Scan
from imagemill.inputs.sources import SourceFile
from imagemill.pipeline.stage2 import current_plans
from imagemill.pipeline.stage2.current_plans import all_jobs, jobs_in_parts
from imagemill.pipeline.stage2.plan import (
    LedgerSnapshot,
    complete_images,
    ids_of,
    missing_caption,
    plan_embedding,
    plans_for,
)
from imagemill.pipeline.stage2.record_index import Recorded
from imagemill.store.ledger import IN_MEMORY, Captioned, CaptionRow, FileRow, Ledger, Problem, SourceRow
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


class Strict(EmbeddingSpec):
    """A kind whose settings refuse small images."""

    def refuses(self, height, width):
        return None if height > 10 else Refusal("too_small", "why", "do")


STRICT = Strict(**{field.name: getattr(VAE, field.name) for field in dataclasses.fields(VAE)})
SPECS = (DINOV3, STRICT, T5)
COLOURS = (None, "none", "srgb", "hdr_transfer", "a profile")


@st.composite
def rows_of_image(draw, image_id):
    """The state of one image in the folders and the ledger: complete, with at most two facts that differ from that."""
    odd, number = draw(st.sets(st.integers(1, 30), max_size=2)), itertools.count(1)

    def one_of(usual, *rare):
        return draw(st.sampled_from(rare)) if next(number) in odd else usual

    color = one_of("none", *COLOURS)
    row = SourceRow(
        image_id, f"{image_id}.png", one_of(IMAGE, TOUCHED), one_of("pixels", "old"), one_of(24, 8), 32, color
    )
    text = CaptionRow(
        image_id, None, "words", one_of("captioner", "sidecar"), one_of("words", "others"), lines=one_of(1, 2)
    )
    usual = {DINOV3.kind: "pixels", VAE.kind: "pixels", T5.kind: "words"}
    files = [
        FileRow(spec.kind, image_id, stat, one_of(usual[spec.kind], "pixels+srgb:a profile", None), "content", maker)
        for spec in SPECS
        for stat in one_of([FILE], [], [OTHER_FILE])
        for maker in one_of(["model"], ["superseded"])
    ]  # fmt: skip
    listed = {spec.kind: one_of(FILE, None, OTHER_FILE) for spec in SPECS}
    problem = one_of(
        None, refusal(), refusal("damaged", None, outcome="failed"), refusal("missing_caption", asset=T5.kind)
    )
    return {
        "listed": one_of(source(image_id, caption=IMAGE), None),
        "row": one_of(row, None),
        "caption": one_of(text, None),
        "captioned": one_of(Captioned(image_id, "pixels", "model"), None, Captioned(image_id, "earlier", "model")),
        "files": files,
        "listings": listed,
        "problem": problem and msgspec.structs.replace(problem, item=image_id),
        "awaited": one_of(False, True),
    }


@given(
    st.tuples(*(rows_of_image(image_id) for image_id in "abcde")),
    st.sampled_from(["srgb", "srgb", "ignore"]),
    st.sampled_from(["srgb", "ignore"]),
)
def test_complete_images_that_the_ledger_finds_are_those_that_planning_finds(images, color, adopted):
    by_id = dict(zip("abcde", images, strict=True))
    with Ledger(IN_MEMORY) as ledger:
        ledger.record_setting("pixels.color", color)
        ledger.record_setting("adopted.color", adopted)
        ledger.record_sources(image["row"] for image in images if image["row"])
        ledger.record_captions(image["caption"] for image in images if image["caption"])
        ledger.record_captioned(image["captioned"] for image in images if image["captioned"])
        ledger.record_files(row for image in images for row in image["files"])
        ledger.record_problems(image["problem"] for image in images if image["problem"])
        scan = Scan({image["listed"].image_id: image["listed"] for image in images if image["listed"]}, [])
        listings = {
            kind: {i: image["listings"][kind] for i, image in by_id.items() if image["listings"][kind]}
            for kind in (spec.kind for spec in SPECS)
        }  # fmt: skip
        awaited = {image_id for image_id, image in by_id.items() if image["awaited"]}
        inventory = SimpleNamespace(
            scan=scan,
            recorded=Recorded(),
            in_force=lambda spec: {each.kind: each for each in SPECS}[spec.kind],
            files=lambda spec: listings[spec.kind],
            kept=None,
            in_question=lambda ledger: None,
        )
        ids = list(scan.sources)

        found = plans_for(SPECS, ids, inventory, ledger, awaited)
        with mock.patch.object(current_plans, "PLANNED_AT_ONCE", 2):
            parts = [part.jobs for part in jobs_in_parts(SPECS, inventory, ledger, awaited)]

        known = LedgerSnapshot.read(ledger, None, scan.sources.values())
        for spec in SPECS:
            files, listing = ledger.files(spec.kind), listings[spec.kind]
            wanted = plan_embedding(spec, ids, scan, known, files, listing, awaited=awaited)
            assert in_order(found[spec]) == in_order(wanted)
            in_parts = [job for part in parts for job in part[spec]]
            assert sorted(in_parts, key=lambda job: job.image_id) == in_order(wanted)[0]
        complete = set(ids).difference(awaited).intersection(*(found[spec].done for spec in SPECS))
        # Images that the ledger does not find: with a problem, renamed ones, and those with an adopted file.
        others = {i for i in complete if ledger.problems([i]) or by_id[i]["row"] is None}
        others |= {row.image_id for image in images for row in image["files"] if row.source is None}
        by_ledger = complete_images(SPECS, inventory, ledger)
        assert complete - others <= by_ledger
        with mock.patch("imagemill.parts.IMAGES_TOGETHER", 2):
            assert complete_images(SPECS, inventory, ledger) == by_ledger


def in_order(plan):
    return (
        sorted(plan.jobs, key=lambda job: job.image_id), sorted(plan.done),
        sorted(plan.refused, key=lambda problem: problem.item), sorted(plan.absent),
    )  # fmt: skip
