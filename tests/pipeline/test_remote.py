"""Work on other machines: batches, deaths, and what two workers must have in common."""

import pickle
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import ModelUnusable
from imagemill.pipeline.remote import (
    DEATHS_ALONE,
    About,
    BatchEnded,
    BatchFailed,
    NodeWorker,
    Parcel,
    WorkQueue,
    differences,
)
from imagemill.pipeline.software import sources, versions


def queue_of(call=4):
    return WorkQueue(str, call)


def batch_of(queue, *keys, begun=True, alone=True, delivered=()):
    batch = queue.batch(Parcel(key, None, 10) for key in keys)
    batch.begun, batch.alone = begun, alone
    batch.names -= set(delivered)
    return batch


def rest(queue):
    return list(iter(queue.again, None))


def test_batch_that_was_not_begun_returns_as_it_was():
    """Spec: docs/spec/engines.md#deaths"""
    queue = queue_of()

    assert queue.died(batch_of(queue, "a", "b", begun=False), counts=True) == []
    assert rest(queue) == [["a", "b"]]


def test_keys_without_a_row_run_alone_after_a_death():
    """Spec: docs/spec/engines.md#deaths"""
    queue = queue_of()

    queue.died(batch_of(queue, "a", "b", "c", delivered=["b"]), counts=True)

    assert rest(queue) == [["a"], ["c"]]


def test_key_that_was_alone_at_two_deaths_is_lost():
    """Spec: docs/spec/engines.md#deaths"""
    queue = queue_of()

    lost = [queue.died(batch_of(queue, "a"), counts=True) for _ in range(DEATHS_ALONE)]

    assert lost == [[], ["a"]]
    assert rest(queue) == [["a"]]


def test_death_of_a_worker_with_two_batches_counts_for_no_key():
    """The row of the first one may have been made, and the second one have caused the death.

    Spec: docs/spec/engines.md#deaths
    """
    queue = queue_of()

    for _ in range(5):
        assert queue.died(batch_of(queue, "a", alone=False), counts=True) == []
    assert rest(queue) == [["a"]] * 5


def test_single_key_that_was_given_back_waits_for_a_worker_without_a_batch():
    """Spec: docs/spec/engines.md#deaths"""
    queue = queue_of()
    queue.died(batch_of(queue, "a", "b"), counts=True)
    queue.died(batch_of(queue, "c", "d", begun=False), counts=True)

    assert queue.again(idle=False) == ["c", "d"]
    assert queue.again(idle=False) is None
    assert queue.again(idle=True) == ["a"]


def test_key_with_parts_is_divided_at_its_death_alone():
    """Spec: docs/spec/engines.md#deaths"""
    queue = WorkQueue(str, 1, parts=list)

    queue.died(batch_of(queue, "ab", "c"), counts=True)
    assert rest(queue) == [["ab"], ["c"]]
    assert queue.died(batch_of(queue, "ab"), counts=True) == []
    assert rest(queue) == [["a"], ["b"]]
    assert [queue.died(batch_of(queue, "a"), counts=True) for _ in range(DEATHS_ALONE)] == [[], ["a"]]


def test_loss_of_a_node_counts_for_no_key():
    """Spec: docs/spec/engines.md#deaths"""
    queue = queue_of()

    for _ in range(5):
        assert queue.died(batch_of(queue, "a"), counts=False) == []
    assert rest(queue) == [["a"]] * 5


def test_batch_whose_rows_were_all_delivered_leaves_nothing():
    queue = queue_of()

    assert queue.died(batch_of(queue, "a", "b", delivered=["a", "b"]), counts=True) == []
    assert not queue


@given(
    st.sets(st.integers(0, 30), min_size=1),
    st.sets(st.integers(0, 30), max_size=3),
    st.integers(0, 1000),
)
def test_every_key_gets_one_row_and_only_deadly_keys_are_lost(keys, deadly, seed):
    """A model of workers that die on deadly keys, and now and then with their node.

    Spec: docs/spec/engines.md#deaths
    """
    queue, rows, lost, random = queue_of(call=3), Counter(), [], Random(seed)
    todo = [list(keys)[n : n + 6] for n in range(0, len(keys), 6)]
    while todo or queue:
        batch = batch_of(queue, *(queue.again() or todo.pop()))
        if random.random() < 0.1:
            batch.begun = random.random() < 0.5
            queue.died(batch, counts=False)
            continue
        for parcel in batch.parcels:
            if parcel.key in deadly:
                lost += queue.died(batch, counts=True)
                break
            batch.names.discard(str(parcel.key))
            rows[parcel.key] += 1

    assert set(lost) == keys & deadly
    assert rows == Counter(keys - deadly)


