"""Every image counts once, and the figures add up.

Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage2.md#counters
"""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.config import read_config
from imagemill.domain.embedding_specs import DINOV3, VAE, embedding_specs
from imagemill.inputs.scan import Scan
from imagemill.inputs.sources import SourceFile
from imagemill.pipeline.accounting import COUNTERS, ImageCounts, Standing, count_merge, embedded_images, progress_line
from imagemill.pipeline.problem_list import current_problems
from imagemill.pipeline.stage2 import current_plans
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.merge import Merge
from imagemill.pipeline.stage2.plan import EmbeddingPlan, Job, plans_for
from imagemill.store.ledger import Ledger, Problem
from tests.helpers.stage2 import embed, photos, record_of, stage2, surveyed, write_records, write_text

KINDS = [spec.kind for spec in embedding_specs()]
IDS = st.sets(st.sampled_from("abcdef"))
ORDER = ["refused", "failed", "waiting", "embedded", "up_to_date"]


def problem(item, outcome, asset=VAE.kind):
    return Problem(item, asset, outcome, "reason", "detail", "remedy")


def standing(done=(), jobs=(), refused=(), failed=(), left=()):
    """One state for all kinds: which images are done, have work, or are refused by the plan."""
    plan = EmbeddingPlan(
        jobs=[Job(i, f"{i}.png", None, None, None, None, None) for i in sorted(jobs)],
        done=sorted(done),
        refused=[problem(i, "refused") for i in sorted(refused)],
    )
    sources = {i: SourceFile(i, f"{i}.png", "s", None, 0) for i in {*done, *jobs, *refused}}
    problems = [problem(i, "failed") for i in sorted(failed)]
    return Standing(Scan(sources, []), {VAE: plan}, problems, frozenset(left))


@given(IDS, IDS, IDS, IDS, IDS)
def test_images_seen_are_the_sum_of_the_outcomes(done, jobs, refused, failed, embedded):
    jobs, refused = jobs - done, refused - done - jobs

    state = standing(done, jobs, refused, failed, ())
    counts = state.counts(state.outcomes([VAE.kind], embedded, migrate=True))

    assert counts.seen == len(done) + len(jobs) + len(refused)
    assert counts.seen == sum(count for name, count in msgspec.structs.asdict(counts).items() if name != "seen")


@pytest.mark.parametrize("worst", range(len(ORDER)))
def test_image_counts_by_the_worst_of_its_kinds(worst):
    """refused > failed > waiting > embedded > up to date."""
    holds = ORDER[worst:]
    state = standing(
        done={"a"} if "waiting" not in holds and "refused" not in holds else (),
        jobs={"a"} if "waiting" in holds and "refused" not in holds else (),
        refused={"a"} if "refused" in holds else (),
        failed={"a"} if "failed" in holds else (),
    )

    assert state.outcomes(KINDS, {"a"} if "embedded" in holds else set(), migrate=True) == {"a": ORDER[worst]}


def test_kind_that_was_not_asked_for_does_not_count():
    assert standing(jobs={"a"}).outcomes([DINOV3.kind], migrate=False) == {"a": "up_to_date"}


def test_stage1_record_waits_only_if_migration_was_asked_for():
    state = standing(done={"a"}, left={"a"})

    assert state.outcomes(KINDS, migrate=True) == {"a": "waiting"}
    assert state.outcomes(KINDS, migrate=False) == {"a": "up_to_date"}


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        (ImageCounts(), "0 images seen"),
        (ImageCounts(seen=1, up_to_date=1), "1 image seen: 1 up to date"),
        (ImageCounts(seen=38, embedded=23, refused=15), "38 images seen: 23 embedded, 15 refused"),
        (ImageCounts(seen=1300, waiting=1300), "1,300 images seen: 1,300 waiting"),
    ],
)
def test_counts_leave_out_what_is_zero(counts, text):
    assert str(counts) == text


# ---- the counters of a merge


def merged(root, kinds=tuple(KINDS), **how):
    """Write the records and count, as the IO manager does."""
    write_records(root)
    with Ledger(root.ledger) as ledger:
        inventory = surveyed(root, ledger)
        how.setdefault("captioned", read_config(root.config_file).captioner.enabled)
        return count_merge(Merge(inventory, kinds, **how), ledger, current_problems(inventory.scan, ledger))


def of(counts, prefix=""):
    return {name.removeprefix(prefix): count for name, count in counts.items() if count and name.startswith(prefix)}


