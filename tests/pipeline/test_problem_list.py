"""pipeline/problem_list.py: the problems of one output that hold now. Spec: docs/spec/conventions.md#completion-and-identity"""

import msgspec
import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.inputs.survey import survey
from imagemill.pipeline.problem_list import problems_of_kind, problems_of_records
from imagemill.pipeline.stage2.image_metadata import complete_facts, note_missing_captions
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.store.ledger import Ledger, Problem
from tests.helpers.stage2 import embed, photos


@pytest.fixture
def ledger(data_root):
    with Ledger(data_root.ledger) as ledger:
        yield ledger


def named(problems):
    return [(problem.item, problem.reason) for problem in problems]


def test_image_that_does_not_open_is_named_once_for_every_kind_and_the_records(data_root, ledger):
    photos(data_root, "a", "b")
    (data_root.approved / "b.png").write_bytes(b"no picture")
    embed(data_root)

    for spec in (DINOV3, VAE, T5):
        assert named(problems_of_kind(Inventory(data_root), ledger, spec)) == [("b", "undecodable")]
    assert named(problems_of_records(Inventory(data_root), ledger)) == [("b", "undecodable")]


def test_replaced_image_is_no_longer_named(data_root, ledger):
    photos(data_root, "b")
    (data_root.approved / "b.png").write_bytes(b"no picture")
    embed(data_root)
    photos(data_root, "b")

    assert problems_of_kind(Inventory(data_root), ledger, DINOV3) == []
    assert problems_of_records(Inventory(data_root), ledger) == []


def test_image_without_a_caption_concerns_the_text_encoder_and_the_records(data_root, ledger):
    photos(data_root, "a", captions=False)
    scan = survey(data_root.approved, ledger)
    complete_facts(data_root.approved, scan, ledger)
    note_missing_captions(scan, ledger)
    ledger.record_problems([Problem("a", T5.kind, "refused", "missing_caption", "d", "r", scan.sources["a"].stat)])

    assert problems_of_kind(Inventory(data_root), ledger, DINOV3) == []
    assert named(problems_of_kind(Inventory(data_root), ledger, T5)) == [("a", "missing_caption")]
    assert named(problems_of_records(Inventory(data_root), ledger)) == [("a", "missing_caption")]


def test_names_that_are_refused_concern_every_kind_if_they_are_of_images(data_root, ledger):
    photos(data_root, "a")
    (data_root.approved / "a.jpg").write_bytes(b"")
    (data_root.approved / "x.psd").write_bytes(b"")
    survey(data_root.approved, ledger)

    of_kind = [item for item, _ in named(problems_of_kind(Inventory(data_root), ledger, DINOV3))]
    assert of_kind == ["a.jpg", "a.png"]
    assert [item for item, _ in named(problems_of_records(Inventory(data_root), ledger))] == [*of_kind, "x.psd"]


def test_failure_that_has_been_overcome_is_not_named(data_root, ledger):
    """A file that is there and current has overcome what once stopped it."""
    photos(data_root, "a")
    embed(data_root)
    ledger.record_problems([Problem("a", DINOV3.kind, "failed", "model_error", "d", "r")])

    assert problems_of_kind(Inventory(data_root), ledger, DINOV3) == []


def test_problems_of_public_data_are_not_of_the_records(data_root, ledger):
    ledger.record_problems([Problem("coco/p/train.jsonl:1", "rescale_preset", "refused", "undecodable", "d", "r")])

    assert problems_of_records(Inventory(data_root), ledger) == []
    assert problems_of_kind(Inventory(data_root), ledger, DINOV3) == []


def test_earliest_of_equal_problems_is_given(data_root, ledger):
    photos(data_root, "b")
    (data_root.approved / "b.png").write_bytes(b"no picture")
    embed(data_root, DINOV3)
    first = "2026-01-01T00:00:00+00:00"
    ledger.record_problems(msgspec.structs.replace(p, asset=VAE.kind, at=first) for p in ledger.problems())

    (problem,) = problems_of_kind(Inventory(data_root), ledger, T5)
    assert problem.since == first
