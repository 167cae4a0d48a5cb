"""Hostile archives: each gives files in its folder and named problems; never another error, and nothing outside.

Spec: docs/spec/stage2.md#archives
"""

import os
import shutil
import stat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagemill.inputs.unpacking import Limits, unpack
from tests.fuzz.test_parsers import named, within
from tests.helpers.archives import END, hostile, member, pax, tar_of

SOAK, SECONDS = 1_000, 20
REASONS = {"unsafe_path", "bad_name", "link", "not_a_file", "sparse", "exists", "damaged", "limit"}


def entries(folder):
    """Return everything below a folder but the folder of the archive: type, size and target, without following links."""
    found = {}
    for path, folders, names in os.walk(folder):
        if path == str(folder / "data" / "approved" / "0"):
            folders.clear()
            continue
        for name in (*folders, *names):
            place = os.path.join(path, name)
            status = os.lstat(place)
            found[place] = (stat.S_IFMT(status.st_mode), status.st_ino, *([status.st_size] if name in names else []))
    return found


def attack(tmp, data):
    """Import one archive into a new folder; return the result."""
    approved = tmp / "data" / "approved"
    shutil.rmtree(approved, ignore_errors=True)
    approved.mkdir(parents=True)
    (tmp / "outside").mkdir(exist_ok=True)
    (approved / "outside").write_text("beside the folder")
    # Left in the folder by the user, or by an earlier import.
    (approved / "0").mkdir()
    (approved / "0" / "link").symlink_to(tmp / "outside")
    (approved / "0" / "000000000.txt").write_text("a caption")
    archive = tmp / "0.tar"
    archive.write_bytes(data)
    before = entries(tmp)
    limits = Limits(200, 1 << 20)
    with within(SECONDS):
        result = unpack(archive, approved, "0", limits)

    assert entries(tmp) == before, "something outside of the folder changed"
    assert result.reasons.keys() <= REASONS
    assert result.reasons.total() == 0 or result.problems
    assert all(
        each.detail and each.remedy and each.detail.isprintable() and each.member.isprintable()
        for each in result.problems
    )
    left = {approved / "0" / "link", approved / "0" / "000000000.txt"}
    written = [path for path in (approved / "0").rglob("*") if path.is_symlink() or not path.is_dir()]
    written = [path for path in written if path not in left]
    assert all(stat.S_ISREG(path.lstat().st_mode) and not path.name.startswith(".") for path in written)
    assert result.files == len(written) <= 200
    assert result.size == sum(path.stat().st_size for path in written) <= 1 << 20
    assert (approved / "0" / "000000000.txt").read_text() == "a caption"
    assert os.readlink(approved / "0" / "link") == str(tmp / "outside")
    assert not os.path.lexists("/tmp/imagemill-outside")
    return result


def test_good_archive_is_imported(tmp_path):
    """An import that refuses everything would pass the rest."""
    result = attack(tmp_path, tar_of(("a.jpg", b"x"), ("b/c.jpg", b"y")))

    assert (result.files, result.problems) == (2, [])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_hostile_archive_gives_files_or_named_problems(tmp_path, seed):
    attack(tmp_path, hostile(seed))


NAMES = st.binary(min_size=1, max_size=80) | st.lists(
    st.sampled_from([b"..", b".", b"a", b"", b"link", b"0", b"\xff", b"A", b".x", b"x" * 256]), min_size=1, max_size=6
).map(b"/".join)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(NAMES, min_size=1, max_size=8))
def test_no_name_leads_out_of_the_folder(tmp_path, names):
    attack(tmp_path, b"".join(pax((b"path", name)) + member(b"short", b"data") for name in names) + END)


@pytest.mark.soak
def test_thousand_hostile_archives_give_files_or_named_problems(tmp_path):
    first = int(os.environ.get("SEED", "0"))
    reasons, files = set(), 0
    for seed in range(first, first + SOAK):
        with named("archive", seed):
            result = attack(tmp_path, hostile(seed))
        reasons |= result.reasons.keys()
        files += result.files
    assert reasons == REASONS, "the archives cover every reason"
    assert files > SOAK