def test_new_images_are_migrated_and_embedded_the_next_time_skipped_and_up_to_date(data_root):
    stage2(data_root, "a", "b")
    with Ledger(data_root.ledger) as ledger:
        ledger.record_changes([(i, kind, "computed") for i in "ab" for kind in KINDS])
        ledger.record_changes([(i, "stage2_jsonl", "added") for i in "ab"])

    counts = merged(data_root)

    assert {name: counts[name] for name in ("migrated_new", "total", "images_embedded", "images_seen")} == {
        "migrated_new": 2, "total": 2, "images_embedded": 2, "images_seen": 2,
    }  # fmt: skip
    with Ledger(data_root.ledger) as ledger:
        ledger.forget_changes()
    counts = merged(data_root)
    assert (counts["skipped"], counts["images_up_to_date"], counts["total"]) == (2, 2, 2)


def test_images_with_work_left_wait_and_are_not_skipped(data_root):
    stage2(data_root, "a")
    with Ledger(data_root.ledger) as ledger:
        ledger.forget_changes()
    photos(data_root, "new")

    counts = merged(data_root)

    assert (counts["skipped"], counts["waiting"], counts["images_waiting"]) == (1, 1, 1)


def test_refused_images_and_names_are_not_failed(data_root):
    stage2(data_root, "a")
    (data_root.approved / "twin.jpg").write_bytes(b"x")
    (data_root.approved / "twin.png").write_bytes(b"x")
    photos(data_root, "silent", captions=False)
    embed(data_root)

    counts = merged(data_root)

    assert (counts["refused"], counts["failed"], counts["images_refused"]) == (3, 0, 3)
    assert sum(counts[name] for name in COUNTERS) == counts["total"] == 4


def test_partly_embedded_image_is_enriched_and_waits(data_root):
    """The counters show what changed, the images what is left."""
    photos(data_root, "a")
    embed(data_root, DINOV3)
    with Ledger(data_root.ledger) as ledger:
        changes = ledger.changes()

    counts = merged(data_root)

    assert embedded_images(changes) == {"a"}
    assert (counts["enriched"], counts["images_waiting"], counts["images_embedded"]) == (1, 1, 0)


def test_captionless_image_waits_for_a_configured_captioner(data_root):
    photos(data_root, "a", captions=False)
    embed(data_root, DINOV3, VAE)
    assert merged(data_root)["images_refused"] == 1
    write_text(data_root.config_file, "captioner: {enabled: true, model: preview}")

    assert merged(data_root)["images_waiting"] == 1


def test_progress_line_is_the_one_of_the_seed():
    counts = {"migrated_new": 6, "enriched": 2, "extracted": 2, "skipped": 3, "failed": 1, "total": 14}

    line = "progress: 6 migrated, 2 enriched, 2 extracted, 3 skipped (total: 14) rate=2.5/s failed=1"
    assert progress_line(counts, 4.0) == line
    assert progress_line({**counts, "refused": 3, "waiting": 2}, 4.0) == f"{line} refused=3 waiting=2"
    assert "rate=0.0/s" in progress_line(counts, 0.0)


def test_plans_are_made_again_only_after_a_change_that_concerns_them(data_root, monkeypatch):
    """The end of a run reports the state that its last step has planned for."""
    photos(data_root, "a", "b")
    made = []
    monkeypatch.setattr(current_plans, "plans_for", lambda *given: made.append(given) or plans_for(*given))
    with Ledger(data_root.ledger) as ledger:
        inventory = Inventory(data_root)
        inventory.survey(ledger)

        def plans():
            made.clear()
            standing = Standing.read(inventory, ledger, ())
            return len(made), {len(plan.jobs) + len(plan.refused) for plan in standing.plans.values()}

        assert plans() == (1, {2})
        ledger.record_counts("run", "asset", {"images": 2})
        ledger.record_captions([])
        assert plans() == (0, {2})
        for change in (
            lambda: ledger.record_problems([Problem("a", VAE.kind, "failed", "model_error", "why", "do")]),
            lambda: ledger.record_setting("pixels.color", "ignore"),
            lambda: ledger.forget_setting("pixels.color"),
            lambda: write_text(data_root.stage2_jsonl, json.dumps({**record_of("a"), "dinov3_embedding": [0.5] * 768})),
        ):
            change()
            assert plans()[0] == 1
            assert plans()[0] == 0
        with Ledger(data_root.ledger) as other:
            other.record_setting("pixels.color", "ignore")
        assert plans()[0] == 1
