"""The forecast against what is really written, and the comparison with what is free. Spec: docs/spec/stage2.md#disk-forecast"""

import dataclasses
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from imagemill.domain.buckets import BUCKETS
from imagemill.domain.embedding_specs import DINOV3, T5, VAE, embedding_specs
from imagemill.errors import ImagemillError, NotEnoughSpace
from imagemill.formats.jsonl import Span
from imagemill.fs.fingerprints import file_signature, posix_signature
from imagemill.pipeline import forecast as module
from imagemill.pipeline.forecast import (
    Forecast,
    check_space,
    free_bytes,
    free_files,
    measure_sizes,
    npy_bytes,
    on_disk,
    with_sizes,
    work_of,
)
from imagemill.pipeline.header_sizes import HeaderSizes
from imagemill.pipeline.shards.shard_plan import plan_shards
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.shards.shard_writer import write_bucket
from imagemill.pipeline.stage2.plan import Job
from imagemill.store.ledger import Ledger, SourceRow
from tests.helpers.stage2 import embed, picture, plan_of, ready, stage2, write_records

MEGABYTE = 1_000_000
SEEN = posix_signature(1, 2, 3)


def job(image_id, *, size=None, present=None, caption=None, stat=SEEN):
    """A job; `size` is (height, width) as last read."""
    name = f"{image_id}.png"
    facts = SourceRow(image_id, name, SEEN, "xxh3:0", *size) if size else None
    return Job(image_id, name, stat, facts, caption, None, posix_signature(present, 0, 0) if present else None)


def disk_of(monkeypatch, free, *, device=lambda path: 1, files=None):
    """One disk (or several, by `device`) with this much free, blocks of 4096, and room for this many files."""
    full = SimpleNamespace(
        f_bavail=free // 4096, f_frsize=4096, f_blocks=10**9, f_favail=files or 0, f_files=0 if files is None else 10**9
    )
    monkeypatch.setattr(module.os, "statvfs", lambda path: full)
    monkeypatch.setattr(
        module, "nearest_existing", lambda p: SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=device(p)))
    )


def needs_of(jobs, sizes, derived, **folders):
    found = Forecast(derived, **folders)
    found.add(jobs, sizes)
    return found.needs()


