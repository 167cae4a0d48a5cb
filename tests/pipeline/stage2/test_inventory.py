"""Listings of a data root's folders that are made by another process.

Reference: decision 30.
"""

import pytest

from imagemill.domain.embedding_specs import VAE, embedding_specs
from imagemill.pipeline.stage2 import record_index
from imagemill.pipeline.stage2.inventory import Inventory
from tests.helpers.stage2 import foreign, record_of


@pytest.fixture
def root(data_root):
    foreign(data_root, *(record_of(name) for name in ("a", "b c", "é", "10%2Fd")))
    (data_root.derived / VAE.folder / "b c.npy").unlink()
    return data_root


def test_listing_ahead_is_that_of_each_folder(root, monkeypatch):
    monkeypatch.setattr(record_index, "_MANY_BYTES", 0)
    ahead, plain = Inventory(root), Inventory(root)
    ahead.list_ahead()

    assert ahead.ahead is not None
    for spec in embedding_specs():
        assert ahead.files(spec) == plain.files(spec)
        assert list(ahead.files(spec)) == list(plain.files(spec))
    assert "b c" not in ahead.files(VAE)
    assert ahead.ahead is None


def test_few_records_start_no_process(root):
    inventory = Inventory(root)
    inventory.list_ahead()

    assert inventory.ahead is None
    assert "a" in inventory.files(VAE)


def test_folder_that_was_listed_is_not_listed_again(root, monkeypatch):
    monkeypatch.setattr(record_index, "_MANY_BYTES", 0)
    inventory = Inventory(root)
    inventory.files(VAE)
    inventory.list_ahead()

    assert inventory.ahead is None


def test_kinds_share_the_names_of_equal_listings_also_after_steps_have_made_files(data_root):
    """A million names in several tables would take more memory than anything else."""
    inventory, specs = Inventory(data_root), embedding_specs()
    assert [len(inventory.files(spec)) for spec in specs] == [0, 0, 0]
    foreign(data_root, record_of("a"), record_of("b"))
    inventory.outdated, inventory.worked_on = {spec.kind for spec in specs}, {"a", "b"}

    first, *others = [inventory.current_files(spec) for spec in specs]

    assert list(first) == ["a", "b"]
    assert [other.sent(first)[0] for other in others] == [None, None]
