"""Images shared by hardlink: missing ones are linked, others never touched, all refusals reported together."""

import errno
import os
from pathlib import Path

import pytest

from imagemill.formats import hardlinks
from imagemill.formats.hardlinks import LinksRefused, NotLinkable, check_file_system, link_tree, plan_links
from imagemill.fs.atomic import temporaries

NAMES = ["images/a.jpg", "images/b.jpg", "images/train/a.jpg", "images/train/deep er/ü.jpg"]


@pytest.fixture
def base(tmp_path):
    base = tmp_path / "base"
    for name in NAMES:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    return base


@pytest.fixture
def derived(tmp_path):
    return tmp_path / "base_max60"


def link(base, derived, names=NAMES):
    return link_tree(plan_links(names, base, derived))


def state(folder):
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def refusals(base, derived, names=NAMES):
    """Return the refused paths, and check that nothing is written."""
    before = state(derived)
    with pytest.raises(LinksRefused) as caught:
        link(base, derived, names)
    assert state(derived) == before
    assert [path for path in caught.value.refused if path not in str(caught.value)] == []
    return caught.value


def test_missing_images_are_linked_to_the_base_files(base, derived):
    """Links have the same relative path and inode, and no bytes of their own. Spec: docs/spec/presets.md#hardlinks"""
    assert link(base, derived) == len(NAMES)
    for name in NAMES:
        assert os.path.samefile(base / name, derived / name)
    assert not (derived / "images").is_symlink()


def test_only_named_images_are_linked(base, derived):
    """Images of dropped records are not linked. Spec: docs/spec/presets.md#hardlinks"""
    assert link(base, derived, NAMES[:1]) == 1
    assert list(state(derived)) == NAMES[:1]


def test_linked_images_are_left_alone(base, derived):
    """Spec: docs/spec/presets.md#hardlinks"""
    link(base, derived)
    before = state(derived)

    plan = plan_links(NAMES, base, derived)

    assert (plan.missing, plan.linked, plan.refused) == ({}, len(NAMES), {})
    assert link_tree(plan) == 0
    assert state(derived) == before


def test_rest_of_a_killed_run_is_linked(base, derived):
    """Spec: docs/spec/presets.md#hardlinks"""
    link(base, derived, NAMES[1:3])
    plan = plan_links(NAMES, base, derived)
    assert (plan.linked, plan.missing) == (2, {"images": ["a.jpg"], "images/train/deep er": ["ü.jpg"]})
    assert link_tree(plan) == 2
    assert {name: (base / name).stat().st_ino for name in NAMES} == {n: s[0] for n, s in state(derived).items()}


@pytest.mark.parametrize("kind", ["other", "copy", "symlink", "folder", "link_of_another"])
def test_anything_else_under_the_name_is_refused(base, derived, kind):
    """Spec: docs/spec/presets.md#hardlinks"""
    path = derived / NAMES[0]
    path.parent.mkdir(parents=True)
    match kind:
        case "other":
            path.write_text("other")
        case "copy":
            path.write_bytes((base / NAMES[0]).read_bytes())
        case "symlink":
            path.symlink_to(base / NAMES[0])
        case "folder":
            path.mkdir()
        case "link_of_another":
            path.hardlink_to(base / NAMES[1])

    error = refusals(base, derived)

    assert list(error.refused) == [NAMES[0]]
    assert "delete base_max60 and run coord again" in str(error)


def test_other_image_among_many_linked_ones_is_found(base, derived):
    """The shortcut of a rerun, which compares listings alone, is inconclusive here."""
    link(base, derived)
    (derived / NAMES[2]).unlink()
    (derived / NAMES[2]).hardlink_to(base / NAMES[0])
    assert list(refusals(base, derived).refused) == [NAMES[2]]


def test_image_that_the_base_lacks_is_refused_with_the_repair(base, derived):
    """Spec: docs/spec/presets.md#hardlinks"""
    (base / NAMES[0]).unlink()
    error = refusals(base, derived)
    assert list(error.refused) == [NAMES[0]]
    assert "repair the base: run imagemill preset rescale for base" in str(error)


def test_image_that_the_base_lost_after_it_was_linked_is_refused(base, derived):
    link(base, derived)
    (base / NAMES[3]).unlink()
    assert list(refusals(base, derived).refused) == [NAMES[3]]