@given(
    st.sets(st.integers(0, 30), min_size=1),
    st.sets(st.integers(0, 30), max_size=3),
    st.integers(1, 6),
    st.integers(0, 1000),
)
def test_rows_that_are_lost_with_a_worker_of_two_batches_cost_no_other_key(keys, deadly, size, seed):
    """A model of workers with a second batch in advance, whose last rows before a death never arrive.

    Spec: docs/spec/engines.md#deaths
    """
    queue, rows, lost, random = queue_of(call=3), Counter(), [], Random(seed)
    ordered = sorted(keys)
    todo = [ordered[n : n + size] for n in range(0, len(ordered), size)]
    while todo or queue:
        again = queue.again()
        batches = [batch_of(queue, *(again or todo.pop()))]
        if again is None or len(again) > 1:
            second = queue.again(idle=False) or (todo.pop() if todo else None)
            batches += [batch_of(queue, *second)] if second else []
        made, died = [], False
        for batch, parcel in [(each, parcel) for each in batches for parcel in each.parcels]:
            if died := parcel.key in deadly:
                break
            made.append((batch, parcel.key))
        for batch, key in made[: max(0, len(made) - random.randrange(8))] if died else made:
            batch.names.discard(str(key))
            rows[key] += 1
        # The end of a batch may arrive, or be lost as well.
        while died and len(batches) > 1 and not batches[0].names and random.random() < 0.5:
            batches.pop(0)
        for number, batch in enumerate(batches if died else ()):
            batch.begun, batch.alone = number == 0, len(batches) == 1
            lost += queue.died(batch, counts=True)

    assert sorted(lost) == sorted(keys & deadly)
    assert rows == Counter(keys - deadly)


@pytest.mark.parametrize(
    ("seconds", "size"),
    [(0.1, 16), (10.0, 8), (1000.0, 4)],
    ids=["at most four calls", "five seconds", "never less than a call"],
)
def test_size_of_a_batch_follows_its_time(seconds, size):
    """Spec: docs/spec/engines.md#what-travels"""
    queue = queue_of(call=4)

    queue.took(16, seconds, 5.0, 4)

    assert queue.size == size


ABOUT = About(
    node="one", sources={"imagemill": "s"}, versions={"torch": "2.13.0"}, batch_size="8", model={"dtype": "a"}
)


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        ({"sources": {"imagemill": "t"}}, "source of imagemill is t, not s"),
        ({"sources": {"imagemill": "s", "plugin": "u"}}, "source of plugin is u, not missing"),
        ({"versions": {"torch": "2.14.0"}}, "torch is 2.14.0, not 2.13.0"),
        ({"versions": {}}, "torch is missing, not 2.13.0"),
        ({"device": "cuda"}, "device is cuda, not cpu"),
        ({"batch_size": "16"}, "batch size is 16, not 8"),
        ({"model": {"dtype": "b"}}, "dtype is b, not a"),
    ],
)
def test_fact_in_which_two_workers_differ_is_named(other, fact):
    """Spec: docs/spec/engines.md#reference"""
    assert differences(ABOUT, replace(ABOUT, **other)) == [fact]


def test_equal_workers_on_two_nodes_do_not_differ():
    """Spec: docs/spec/engines.md#reference"""
    assert differences(ABOUT, replace(ABOUT, node="two")) == []


def test_software_names_python_libraries_and_packages():
    """Spec: docs/spec/engines.md#reference"""
    assert {"Python", "torch", "transformers", "diffusers", "numpy", "pillow"} <= versions().keys()
    assert not [version for version in versions().values() if "+" in version]
    assert sources("tests.helpers.toy_kind").keys() == {"imagemill", "tests"}
    assert sources("no_such_package")["no_such_package"] == "missing"


class Doubling:
    """A worker that doubles numbers, and fails at one."""

    def __init__(self, fails=None):
        self.fails, self.stopped = fails, False

    def about(self):
        raise ModelUnusable("no weights", do="copy them")

    def stream(self, payloads):
        for number in payloads:
            if number == self.fails:
                raise ModelUnusable("broken", do="mend it")
            if not self.stopped:
                yield 2 * number

    def stop(self):
        self.stopped = True


def test_rows_of_a_batch_arrive_before_its_end():
    worker = NodeWorker(pickle.dumps(Doubling))

    *parts, end = worker.run([1, 2, 3])

    assert [row for part in parts for row in part] == [2, 4, 6]
    assert isinstance(end, BatchEnded)


def test_rows_before_an_error_arrive_and_the_error_after_them():
    worker = NodeWorker(pickle.dumps(partial(Doubling, fails=3)))

    rows, end = worker.run([1, 2, 3, 4])

    assert rows == [2, 4]
    assert isinstance(end, BatchFailed)
    assert str(end.error) == str(ModelUnusable("broken", do="mend it"))


def test_error_about_a_worker_is_an_answer():
    answer = NodeWorker(pickle.dumps(Doubling)).about()

    assert isinstance(answer, BatchFailed)
    assert isinstance(answer.error, ModelUnusable)


def test_worker_that_was_stopped_begins_no_batch():
    worker = NodeWorker(pickle.dumps(Doubling))
    worker.stop()

    (end,) = worker.run([1, 2])

    assert isinstance(end, BatchEnded)
