"""Near vectors are found, and the groups they form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline.curation import similarity
from imagemill.pipeline.curation.similarity import (
    block_size,
    cells,
    connected,
    make_index,
    search_threads,
    similar_pairs,
    training_size,
)


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def groups_of(vectors, threshold, *, size=100, probes=16):
    """Rows by group, as the report finds them."""
    index = make_index(vectors.shape[1], len(vectors), lambda: vectors[: training_size(len(vectors))], probes=probes)
    blocks = (vectors[i : i + size] for i in range(0, len(vectors), size))
    return [group.tolist() for group in connected(len(vectors), similar_pairs(index, blocks, threshold))]


def planted(count, pairs, seed=0, width=64):
    """Random directions, and for each pair one more vector at a cosine of about 0.99 to a chosen one."""
    random = np.random.default_rng(seed)
    rows = unit(random.standard_normal((count, width)))
    chosen = random.choice(count, 2 * pairs, replace=False)
    for one, other in chosen.reshape(-1, 2):
        rows[other] = unit((rows[one] + 0.14 * unit(random.standard_normal((1, width)))[0])[None])[0]
    return rows, sorted(sorted(map(int, pair)) for pair in chosen.reshape(-1, 2))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pairs_are_found_within_and_between_blocks(size):
    rows, expected = planted(300, 40)

    assert sorted(groups_of(rows, 0.97, size=size)) == expected


def test_exact_index_finds_what_comparing_all_pairs_finds():
    rows = unit(np.random.default_rng(1).standard_normal((200, 8)))  # few dimensions: cosines of every size
    near = np.triu(rows.astype(np.float64) @ rows.T.astype(np.float64) >= 0.9, 1)
    expected = connected(200, [np.nonzero(near)])

    assert groups_of(rows, 0.9) == [group.tolist() for group in expected]
    assert 2 < len(expected) < 100


def test_large_index_finds_the_pairs_that_the_exact_one_finds(monkeypatch):
    monkeypatch.setattr(similarity, "EXACT_UP_TO", 1000)
    rows, expected = planted(6000, 300)

    assert cells(6000) > 0
    assert sorted(groups_of(rows, 0.97)) == expected


def test_equal_vectors_are_near_at_any_threshold():
    """The cosine of a float32 vector with itself may be 0.9999993."""
    rows = unit(np.random.default_rng(2).standard_normal((50, 1024)))

    assert groups_of(np.concatenate([rows, rows]), 1.0) == [[n, n + 50] for n in range(50)]


def test_vector_can_be_read_back_from_either_index(monkeypatch):
    rows, _ = planted(6000, 1)
    for limit in (1000, 10_000):
        monkeypatch.setattr(similarity, "EXACT_UP_TO", limit)
        index = make_index(64, 6000, lambda: rows[: training_size(6000)], probes=1)
        index.add(rows)
        assert np.array_equal(index.reconstruct(4321), rows[4321])


def test_training_takes_a_part_of_the_vectors_and_searches_stay_bounded():
    for count in (0, 1, 50_000, 50_001, 1_000_000):
        assert training_size(count) <= count
        assert block_size(count) * count <= max(1 << 25, 32 * count)
    assert (cells(50_000), training_size(50_000)) == (0, 0)
    assert training_size(50_001) >= 39 * cells(50_001), "else faiss warns"


@given(st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20)))
))  # fmt: skip
def test_groups_are_the_connected_components(case):
    """For any pairs in any order, the groups are the sets of a plain union-find."""
    count, batches = case
    sets = {n: {n} for n in range(count)}
    for one, other in (pair for batch in batches for pair in batch):
        union = sets[one] | sets[other]
        for n in union:
            sets[n] = union
    expected = sorted({tuple(sorted(group)) for group in sets.values() if len(group) > 1})

    pairs = [tuple(np.array(batch, np.int64).reshape(-1, 2).T) for batch in batches]
    assert sorted(tuple(group.tolist()) for group in connected(count, pairs)) == expected


def test_long_chain_is_one_group():
    rows = np.arange(5000)

    assert [len(group) for group in connected(5000, [(rows[1:], rows[:-1])])] == [5000]


def test_search_runs_beside_torch_and_leaves_its_threads_alone():
    """Both bring an OpenMP; a clash of the two ends the process. Reference: the libraries' own reports of it."""
    import faiss
    import torch

    threads, before = torch.get_num_threads(), faiss.omp_get_max_threads()
    matrix = torch.ones(500, 500)
    with search_threads(before + 1):
        assert faiss.omp_get_max_threads() == before + 1
        rows, expected = planted(300, 40)
        assert sorted(groups_of(rows, 0.97)) == expected
        assert (matrix @ matrix).sum().item() == 500.0**3
    assert (torch.get_num_threads(), faiss.omp_get_max_threads()) == (threads, before)
    assert (matrix @ matrix).sum().item() == 500.0**3