def test_all_refusals_are_reported_at_once(base, derived):
    """Both reasons and both remedies are reported; nothing is linked. Spec: docs/spec/presets.md#strictness"""
    (base / NAMES[0]).unlink()
    (derived / "images").mkdir(parents=True)
    (derived / NAMES[1]).write_text("other")
    (base / "images/link.jpg").symlink_to("b.jpg")
    error = refusals(base, derived, [*NAMES, "images/gone/x.jpg", "images/link.jpg", "top.jpg"])
    assert set(error.refused) == {NAMES[0], NAMES[1], "images/gone/x.jpg", "images/link.jpg", "top.jpg"}
    assert "repair the base" in str(error)
    assert "delete base_max60" in str(error)


def test_file_beside_images_is_no_image(base, derived):
    """A record may not have the base's manifest or records linked into the derived preset."""
    (base / "pipeline_manifest.json").write_text("{}")
    assert refusals(base, derived, ["pipeline_manifest.json"]).refused == {
        "pipeline_manifest.json": "not under images/"
    }


@pytest.mark.parametrize("side", ["base", "derived"])
def test_symlinked_folder_is_refused(base, derived, tmp_path, side):
    """`images/` is always a real directory, and so is every folder in it. Spec: docs/spec/presets.md#hardlinks"""
    elsewhere = tmp_path / "elsewhere"
    if side == "base":
        os.rename(base / "images", elsewhere)
        (base / "images").symlink_to(elsewhere)
    else:
        elsewhere.mkdir()
        derived.mkdir()
        (derived / "images").symlink_to(elsewhere)
    assert set(refusals(base, derived).refused) == set(NAMES)
    assert side == "base" or os.listdir(elsewhere) == []


def test_listing_with_other_inodes_than_stat_is_settled_by_stat(base, derived, monkeypatch):
    """On some file systems a listing has other inode numbers than stat, so a mismatch there is inconclusive."""
    link(base, derived)
    real = hardlinks._inodes
    monkeypatch.setattr(hardlinks, "_inodes", lambda *a, **k: {n: i + len(str(a[0])) for n, i in real(*a, **k).items()})
    assert plan_links(NAMES, base, derived)._replace(source=base) == (base, derived, {}, len(NAMES), {})


def test_link_that_another_run_made_meanwhile_is_fine(base, derived):
    plan = plan_links(NAMES, base, derived)
    link(base, derived)
    assert link_tree(plan) == len(NAMES)


def test_file_that_appeared_meanwhile_is_refused_and_the_others_are_linked(base, derived):
    plan = plan_links(NAMES, base, derived)
    (derived / "images").mkdir(parents=True)
    (derived / NAMES[0]).write_text("mine")
    (base / NAMES[1]).unlink()
    with pytest.raises(LinksRefused) as caught:
        link_tree(plan)
    assert set(caught.value.refused) == set(NAMES[:2])
    assert (derived / NAMES[0]).read_text() == "mine"
    assert os.path.samefile(base / NAMES[3], derived / NAMES[3])


def test_trial_link_leaves_nothing(base, tmp_path):
    """Spec: docs/spec/presets.md#hardlinks"""
    check_file_system(base / NAMES[0], tmp_path)
    assert os.listdir(tmp_path) == ["base"]


def test_file_system_without_hardlinks_is_reported_with_the_remedy(base, tmp_path, monkeypatch):
    """Bytes are not copied instead. Spec: docs/spec/presets.md#hardlinks"""

    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(NotLinkable, match="no hardlinks here") as caught:
        check_file_system(base / NAMES[0], tmp_path)
    assert "one folder" in str(caught.value)
    assert temporaries(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or not os.access("/dev/shm", os.W_OK), reason="no second file system")
def test_two_file_systems_are_reported_with_the_remedy(base, tmp_path_factory):
    """Spec: docs/spec/presets.md#hardlinks"""
    if os.stat("/dev/shm").st_dev == base.stat().st_dev:
        pytest.skip("temporary files are on it, too")
    with pytest.raises(NotLinkable, match="two file systems"):
        check_file_system(base / NAMES[0], Path("/dev/shm"))
