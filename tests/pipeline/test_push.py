"""Plans of a push on plain values: uploads, versions and deletions."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import ImagemillError
from imagemill.formats.published import (
    Pointer,
    Replaced,
    decode_pointer,
    encode_pointer,
    kept_sets,
    set_key,
    successor,
    tar_key,
    version_of,
)
from imagemill.fs.blobs import Blob
from imagemill.pipeline.push import missing_tars, moved_images, superfluous

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
DAYS = st.floats(0, 60)


def at(days):
    return BEGAN + timedelta(days=days)


def blob(key, days=0.0, size=1):
    return Blob(key, size, "tag", at(days))


def test_pointer_is_read_as_it_is_written():
    pointer = Pointer(
        root="r", writer="w", sets={"1024x1024": "a"}, previous=[Replaced({"1024x1024": "b"}, at(1))], time=at(2)
    )

    assert decode_pointer(encode_pointer(pointer), "here") == pointer
    with pytest.raises(ImagemillError, match="not a pointer that this release reads"):
        decode_pointer(b'{"format": "another"}', "here")


def test_version_depends_on_the_sets_alone():
    assert version_of({"a": "1", "b": "2"}) == version_of({"b": "2", "a": "1"}) != version_of({"a": "2", "b": "1"})


@st.composite
def histories(draw):
    """Times of pushes and of deletions, and how long versions are kept."""
    events = draw(st.lists(st.tuples(DAYS, st.sampled_from(["push", "collect"])), min_size=1, max_size=30))
    return sorted(events), draw(st.floats(0, 30))


@given(histories())
def test_deletion_spares_what_a_version_replaced_within_the_kept_days_needs(history):
    events, keep_days = history
    objects: dict[str, Blob] = {}
    pointer, needs, replaced = None, {}, []
    for n, (days, event) in enumerate(events):
        now = at(days)
        if event == "push":
            # Tars are shared by some versions.
            identifier, tars = f"{n:032x}", {tar_key(f"xxh3:{k % 7:032x}") for k in range(n, n + 3)}
            kept = kept_sets(pointer, now, keep_days) if pointer else set()
            named = {key for each in kept for key in needs[each]}
            for key in missing_tars(dict.fromkeys(tars, 1), objects, named, now, keep_days):
                objects[key] = Blob(key, 1, "tag", now)
            objects[set_key(identifier, "manifest.json")] = Blob(set_key(identifier, "manifest.json"), 1, "tag", now)
            if pointer:
                replaced.append((next(iter(pointer.sets.values())), now))
            previous = successor(pointer, now, keep_days)
            needs[identifier] = tars
            pointer = Pointer(root="r", writer="w", sets={"b": identifier}, previous=previous, time=now)
        elif pointer:
            kept = kept_sets(pointer, now, keep_days)
            tars = {key for each in kept for key in needs[each]}
            for key in superfluous(objects.values(), kept, tars, now - timedelta(days=keep_days)):
                del objects[key]
        if pointer:
            current = next(iter(pointer.sets.values()))
            readable = {current, *(each for each, until in replaced if until > now - timedelta(days=keep_days))}
            for each in readable:
                assert set_key(each, "manifest.json") in objects
                assert needs[each] <= objects.keys()


def test_tar_that_may_be_about_to_be_deleted_is_sent_again():
    needed = {"tars/a.tar": 1, "tars/b.tar": 1, "tars/c.tar": 1, "tars/d.tar": 1}
    found = {
        each.key: each
        for each in (blob("tars/a.tar"), blob("tars/b.tar"), blob("tars/c.tar", 9), blob("tars/d.tar", 9, 2))
    }

    assert missing_tars(needed, found, {"tars/a.tar"}, at(10), 14) == ["tars/b.tar", "tars/d.tar"]
    assert missing_tars(needed, found, set(), None, 14) == ["tars/d.tar"]


def test_deletion_takes_indices_with_their_tars():
    found = [
        blob("tars/a.tar"),
        blob("tars/a.tar.idx"),
        blob("tars/b.tar"),
        blob("tars/b.tar.idx"),
        blob("sets/x/index.jsonl"),
    ]

    assert superfluous(found, {"x"}, {"tars/a.tar"}, at(1)) == ["tars/b.tar", "tars/b.tar.idx"]
    assert superfluous(found, {"x"}, {"tars/a.tar"}, at(-1)) == []
    assert superfluous(found, set(), set(), None) == [each.key for each in found]


@pytest.mark.parametrize(
    ("chosen", "published", "others", "moved"),
    [
        ({"a": {1, 2}}, {"a": {1}, "b": {3}}, {"b": {3}}, set()),
        ({"a": {1, 3}}, {"a": {1}, "b": {3}}, {"b": set()}, {3}),
        ({"a": {1}}, {"a": {1, 2}, "b": {3}}, {"b": {2, 3}}, {2}),
        ({"a": {1}}, {"a": {1, 2}, "b": {3}}, {"b": {3}}, set()),
    ],
)
def test_images_that_move_between_buckets(chosen, published, others, moved):
    assert moved_images(chosen, published, others) == moved
