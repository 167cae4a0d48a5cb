"""Plans of a command after its steps equal those that are made from all rows of the ledger."""

import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.pipeline.stage2 import plan as module
from imagemill.pipeline.stage2.current_plans import current_plans, jobs_in_parts
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import LedgerSnapshot, plan_embedding, plans_for
from imagemill.store.ledger import Ledger, Problem
from tests.helpers.passes import run_pass
from tests.helpers.stage2 import embed, photos, surveyed, with_encoder, worker_of
from tests.helpers.stubs import StubEncoder


@pytest.fixture
def planned(data_root, monkeypatch):
    """Eight complete images and a new one, planned; `asked` has the numbers of images whose rows are looked at later."""
    photos(data_root, *"abcdefgh")
    embed(data_root)
    photos(data_root, "new")
    asked = []
    monkeypatch.setattr(
        module, "plan_embedding", lambda spec, ids, *given: asked.append(len(ids)) or plan_embedding(spec, ids, *given)
    )
    with Ledger(data_root.ledger) as ledger:
        inventory = surveyed(data_root, ledger)
        current_plans(inventory, ledger, frozenset())
        asked.clear()
        yield data_root, inventory, ledger, asked


def sorted_plans(plans):
    def items(part):
        return sorted(getattr(each, "image_id", getattr(each, "item", each)) for each in part)

    return {s.kind: [items(part) for part in (p.jobs, p.done, p.refused, p.absent)] for s, p in plans.items()}


def assert_same_as_from_all_rows(root, inventory, ledger, awaited=frozenset()):
    found = sorted_plans(current_plans(inventory, ledger, awaited))
    whole = surveyed(root, ledger)
    ids, known = list(whole.scan.sources), LedgerSnapshot.read(ledger)
    plans = {
        spec: plan_embedding(
            spec, ids, whole.scan, known, ledger.files(spec.kind), whole.files(spec), whole.recorded, awaited
        )
        for spec in embedding_specs()
    }
    assert found == sorted_plans(plans)
    return found


def embed_new(root, inventory, ledger):
    for spec in embedding_specs():
        jobs = plans_for([spec], ["new"], inventory, ledger)[spec].jobs
        run_pass(worker_of(root, with_encoder(spec, StubEncoder)), jobs, ledger)
        inventory.outdated.add(spec.kind)
    inventory.worked_on.add("new")
    inventory.refresh()


def test_only_images_whose_rows_have_changed_are_planned_again(planned):
    root, inventory, ledger, asked = planned
    embed_new(root, inventory, ledger)
    asked.clear()

    found = assert_same_as_from_all_rows(root, inventory, ledger)

    assert asked == [1, 1, 1]
    assert found[VAE.kind][1] == [*"abcdefgh", "new"]


def test_all_images_are_planned_again_if_their_changes_are_no_longer_known(planned):
    """A merge of another process has deleted the row changes that it has seen."""
    root, inventory, ledger, asked = planned
    with Ledger(root.ledger) as other:
        other.forget_sources(["a"])
        other.record_merged(root.stage2_jsonl, "posix:1:2:3", "", other.last_row_change(), compared_all=True)
        other.forget_row_changes()

    found = assert_same_as_from_all_rows(root, inventory, ledger)

    assert "a" not in found[VAE.kind][1]
    assert asked == [2, 2, 2], "of the others, columns are compared"


def test_files_that_planning_has_compared_are_not_checked_again(data_root):
    """Those of images that steps have worked on are, and all of a folder that was listed again as a whole."""
    photos(data_root, *"abcdefghijklm")
    embed(data_root)
    photos(data_root, "new")
    with Ledger(data_root.ledger) as ledger:
        inventory = surveyed(data_root, ledger)
        list(jobs_in_parts(embedding_specs(), inventory, ledger))
        assert inventory.unchanged(VAE) == set("abcdefghijklm")

        embed_new(data_root, inventory, ledger)
        assert inventory.unchanged(VAE) == set("abcdefghijklm")

        inventory.outdated.add(VAE.kind)
        inventory.worked_on.add("a")
        assert inventory.unchanged(VAE) == set(), "more than a tenth"
        assert inventory.unchanged(T5) == set("bcdefghijklm")


def remove_file(root, inventory, ledger):
    (root.derived / DINOV3.folder / "b.npy").unlink()
    inventory.listed.clear()
    ledger.record_setting("any", "change")


def replace_file(root, inventory, ledger):
    path = root.derived / VAE.folder / "c.npy"
    path.write_bytes(path.read_bytes())
    path.touch()
    remove_file(root, inventory, ledger)


CHANGES = {
    "a problem of a done image": lambda root, inventory, ledger: ledger.record_problems(
        [Problem("a", VAE.kind, "refused", "undecodable", "why", "do", inventory.scan.sources["a"].stat)]
    ),
    "a removed file": remove_file,
    "a replaced file": replace_file,
    "a forgotten image": lambda root, inventory, ledger: (
        ledger.forget_sources(["d"]),
        inventory.worked_on.add("d"),
    ),
    "a changed setting": lambda root, inventory, ledger: ledger.record_setting("pixels.color", "ignore"),
    "a forgotten kind": lambda root, inventory, ledger: ledger.forget_files(T5.kind),
    "a regeneration": lambda root, inventory, ledger: ledger.note_regeneration(T5.kind, "under way"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_plans_after_a_change_equal_those_from_all_rows(planned, change):
    root, inventory, ledger, _ = planned
    CHANGES[change](root, inventory, ledger)

    assert_same_as_from_all_rows(root, inventory, ledger)


def test_image_that_waits_for_a_caption_is_planned_again(planned):
    root, inventory, ledger, _ = planned

    assert_same_as_from_all_rows(root, inventory, ledger, frozenset("e"))
    assert_same_as_from_all_rows(root, inventory, ledger)


def test_change_by_another_process_is_seen(planned):
    root, inventory, ledger, asked = planned
    with Ledger(root.ledger) as other:
        other.forget_sources(["a"])

    assert_same_as_from_all_rows(root, inventory, ledger)
    assert asked == [1, 1, 1]


def test_first_plans_are_made_for_all_images(data_root):
    photos(data_root, "a", "b")
    with Ledger(data_root.ledger) as ledger:
        inventory = Inventory(data_root)
        inventory.survey(ledger)
        assert [len(plan.jobs) for plan in current_plans(inventory, ledger, frozenset()).values()] == [2, 2, 2]
