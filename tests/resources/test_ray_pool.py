"""The queue of a cluster's workers, without a cluster: agreement, deaths, room. Runs on nodes are in tests/cli/test_ray.py."""

import socket
from collections import deque
from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectLostError, RayActorError

from imagemill.pipeline.remote import About, Parcel
from resources import ray_pool
from resources.ray_pool import DEATHS_IN_A_ROW, NodesDiffer, NoWorkers, RayPool, WorkerDemand


def recipe():
    raise AssertionError("no worker is built here")


class Task:
    """A pass over texts."""

    recipe, gpus, modules, model_batch = staticmethod(recipe), 0, (), 4

    def __init__(self, recorded=None):
        self.recorded, self.agreed = recorded, None

    def name_of(self, key):
        return key

    def parts(self, key):
        return [key]

    def lost(self, key, how):
        return key, how

    def fits(self, about):
        return about.model == self.recorded

    def agree(self, about):
        self.agreed = about


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.setattr(ray_pool.ray, "kill", lambda handle: None)
    return []


def pool_of(notes, task=None, **demand):
    return RayPool(task or Task(), WorkerDemand(**demand), notes.append)


def actor_of(pool, name, model=None, keys=()):
    known = About(node=name, sources={}, versions={}, model=model or {"weights": "w"})
    actor = ray_pool._Actor(SimpleNamespace(), f"id of {name}", name, 0.0, None, known=known)
    if keys:
        actor.batches = deque([(None, pool._queue.batch(Parcel(key, None, 1) for key in keys))])
    pool._actors.append(actor)
    return actor


def test_first_workers_that_agree_become_the_reference(notes):
    """Spec: docs/spec/engines.md#reference"""
    task = Task()
    pool = pool_of(notes, task)

    pool._agree([actor_of(pool, "one"), actor_of(pool, "two")])

    assert task.agreed == pool._actors[0].known
    assert notes == []


def test_first_workers_that_differ_end_the_pass_before_any_batch(notes):
    """Spec: docs/spec/engines.md#reference"""
    pool = pool_of(notes)
    ready = [actor_of(pool, "one"), actor_of(pool, "two", {"weights": "v"})]

    with pytest.raises(NodesDiffer, match="the nodes one and two would not make the same files: weights is v, not w"):
        pool._agree(ready)


@pytest.mark.parametrize(
    ("recorded", "demand"), [({"weights": "v"}, {}), (None, {"accept_node": "two"})], ids=["recorded", "accepted"]
)
def test_worker_with_the_right_model_counts(notes, recorded, demand):
    """Spec: docs/spec/engines.md#reference"""
    task = Task(recorded)
    pool = pool_of(notes, task, **demand)
    ready = [actor_of(pool, "one"), actor_of(pool, "two", {"weights": "v"})]

    pool._agree(ready)

    assert task.agreed == ready[1].known
    assert [actor.name for actor in pool._actors] == ["two"]
    assert notes == ["node one gets no work: weights is w, not v"]


def test_row_of_another_image_ends_the_pass(notes):
    pool = pool_of(notes)
    actor = actor_of(pool, "one", keys=["a"])

    with pytest.raises(NodesDiffer, match="the worker on one returned b, which it was not asked for"):
        pool._take(actor, ["b"])


def test_batch_without_a_row_for_each_key_ends_the_pass_unless_it_was_interrupted(notes):
    pool = pool_of(notes)
    actor = actor_of(pool, "one", keys=["a", "b"])
    actor.batches[0][1].names.discard("a")

    with pytest.raises(NodesDiffer, match="the worker on one returned nothing for b"):
        pool._end_of_batch(actor)

    actor = actor_of(pool, "two", keys=["a"])
    pool._stopping = True
    pool._end_of_batch(actor)


def test_deaths_in_a_row_end_the_pass(notes, monkeypatch):
    """Spec: docs/spec/engines.md#deaths"""
    monkeypatch.setattr(ray_pool, "_cause", lambda *_: ("was killed", True))
    pool = pool_of(notes)

    for _ in range(DEATHS_IN_A_ROW - 1):
        assert list(pool._after_death(actor_of(pool, "one", keys=["a", "b"]), None)) == []
    with pytest.raises(NoWorkers, match="8 workers died one after the other, the last one on one: it was killed"):
        list(pool._after_death(actor_of(pool, "one", keys=["a", "b"]), None))


