import pytest

from tests.helpers.shard_sets import shard_set

# 1216x832: smaller than the bucket; 1024x1024: larger in both directions, taller, and of the bucket's own size.
SIZES = {f"small{n}": (32, 24) for n in range(7)} | {
    "large": (1104, 1096), "high.and.odd%": (1000, 1016), "own": (1024, 1024), "tiny": (64, 64),
}  # fmt: skip


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A read-only data root with shards of two buckets: 7 samples in 3 tars, 4 in 2."""
    return shard_set(tmp_path_factory.mktemp("reading") / "data", SIZES)


@pytest.fixture
def own_root(tmp_path):
    """A small data root that tests may damage: two tars of one bucket."""
    return shard_set(tmp_path / "data", dict.fromkeys("abcde", (64, 64)))