# ---- what it takes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(8, 700), st.integers(8, 700)), min_size=1, max_size=6))
def test_forecast_is_what_numpy_writes_or_a_little_more(tmp_path, sizes):
    """Never less, and at most a tenth more than the blocks that the files occupy."""
    jobs = {spec: [job(f"i{n}", size=size) for n, size in enumerate(sizes)] for spec in embedding_specs()}
    occupied = length = 0
    for spec in jobs:
        for n, size in enumerate(sizes):
            path = tmp_path / f"{spec.kind}{n}.npy"
            np.save(path, np.zeros(spec.shape(*size), spec.dtype))
            length += path.stat().st_size
            occupied += -(-path.stat().st_size // os.statvfs(path).f_frsize) * os.statvfs(path).f_frsize

    needs = needs_of(jobs, measure_sizes(jobs, tmp_path), tmp_path, state=tmp_path)

    predicted = sum(need.bytes for need in needs if need.kind in {spec.kind for spec in jobs})
    assert length <= predicted
    assert occupied <= predicted <= 1.1 * occupied


def test_latent_of_a_megapixel_takes_what_the_shape_rule_says():
    """524,288 bytes of values and a header of 128."""
    assert npy_bytes(VAE, 1024, 1024) == 524_288 + 128
    assert npy_bytes(DINOV3, 1024, 1024) == 4096 + 128
    assert npy_bytes(T5, 1024, 1024) == 157_696 + 128


@pytest.mark.parametrize(("size", "occupied"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_files_grow_by_blocks(size, occupied):
    assert on_disk(size, 4096) == occupied


def test_size_is_the_recorded_one_else_the_header_s(tmp_path):
    """Height and width after EXIF orientation; pixels are not needed: the second half of a photo is missing here."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (640, 320)).save(tmp_path / "turned.png", exif=exif)
    whole = (tmp_path / "turned.png").read_bytes()
    (tmp_path / "turned.png").write_bytes(whole[: len(whole) // 2])

    sizes = measure_sizes({VAE: [job("turned"), job("known", size=(100, 200))]}, tmp_path)

    assert sizes == {"turned": (640, 320), "known": (100, 200)}


def test_header_is_read_once_for_a_listing(tmp_path):
    """The forecast of a command reads the headers of all its images, which those of its ranges do not read again."""
    for name in "abc":
        Image.new("RGB", (640, 320)).save(tmp_path / f"{name}.png")
    (tmp_path / "d.png").write_bytes(b"no image")
    known, sizes = HeaderSizes(), dict.fromkeys("abc", (320, 640))

    assert measure_sizes({VAE: [job("a"), job("b")]}, tmp_path, known=known) == {"a": (320, 640), "b": (320, 640)}
    assert measure_sizes({VAE: [job("c"), job("d")]}, tmp_path, known=known) == {"c": (320, 640)}
    for name in "abcd":
        Image.new("RGB", (64, 32)).save(tmp_path / f"{name}.png")

    everything = {VAE: [job(name) for name in "abcd"]}
    assert measure_sizes(everything, tmp_path, known=known) == sizes
    assert measure_sizes(everything, tmp_path) == dict.fromkeys("abcd", (32, 64))


@given(st.lists(st.dictionaries(st.text(min_size=1), st.none() | st.tuples(*[st.integers(1, 2**31)] * 2))))
def test_sizes_of_headers_are_those_that_were_added(parts):
    """Those that do not sort after all earlier ones are left out."""
    sizes, expected, last = HeaderSizes(), {}, ""
    for part in parts:
        sizes.add(part)
        expected |= {image_id: size for image_id, size in part.items() if image_id > last}
        last = max([last, *expected])

    assert dict(sizes.of({image_id for part in parts for image_id in part})) == expected


def test_jobs_get_the_sizes_of_images_without_facts(tmp_path):
    """Decoders then need not read the headers."""
    Image.new("RGB", (640, 320)).save(tmp_path / "new.png")
    jobs = [job("new"), job("known", size=(100, 200)), job("missing")]

    with_size = with_sizes(jobs, measure_sizes({VAE: jobs}, tmp_path))

    assert [each.size for each in with_size] == [(320, 640), None, None]


@pytest.mark.parametrize("content", [None, b"", b"no image", b"\x89PNG\r\n\x1a\n"])
def test_image_that_does_not_open_takes_nothing(tmp_path, content):
    """It will be refused or fail in the pass, which says why."""
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)

    sizes = measure_sizes({VAE: [job("a")]}, tmp_path)

    assert sizes == {}
    assert [need.kind for need in needs_of({VAE: [job("a")]}, sizes, tmp_path, state=tmp_path)] == ["history entries"]


def test_image_that_is_gone_takes_what_does_not_depend_on_its_size(tmp_path):
    """A Stage 1 record's vector is migrated without its image. Spec: docs/spec/migration.md#forward"""
    jobs = {DINOV3: [job("gone", stat=None)]}

    needs = needs_of(jobs, measure_sizes(jobs, tmp_path), tmp_path, state=tmp_path)

    block = os.statvfs(tmp_path).f_frsize
    assert {need.kind: need.bytes for need in needs}["dinov3_npy"] == on_disk(4224, block)


def test_replaced_file_counts_by_its_growth_and_some_stand_side_by_side(tmp_path, monkeypatch):
    """Old and new are both there until their batch is published, never all of them."""
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 2)
    disk_of(monkeypatch, 0)
    new = npy_bytes(VAE, 800, 800)
    jobs = {VAE: [job(f"i{n}", size=(800, 800), present=new) for n in range(10)]}
    grown = {VAE: [job("i", size=(800, 800), present=100)]}

    same = needs_of(jobs, measure_sizes(jobs, tmp_path), tmp_path, state=tmp_path)
    more = needs_of(grown, measure_sizes(grown, tmp_path), tmp_path, state=tmp_path)

    assert next(need.bytes for need in same if need.kind == "vae_latents") == 2 * on_disk(new, 4096)
    assert next(need.bytes for need in more if need.kind == "vae_latents") == on_disk(new, 4096)


def test_records_are_written_beside_the_old_ones(tmp_path):
    (tmp_path / "approved_image_dataset.jsonl").write_bytes(b"x" * 12_345)
    jobs = {T5: [job("a", size=(64, 64), caption="c" * 500)]}

    needs = {n.kind: n for n in needs_of(jobs, measure_sizes(jobs, tmp_path), tmp_path, state=tmp_path)}

    assert 12_345 + 500 + 300 < needs["records"].bytes < 12_345 + 500 + 500


def test_vectors_that_leave_a_stage_1_file_are_not_written_beside_it(tmp_path):
    """Ten records of 20 kB become ten of some hundred bytes. Spec: docs/spec/migration.md#forward"""
    jsonl = tmp_path / "approved_image_dataset.jsonl"
    jsonl.write_bytes(b"x" * 200_000)
    jobs = {
        DINOV3: [
            dataclasses.replace(job(f"i{n}", size=(64, 64)), inline=Span(jsonl, n + 1, n * 20_000, 20_000))
            for n in range(10)
        ]
    }

    needs = {n.kind: n for n in needs_of(jobs, measure_sizes(jobs, tmp_path), tmp_path, state=tmp_path)}

    assert needs["records"].bytes < 10 * 500


@pytest.mark.parametrize("image_id", ["photo", "図" * 40, "with.dots." + "x" * 100])
def test_shards_are_forecast_as_they_are_written(data_root, image_id):
    """Members, headers, padding and index: never less than the set takes, and at most a tenth and a fixed part more."""
    ids = [f"{image_id}{n}" for n in range(20)]
    with Ledger(data_root.ledger) as ledger:
        for n in ids:
            picture(data_root.approved / f"{n}.png", size=(320, 256))
            (data_root.approved / f"{n}.txt").write_text("a caption")
        jobs = {spec: plan_of(data_root, spec, ledger).jobs for spec in embedding_specs()}
    sizes = measure_sizes(jobs, data_root.approved)
    needs = needs_of(jobs, sizes, data_root.derived, state=data_root.state, shards=data_root.shards)
    predicted = next(need.bytes for need in needs if need.kind == "shards")

    _pack(data_root, ids)

    written = sum(path.stat().st_size for path in data_root.shards.glob("*/*"))
    assert written <= predicted <= 1.1 * written + module.SET_BYTES


def test_set_that_is_replaced_stands_beside_the_new_one(data_root):
    stage2(data_root, "a", "b")
    _pack(data_root, [])
    old = sum(path.stat().st_size for path in data_root.shards.glob("*/*.tar"))
    jobs = {spec: [job("c", size=(24, 32))] for spec in embedding_specs()}

    def predicted(shards):
        needs = needs_of(
            jobs, measure_sizes(jobs, data_root.approved), data_root.derived, state=data_root.state, shards=shards
        )
        return next(need.bytes for need in needs if need.kind == "shards")

    assert predicted(data_root.shards) - predicted(data_root.path / "nowhere") == old > 0


def _pack(root, ids):
    if ids:
        embed(root)
        write_records(root)
    found = ready(root, BUCKETS)
    shard_set = plan_shards(found.ready, BUCKETS, root.shards, ShardParameters(), "replace")
    for plan in shard_set.plans:
        write_bucket(shard_set, plan, root.derived, {})


# ---- whether it is there


def test_job_that_fits_is_let_through_and_reported(data_root):
    picture(data_root.approved / "a.png")
    found = file_signature(data_root.approved / "a.png")
    jobs = {VAE: [job("a", stat=found)]}

    needs = check_space(jobs, data_root.approved, data_root.derived, state=data_root.state)

    assert {need.kind for need in needs} == {"vae_latents", "records", "history entries"}
    assert not data_root.derived.exists(), "nothing is written"


def test_nothing_to_do_needs_no_space(data_root, monkeypatch):
    disk_of(monkeypatch, 0)
    assert check_space({VAE: []}, data_root.approved, data_root.derived, state=data_root.state) == []


def test_job_that_does_not_fit_is_stopped_with_the_forecast(tmp_path, monkeypatch):
    """What, where, why, do; the number of images that fit really fits."""
    disk_of(monkeypatch, 100 * MEGABYTE)
    jobs = {VAE: [job(f"i{n:04d}", size=(1024, 1024)) for n in range(1000)]}

    with pytest.raises(NotEnoughSpace) as caught:
        check_space(jobs, tmp_path, tmp_path / "derived", state=tmp_path)

    error = caught.value
    assert isinstance(error, ImagemillError)
    assert isinstance(error, OSError)
    assert "this job needs about 536.3 MB, 100.0 MB are free" in str(error)
    assert "528.4 MB for 1,000 vae_latents" in str(error)
    assert "1,000 records" in str(error)
    assert "--limit 186" in str(error)
    assert "--output-base-dir" in str(error)
    assert error.needed > error.free

    first = {VAE: jobs[VAE][:186]}
    assert check_space(first, tmp_path, tmp_path / "derived", state=tmp_path)
    with pytest.raises(NotEnoughSpace):
        check_space({VAE: jobs[VAE][:187]}, tmp_path, tmp_path / "derived", state=tmp_path)


def test_disk_on_which_not_one_image_fits_suggests_no_limit(tmp_path, monkeypatch):
    disk_of(monkeypatch, 10_000)
    with pytest.raises(NotEnoughSpace) as caught:
        check_space({VAE: [job("a", size=(1024, 1024))]}, tmp_path, tmp_path, state=tmp_path)
    assert "--limit" not in str(caught.value)


def test_file_system_without_room_for_the_files_stops_the_job(tmp_path, monkeypatch):
    """Replaced files and hard links need none."""
    jobs = {spec: [job(f"i{n}", size=(32, 32), caption="a") for n in range(10)] for spec in (VAE, T5)}
    jobs[T5][0] = job("i0", size=(32, 32), caption="a", present=100)
    jobs[VAE][1] = dataclasses.replace(jobs[VAE][1], linkable=True)
    disk_of(monkeypatch, 10**12, files=18)
    assert check_space(jobs, tmp_path, tmp_path / "derived", state=tmp_path)

    disk_of(monkeypatch, 10**12, files=17)
    with pytest.raises(NotEnoughSpace) as caught:
        check_space(jobs, tmp_path, tmp_path / "derived", state=tmp_path)

    assert "this job makes 18 files, and the file system has room for 17 more" in str(caught.value)
    assert "9 for t5_hidden, 9 for vae_latents" in str(caught.value)
    assert f"where: {tmp_path / 'derived'}" in str(caught.value)
    assert "df -i" in str(caught.value)


def test_folders_of_one_disk_are_added_up_and_disks_are_not(tmp_path, monkeypatch):
    """64 MB of latents and as much of shards: 100 MB are too little on one disk, enough on each of two."""
    jobs = {VAE: [job(f"i{n}", size=(1024, 1024)) for n in range(120)]}
    places = {"derived": tmp_path / "derived", "state": tmp_path / "state", "shards": tmp_path / "shards"}
    disk_of(monkeypatch, 100 * MEGABYTE)
    with pytest.raises(NotEnoughSpace, match=r"needs about 1[4-9]"):
        check_space(jobs, tmp_path, **places)

    disk_of(monkeypatch, 100 * MEGABYTE, device=lambda path: path.name == "shards")
    assert check_space(jobs, tmp_path, **places)


def test_disk_of_shards_alone_gets_its_own_remedy(tmp_path, monkeypatch):
    disk_of(monkeypatch, 70 * MEGABYTE, device=lambda path: path.name == "shards")
    jobs = {VAE: [job(f"i{n}", size=(1024, 1024)) for n in range(120)]}
    with pytest.raises(NotEnoughSpace) as caught:
        check_space(jobs, tmp_path, tmp_path / "derived", state=tmp_path, shards=tmp_path / "shards")
    assert "--output-dir" in str(caught.value)
    assert "--limit" not in str(caught.value)


def test_folder_that_is_not_there_counts_by_its_nearest_parent(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.1)


def test_file_system_without_a_limit_has_room(tmp_path, monkeypatch):
    """A tmpfs mounted without one says 0 blocks, and Btrfs 0 files."""
    disk = SimpleNamespace(f_bavail=0, f_frsize=4096, f_blocks=0, f_favail=0, f_files=0)
    monkeypatch.setattr(module.os, "statvfs", lambda path: disk)
    assert free_bytes(tmp_path) > 2**60
    assert free_files(tmp_path) > 2**60


def test_error_survives_a_worker_process():
    error = pickle.loads(pickle.dumps(NotEnoughSpace("what", needed=2, free=1, do="this")))
    assert (error.needed, error.free, str(error)) == (2, 1, "what\n  do:    this")


def test_needs_without_anything_are_enough(tmp_path):
    Forecast(tmp_path, state=tmp_path).require_space()


@pytest.mark.parametrize("size", [1, 7])
def test_jobs_in_parts_need_what_they_need_together(tmp_path, monkeypatch, size):
    """Also the files that stand side by side, the largest of all, and the number of images that fit."""
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 3)
    disk_of(monkeypatch, 20 * MEGABYTE)
    jsonl = tmp_path / "approved_image_dataset.jsonl"
    jsonl.write_bytes(b"x" * 200_000)
    jobs = [job(f"i{n:03d}", size=(512 + 64 * (n % 9), 1024), present=1000 * (n * 37 % 101)) for n in range(100)]
    jobs[::3] = [dataclasses.replace(each, inline=Span(jsonl, 1, 0, 2_000)) for each in jobs[::3]]
    texts = {f"i{n:03d}" for n in range(0, 100, 2)}

    def outcome(parts):
        found = Forecast(tmp_path, state=tmp_path, shards=tmp_path / "shards")
        for part in parts:
            of_part = {VAE: part, T5: [each for each in part if each.image_id in texts]}
            found.add(of_part, measure_sizes(of_part, tmp_path))
        with pytest.raises(NotEnoughSpace) as caught:
            found.require_space()
        return found.needs(), str(caught.value)

    needs, message = outcome([jobs])

    assert "fits" in message
    assert {need.kind for need in needs if need.besides} == {"vae_latents", "t5_hidden", "records", "shards"}
    assert outcome([jobs[i : i + size] for i in range(0, len(jobs), size)]) == (needs, message)


# ---- amount of work


def test_work_of_a_tiled_image_is_that_of_its_tiles():
    """Tiles overlap: a photo of 25 megapixels takes as long as 42 of one."""
    jobs, sizes = [job("small"), job("large"), job("unreadable")], {"small": (1024, 1024), "large": (4336, 5776)}

    assert work_of(DINOV3, jobs, sizes) == {"small": 1024 * 1024, "large": 4336 * 5776, "unreadable": 1}
    assert work_of(VAE, jobs, sizes) == {"small": 1024 * 1024, "large": 5616 * 7568, "unreadable": 1}