def test_key_that_was_alone_at_two_deaths_gets_its_row(notes, monkeypatch):
    """Spec: docs/spec/engines.md#deaths"""
    monkeypatch.setattr(ray_pool, "_cause", lambda *_: ("was killed", True))
    pool = pool_of(notes)

    rows = [row for _ in range(2) for row in pool._after_death(actor_of(pool, "one", keys=["a"]), None)]

    assert rows == [("a", "was killed")]


@pytest.mark.parametrize(
    ("has", "asks", "room"),
    [
        ({"CPU": 8, "GPU": 2}, {"CPU": 2, "GPU": 1}, 2),
        ({"CPU": 8, "GPU": 2}, {"CPU": 1, "GPU": 0.5}, 4),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),
        ({"GPU": 1}, {"CPU": 1}, 0),
        ({"CPU": 1}, {}, 1),
    ],
)
def test_room_on_a_node_is_that_of_the_scarcest_resource(has, asks, room):
    assert ray_pool._room(has, asks) == room


def answered(monkeypatch, answer):
    """Let every worker that was asked answer so; an exception is raised."""

    def get(ref):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray_pool.ray, "wait", lambda refs, **how: (refs, []))
    monkeypatch.setattr(ray_pool.ray, "get", get)


def test_worker_that_dies_before_it_answers_is_started_again(notes, monkeypatch):
    """Spec: docs/spec/engines.md#deaths"""
    pool = pool_of(notes)
    answered(monkeypatch, RayActorError())

    for number in range(ray_pool.TRIES):
        assert notes == []
        actor_of(pool, "one").known = None
        pool._actors[-1].about = number
        pool._take_answers()

    assert pool._actors == []
    assert notes[0].startswith("node one gets no work: its worker does not start")


def test_node_with_other_software_gets_no_work(notes, monkeypatch):
    """Spec: docs/spec/engines.md#reference"""
    pool = pool_of(notes)
    pool._driver = About(node="", sources={"imagemill": "s"}, versions={"torch": "2"})
    actor_of(pool, "one").known = None
    answered(monkeypatch, About(node="one", sources={"imagemill": "t"}, versions={"torch": "2"}))

    pool._take_answers()

    assert notes == ["node one gets no work: source of imagemill is t, not s"]


def test_time_without_a_worker_counts_from_the_last_one(notes, monkeypatch):
    monkeypatch.setattr(ray_pool.ray, "nodes", list)
    pool = pool_of(notes, ready_timeout=300)
    pool._reference, pool._looked = actor_of(pool, "one").known, float("inf")

    pool._last_ready -= 1000
    pool._look_after_nodes()
    pool._actors.clear()
    pool._look_after_nodes()
    pool._last_ready -= 1000
    with pytest.raises(NoWorkers, match="no worker was ready within 300 s"):
        pool._look_after_nodes()


def test_rows_that_are_lost_with_a_node_are_made_again(notes, monkeypatch):
    """Ray raises another error for a row that had not been fetched from the node.

    Spec: docs/spec/engines.md#deaths
    """
    pool = pool_of(notes)
    actor = actor_of(pool, "one", keys=["a"])
    monkeypatch.setattr(ray_pool.ray, "get", raises(ObjectLostError("0" * 56, None, "")))

    death = ray_pool._next_part(iter(["a row"]))
    assert list(pool._after_death(actor, death)) == []

    assert pool._queue.again() == ["a"]
    assert pool._actors == []
    assert pool._deaths_in_a_row == 0


@pytest.mark.parametrize("listens", [True, False])
def test_node_is_lost_if_nothing_listens_at_its_port(notes, monkeypatch, listens):
    """Ray itself needs more time to know it.

    Spec: docs/spec/engines.md#deaths
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = {"NodeID": "id", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
        monkeypatch.setattr(ray_pool.ray, "nodes", lambda: [node])
        if not listens:
            server.close()

        _, counts = ray_pool._cause(RayActorError(), "id", 0)

    assert counts == listens


def raises(error):
    def get(_):
        raise error

    return get
