"""Plans that a command continues after its steps equal those that are made from scratch."""

import pytest

from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.pipeline.stage2 import current_plans as module
from imagemill.pipeline.stage2.current_plans import current_plans
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import plans_for
from imagemill.store.ledger import Ledger, Problem
from tests.helpers.passes import run_pass
from tests.helpers.stage2 import embed, photos, surveyed, with_encoder, worker_of
from tests.helpers.stubs import StubEncoder


@pytest.fixture
def planned(data_root, monkeypatch):
    """Eight complete images and a new one, planned; `asked` has the number of images of each later call of the planner."""
    photos(data_root, *"abcdefgh")
    embed(data_root)
    photos(data_root, "new")
    asked = []
    monkeypatch.setattr(
        module, "plans_for", lambda specs, ids, *given: asked.append(len(ids)) or plans_for(specs, ids, *given)
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


def assert_same_as_from_scratch(root, inventory, ledger, awaited=frozenset()):
    found = sorted_plans(current_plans(inventory, ledger, awaited))
    whole = surveyed(root, ledger)
    assert found == sorted_plans(plans_for(embedding_specs(), list(whole.scan.sources), whole, ledger, awaited))
    return found


def embed_new(root, inventory, ledger):
    for spec in embedding_specs():
        jobs = plans_for([spec], ["new"], inventory, ledger)[spec].jobs
        run_pass(worker_of(root, with_encoder(spec, StubEncoder)), jobs, ledger)
        inventory.outdated.add(spec.kind)
    inventory.worked_on.add("new")
    inventory.refresh()


def test_only_images_that_steps_have_worked_on_are_planned_again(planned):
    root, inventory, ledger, asked = planned
    embed_new(root, inventory, ledger)

    found = assert_same_as_from_scratch(root, inventory, ledger)

    assert asked == [1]
    assert found[VAE.kind][1] == [*"abcdefgh", "new"]


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
def test_continued_plans_equal_those_from_scratch(planned, change):
    root, inventory, ledger, _ = planned
    CHANGES[change](root, inventory, ledger)

    assert_same_as_from_scratch(root, inventory, ledger)


def test_image_that_waits_for_a_caption_is_planned_again(planned):
    root, inventory, ledger, _ = planned

    assert_same_as_from_scratch(root, inventory, ledger, frozenset("e"))
    assert_same_as_from_scratch(root, inventory, ledger)


def test_change_by_another_process_makes_all_plans_again(planned):
    root, inventory, ledger, asked = planned
    with Ledger(root.ledger) as other:
        other.forget_sources(["a"])

    assert_same_as_from_scratch(root, inventory, ledger)
    assert asked == [9]


def test_first_plans_are_made_for_all_images(data_root):
    photos(data_root, "a", "b")
    with Ledger(data_root.ledger) as ledger:
        inventory = Inventory(data_root)
        inventory.survey(ledger)
        assert [len(plan.jobs) for plan in current_plans(inventory, ledger, frozenset()).values()] == [2, 2, 2]
