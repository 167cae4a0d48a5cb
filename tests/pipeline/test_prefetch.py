"""Work ahead on threads: in order, complete, and never more at once than a count and a budget."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.pipeline import prefetch, turns
from imagemill.pipeline.prefetch import bounded_map, map_on


def run(weights, *, threads=2, most=6, budget=10, keeps=lambda made: 0, known=lambda weight: weight, work=lambda x: x):
    """Results, each item being its own weight."""
    with ThreadPoolExecutor(threads) as pool:
        yield from bounded_map(
            pool,
            work,
            weights,
            weigh=known,
            measure=lambda weight: weight,
            keeps=keeps,
            most=lambda: most,
            budget=budget,
            threads=threads,
        )


class Meter:
    """Notes the largest weight and number of what is under way: from its start to when it is taken."""

    def __init__(self, keeps=lambda weight: weight):
        self.lock, self.now, self.keeps = threading.Lock(), [], keeps
        self.heaviest = self.most = 0

    def work(self, weight):
        with self.lock:
            self.now.append(weight)
            self.most = max(self.most, len(self.now))
            self.heaviest = max(self.heaviest, sum(self.now))
        time.sleep(0.0005)
        with self.lock:
            self.now[self.now.index(weight)] = self.keeps(weight)
        return weight

    def take(self, weight):
        with self.lock:
            self.now.remove(self.keeps(weight))


def metered(weights, **how):
    meter = Meter(how.get("keeps", lambda weight: 0))
    taken = []
    for weight in run(weights, work=meter.work, **how):
        meter.take(weight)
        taken.append(weight)
    return meter, taken


weights_of = st.lists(st.integers(0, 25), max_size=30)


@settings(deadline=None, max_examples=60)
@given(weights_of, st.integers(1, 4), st.integers(1, 8), st.booleans(), st.booleans())
def test_every_result_comes_in_order_and_no_more_than_the_budget_is_under_way(weights, threads, most, light, known):
    """One alone may weigh anything. Ends, too: nothing waits for a budget while it holds some of it."""
    meter, taken = metered(
        weights, threads=threads, most=most, budget=10, keeps=(lambda made: 0) if light else (lambda made: made),
        known=(lambda weight: weight) if known else (lambda weight: None),
    )  # fmt: skip

    assert taken == weights
    assert meter.heaviest <= max(10, max(weights, default=0))
    assert meter.most <= most


@pytest.mark.parametrize(("keeps", "started"), [(0, [1, 2]), (4, [1])])
def test_results_that_weigh_nothing_make_room_before_they_are_taken(keeps, started):
    """A shrunk image holds no pixels: the next one is opened although the first has not been consumed."""
    most, done = 3, []

    def source():
        for number in range(1, 8):
            deadline = time.monotonic() + 60
            while len(done) < number - most - 2:  # those started by now
                assert time.monotonic() < deadline
                time.sleep(0.001)
            yield number

    with ThreadPoolExecutor(1) as pool:
        results = bounded_map(
            pool, lambda number: done.append(number) or number, source(), weigh=lambda number: 4, measure=int,
            keeps=lambda made: keeps, most=lambda: most, budget=4, threads=1,
        )  # fmt: skip
        next(results)
        assert done[: len(started)] == started
        assert (len(done) > 1) is (keeps == 0)
        assert list(results) == [2, 3, 4, 5, 6, 7]


def test_items_are_taken_from_their_source_only_as_room_is_made():
    """The source may be as long as it likes."""
    asked = []

    def source():
        for number in range(1000):
            asked.append(number)
            yield 1

    results = run(source(), most=5, budget=3)
    next(results)

    assert len(asked) <= 2 * 5 + 2
    results.close()


def test_error_of_one_item_comes_in_its_place():
    def work(weight):
        if weight == 3:
            raise OSError("no such file")
        return weight

    results = run([1, 2, 3, 4], work=work)

    assert [next(results), next(results)] == [1, 2]
    with pytest.raises(OSError, match="no such file"):
        next(results)


def test_item_of_unknown_weight_is_measured_on_the_pool():
    """Reading a header is work like any other."""
    here, measured = threading.get_ident(), []

    def measure(weight):
        measured.append(threading.get_ident())
        return weight

    with ThreadPoolExecutor(2) as pool:
        results = bounded_map(
            pool, lambda x: x, [1, 2, 3], weigh=lambda x: None if x == 2 else x, measure=measure, keeps=lambda x: 0,
            most=lambda: 2, budget=5, threads=2,
        )  # fmt: skip
        assert list(results) == [1, 2, 3]

    assert len(measured) == 1
    assert here not in measured


def sizes_of_tasks(weights, *, threads, most, budget):
    """Numbers of items that are passed to a thread together."""
    sizes = []

    class Pool(ThreadPoolExecutor):
        def submit(self, work, *given):
            sizes.append(len(given[1]))
            return super().submit(work, *given)

    with Pool(threads) as pool:
        list(bounded_map(
            pool, lambda x: x, weights, weigh=lambda x: x, measure=int, keeps=lambda x: 0, most=lambda: most,
            budget=budget, threads=threads,
        ))  # fmt: skip
    return sizes


def test_light_items_share_tasks_and_heavy_ones_have_their_own():
    """To pass an item to a thread costs about as much as to open a small image."""
    sizes = sizes_of_tasks([1] * 32 + [64] * 3, threads=2, most=32, budget=640)

    assert sizes == [8, 8, 8, 8, 1, 1, 1]


def test_tasks_are_small_enough_for_all_threads():
    sizes = sizes_of_tasks([0] * 200, threads=8, most=64, budget=1)

    assert max(sizes) == 64 // (2 * 8)


def test_light_work_is_done_by_one_thread_at_a_time(monkeypatch):
    monkeypatch.setattr(turns, "LIGHT_CPU_SECONDS", 60)
    monkeypatch.setattr(turns, "_LIGHT_WAIT_SECONDS", 60)
    monkeypatch.setattr(turns, "_LONGEST_WAIT_SECONDS", 60)
    meter = Meter()

    def work(item):
        meter.work(item)
        meter.take(item)

    list(run([1] * 40, threads=4, most=16, budget=100, work=work))

    assert meter.most == 1


def test_results_before_a_failing_item_of_the_same_task_are_yielded():
    def work(item):
        if item == 5:
            raise OSError("no such file")
        return item

    with ThreadPoolExecutor(1) as pool:
        results = bounded_map(
            pool, work, range(8), weigh=lambda x: 0, measure=int, keeps=lambda x: 0, most=lambda: 100, budget=1, threads=1
        )  # fmt: skip

        assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(OSError, match="no such file"):
            next(results)


@given(st.lists(st.integers()))
def test_items_mapped_on_a_pool_keep_their_order(items):
    with ThreadPoolExecutor(2) as pool:
        assert list(map_on(pool, lambda item: item + 1, items)) == [item + 1 for item in items]


def compute():
    end = time.thread_time() + 0.1
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("take_long", [lambda: time.sleep(0.1), compute], ids=["waits", "computes"])
def test_light_work_stays_on_the_thread_of_the_caller_until_it_takes_long(take_long):
    seen = []

    def work(item):
        if item in {200, 210}:
            take_long()  # the second part with such an item is the last of the caller's thread
        seen.append((item, threading.current_thread()))
        return item

    with ThreadPoolExecutor(2) as pool:
        assert list(map_on(pool, work, range(1000))) == list(range(1000))
    own = {item for item, thread in seen if thread is threading.current_thread()}
    assert own >= set(range(211)) or max(own) < 211  # a busy machine may pass work on earlier
    assert not own & set(range(300, 1000))


def test_one_long_wait_leaves_light_work_on_the_thread_of_the_caller(monkeypatch):
    """A process that was stopped, or a core that other programs used, says nothing about the work."""
    monkeypatch.setattr(prefetch, "LIGHT_CPU_SECONDS", 60)
    monkeypatch.setattr(prefetch, "_LIGHT_WAIT_SECONDS", 0.02)  # 0.32 seconds for a part
    threads = set()

    def work(item):
        if item in {0, 500}:
            time.sleep(0.5)
        threads.add(threading.current_thread())

    with ThreadPoolExecutor(2) as pool:
        for _ in map_on(pool, work, range(1000)):
            pass
    assert threads == {threading.current_thread()}
