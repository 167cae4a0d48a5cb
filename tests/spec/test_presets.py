"""Every decision, invariant and acceptance check of the public-data presets: one test each, named after it.

The acceptance checks run as they are written, by examples/public_data/run.sh and examples/preflight.sh. Depth is elsewhere:
tests/pipeline/presets/test_rescale.py, test_derive.py, test_coords.py, tests/validation, tests/cli/test_preset.py.
"""

import errno
import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from PIL import Image

from imagemill.domain.preset_names import effective_preset, parse_preset
from imagemill.errors import WrongUsage
from imagemill.formats.hardlinks import LinksRefused, NotLinkable
from imagemill.formats.manifest import write_json
from imagemill.pipeline.presets.derive import CoordRefused
from imagemill.pipeline.presets.rescale import RescaleFailed
from imagemill.pipeline.presets.rescale_plan import PresetConflict
from imagemill.store.public_data import read_preset_manifest
from imagemill.validation.validator import Options, validate, validate_preset
from io_managers.check_results import as_result
from resources.engine import Engine, LocalProcesses
from tests.helpers import public
from tests.helpers.presets import SIZES, coord_here, imagemill_here, inodes, public_data_runner, rescale_here
from tests.helpers.product import PROJECT
from tests.helpers.public import put_records, record, records_of, snapshot

THING = {"desc": "thing", "bbox_2d": [1, 2, 30, 31]}
EXAMPLES = PROJECT / "examples"


def crowd(objects):
    return [
        record(f"{n}.jpg", *size, *[THING] * count) for (n, size), count in zip(enumerate(SIZES), objects, strict=True)
    ]


@pytest.fixture
def dataset(data_root):
    """A raw dataset; its three images have one, two and three objects."""
    dataset = public.raw_dataset(data_root.public_data / "coco", SIZES)
    put_records(dataset, crowd((1, 2, 3)))
    return dataset


@pytest.fixture
def base(dataset):
    """Rescaled: the first image is resized, the second has its target size, the third is enlarged."""
    rescale_here(dataset)
    return dataset.preset("p")


@pytest.fixture
def derived(dataset, base):
    coord_here(dataset, "p_max2")
    return dataset.preset("p_max2")


def rescale_of(preset):
    manifest = read_preset_manifest(preset)
    assert manifest
    return manifest["stage_stats"]["rescale"]


def refused_untouched(error, dataset, call, *arguments, **options):
    """Return the message of a call that must fail before anything is written."""
    before = snapshot(dataset.path)
    with pytest.raises(error) as caught:
        call(dataset, *arguments, **options)
    assert snapshot(dataset.path) == before
    return str(caught.value)


# ---- notes


def test_note_runner_grammar_remains_stable():
    """Note on CLI flags: No new runner flags are introduced for `public_data/run.sh`. DATASET, command, flags; else exit 2."""
    script = (EXAMPLES / "public_data" / "run.sh").read_text()
    assert 'exec "$program" preset "$step" "$dataset" --public-data-root "$here" "$@"' in script

    done = subprocess.run([EXAMPLES / "public_data" / "run.sh", "coco"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "run.sh DATASET {convert|rescale|coord|validate|all} [flags] [-- options" in done.stderr


def test_note_variable_remains_the_knob(data_root, dataset, base):
    """Max-object configuration: `PUBLIC_DATA_MAX_OBJECTS` remains the supported user-facing knob."""
    done = imagemill_here(data_root, "preset", "coord", "coco", "--preset", "p", PUBLIC_DATA_MAX_OBJECTS=2)

    assert done.returncode == 0, done.stderr
    assert len(records_of(dataset.preset("p_max2").records("train", "coord"))) == 2


def test_note_identical_values_proceed():
    """Max-object configuration: if the values are identical, proceed."""
    assert effective_preset("coord", "p_max2", flag="2", config=2, environment="2") == parse_preset("p_max2")


def test_note_differing_values_fail_fast(data_root, dataset, base):
    """Max-object configuration: otherwise, fail fast with an actionable error (do not silently override)."""
    (data_root.public_data / "presets.yaml").write_text("presets: {coco/p: {max_objects: 3}}")
    before = snapshot(data_root.public_data)

    done = imagemill_here(data_root, "preset", "coord", "coco", "--preset", "p", "--max-objects", 2)

    assert done.returncode == 2
    assert "2 by --max-objects, 3 by presets.yaml" in done.stderr
    assert "do:" in done.stderr
    assert snapshot(data_root.public_data) == before


# ---- decisions 1 to 3


def test_decision_1_canonical_preset_jsonl_layout(base, derived, dataset):
    """Decision 1: Canonical preset JSONL layout. `<split>.jsonl` is the only file in pixels; no alias, no `.raw.jsonl`."""
    coord_here(dataset)

    for preset in (base, derived):
        assert sorted(path.name for path in preset.path.glob("[!.]*.jsonl")) == [
            "train.coord.jsonl", "train.jsonl", "train.norm.jsonl",
        ]  # fmt: skip
    (base.path / "train.raw.jsonl").write_text("")
    assert not all(report.passed for report in validate_preset(base.path)), "an old file is found"


def test_decision_2_canonical_max_object_suffix(derived):
    """Decision 2: Canonical max-object suffix is `_max{N}`."""
    assert derived.path.is_dir()
    assert parse_preset("p_max60") == ("p", 60)
    assert parse_preset("p_max60").effective == "p_max60"


@pytest.mark.parametrize("step", ["rescale", "coord", "all", "validate"])
def test_decision_2_old_suffix_is_invalid(step):
    """Decision 2: Treat `_max_{N}` as invalid after migration (fail-fast with an actionable rename hint)."""
    with pytest.raises(WrongUsage, match="rename it to p_max60"):
        effective_preset(step, "p_max_60")


def test_decision_3_single_source_preset_resolution():
    """Decision 3: Single-source preset resolution. The runner passes all on; nothing but `effective_preset` decides."""
    script = (EXAMPLES / "public_data" / "run.sh").read_text()
    assert "_max" not in script.replace("MAX_OBJECTS", "")
    assert "MAX_OBJECTS" not in script
    folders = ("assets", "checks", "io_managers", "dagster_project", "imagemill")
    sources = {path: path.read_text() for folder in folders for path in (PROJECT / folder).rglob("*.py")}

    assert [path.name for path, text in sources.items() if 'f"{self.base}_max' in text or "_max([0-9]" in text] == [
        "preset_names.py"
    ]
    assert [path.name for path, text in sources.items() if "os.environ" in text and "MAX_OBJECTS_VARIABLE" in text] == [
        "preset.py"
    ]


# ---- decision 4


def test_decision_4_derived_preset_image_sharing(base, derived):
    """Decision 4: Derived preset image sharing (no byte-copy)."""
    assert len(inodes(derived)) == 2
    assert inodes(derived).items() <= inodes(base).items()


def test_decision_4_paths_are_stable(base, derived):
    """Decision 4: Keep JSONL `images[0]` stable as `images/...` (no `..` path components)."""
    kept = [record for record in records_of(base.jsonl("train")) if len(record["objects"]) <= 2]

    assert records_of(derived.jsonl("train")) == kept
    assert [record["images"] for record in kept] == [["images/0.jpg"], ["images/1.jpg"]]


def test_decision_4_images_is_a_real_directory(derived):
    """Decision 4: Materialize the derived preset's `images/` as a real directory containing hardlinks."""
    assert derived.images.is_dir()
    assert not derived.images.is_symlink()
    assert all(
        path.is_file() and not path.is_symlink() and path.stat().st_nlink == 2 for path in derived.images.iterdir()
    )


@pytest.mark.parametrize("error", [errno.EMLINK, errno.EPERM, errno.EXDEV])
def test_decision_4_failing_hardlink_fails_fast(dataset, base, monkeypatch, error):
    """Decision 4: If hardlink creation fails for any reason, the pipeline MUST fail fast (no byte-copy fallback)."""
    real = os.link

    def fail(source, target, **options):
        if str(target).endswith(".jpg"):
            raise OSError(error, os.strerror(error))
        return real(source, target, **options)

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(LinksRefused):
        coord_here(dataset, "p_max2")

    derived = dataset.preset("p_max2")
    assert list(derived.path.glob("images/*")) == []
    assert not derived.jsonl("train").exists()


def test_decision_4_no_directory_symlink(dataset, base, derived):
    """Decision 4: Never use a directory symlink for `images/`. An existing link is refused by every step."""
    shutil.rmtree(derived.images)
    derived.images.symlink_to(base.images)
    with pytest.raises(CoordRefused, match="no real folder"):
        coord_here(dataset, "p_max2")
    assert not all(report.passed for report in validate_preset(derived.path))

    base.images.rename(dataset.path / "elsewhere")
    base.images.symlink_to(dataset.path / "elsewhere")
    with pytest.raises(PresetConflict, match="not a real folder"):
        rescale_here(dataset)


def test_dedup_pixels_are_created_in_the_base_only(dataset, base):
    """Dedup: The base rescale stage is the only place that is allowed to create resized pixels (write new image bytes)."""
    before = inodes(base)

    coord_here(dataset)
    coord_here(dataset, "p_max2")

    assert inodes(base) == before
    assert {ino for ino, _ in inodes(dataset.preset("p_max2")).values()} <= {ino for ino, _ in before.values()}


def test_dedup_image_of_the_target_size_is_copied(dataset, base):
    """Dedup: If a source image already matches the target `(width, height)`, the rescale implementation MAY copy it as-is.

    It does, byte for byte, and still as a new file under the preset.
    """
    raw, made = dataset.raw_images / "1.jpg", base.images / "1.jpg"
    assert made.read_bytes() == raw.read_bytes()
    assert not os.path.samefile(made, raw)
    assert (base.images / "0.jpg").read_bytes() != (dataset.raw_images / "0.jpg").read_bytes()


def test_dedup_derived_presets_do_not_rescale(dataset, base, monkeypatch):
    """Dedup: Derived presets do not rescale images. Nothing of an image but its name is read; rescale refuses the name."""
    for path in base.images.iterdir():
        path.write_bytes(b"no picture at all")
    coord_here(dataset, "p_max2")
    assert (dataset.preset("p_max2").images / "0.jpg").read_bytes() == b"no picture at all"

    with pytest.raises(WrongUsage, match="p_max2"):
        rescale_here(dataset, "p_max2")


def test_dedup_file_system_is_prechecked(dataset, base, monkeypatch):
    """Dedup: The pipeline MUST precheck this and fail fast with an actionable hint if the filesystem contract is violated."""

    def cross_device(*paths, **options):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", cross_device)

    said = refused_untouched(NotLinkable, dataset, coord_here, "p_max2")

    assert "no hardlinks here: Invalid cross-device link" in said
    assert "keep all presets of a dataset in one folder" in said


def test_dedup_missing_base_image_fails_fast(dataset, base):
    """Dedup: If the base preset is missing an expected resized image, the derived preset MUST fail fast with the repair."""
    (base.images / "0.jpg").unlink()

    said = refused_untouched(CoordRefused, dataset, coord_here, "p_max2")

    assert "images/0.jpg" in said
    assert "rescale" in said
    rescale_here(dataset)
    coord_here(dataset, "p_max2")


def test_hardlink_contract_every_path_is_there(derived):
    """Hardlink contract: For every `images/...` path referenced, the derived preset MUST contain a file at that relative path.

    And no other: what was dropped leaves none.
    """
    named = {record["images"][0] for record in records_of(derived.records("train", "coord"))}
    assert inodes(derived).keys() == named == {"images/0.jpg", "images/1.jpg"}


def test_hardlink_contract_every_file_is_the_bases(base, derived):
    """Hardlink contract: That file MUST be a hardlink to the base preset's corresponding resized image file."""
    for one in records_of(derived.jsonl("train")):
        assert os.path.samefile(derived.path / one["images"][0], base.path / one["images"][0])


def test_hardlink_contract_absent_path_is_linked(dataset, base, derived):
    """Hardlink contract: if the destination path does not exist: create the hardlink. Append-only, safe to rerun."""
    (derived.images / "0.jpg").unlink()

    result = coord_here(dataset, "p_max2")

    assert (result.linked, result.present) == (1, 1)
    assert os.path.samefile(derived.images / "0.jpg", base.images / "0.jpg")


def test_hardlink_contract_same_inode_is_left(dataset, derived):
    """Hardlink contract: if the destination path exists and is already the same inode as the source: do nothing."""
    before = snapshot(dataset.path), inodes(derived)

    result = coord_here(dataset, "p_max2")

    assert (result.linked, result.present, result.changed) == (0, 2, [])
    assert (snapshot(dataset.path), inodes(derived)) == before


def test_hardlink_contract_other_file_fails_fast(dataset, base, derived):
    """Hardlink contract: otherwise: fail fast (do not overwrite or "repair" in place). Even for the very same bytes."""
    (derived.images / "0.jpg").unlink()
    shutil.copyfile(base.images / "0.jpg", derived.images / "0.jpg")

    said = refused_untouched(CoordRefused, dataset, coord_here, "p_max2")

    assert "images/0.jpg" in said


# ---- decisions 5 and 6, determinism


def found_by(report):
    return sorted((finding.line, finding.rule) for finding in report.findings)


def test_decision_5_unified_validation_boundary(data_root, dataset, base):
    """Decision 5: Unified validation boundary. Pipeline, preflight and `preset validate` find the same, by one implementation."""
    coord_here(dataset)
    file = base.records("train", "coord")
    file.write_text(file.read_text().replace("<|coord_", "<|coord", 1))
    (report,) = [report for report in validate_preset(base.path) if report.file == str(file)]
    assert not report.passed

    preflight = imagemill_here(data_root, "validate", file, "--json")
    preset = imagemill_here(data_root, "preset", "validate", "coco", "--preset", "p", "--json")

    assert preflight.returncode == preset.returncode == 1
    reports = [json.loads(line) for done in (preflight, preset) for line in done.stdout.splitlines()]
    same = [sorted((f["line"], f["rule"]) for f in one["findings"]) for one in reports if one["file"] == str(file)]
    assert same == [found_by(report)] * 2
    assert as_result(report).description == "; ".join(
        f"{rule}: {count}" for rule, count in sorted(report.rules.items())
    )


def test_decision_6_parallelism_policy(tmp_path):
    """Decision 6: Parallelism policy. Images are made by several processes, with the same bytes as by one."""
    dataset = public.raw_dataset(tmp_path / "d", [(100, 60 + n % 7) for n in range(70)])
    processes = set()
    engine = LocalProcesses(workers=2)

    class Watched:
        def map_batches(self, *arguments, **options):
            import psutil

            for row in engine.map_batches(*arguments, **options):
                processes.update(
                    child.pid for child in psutil.Process().children() if "spawn_main" in str(child.cmdline())
                )
                yield row

    rescale_here(dataset, "one")
    rescale_here(dataset, "two", engine=Watched())

    assert len(processes) == 2
    one, two = ({path.name: path.read_bytes() for path in dataset.preset(n).images.iterdir()} for n in ("one", "two"))
    assert one == two


def test_decision_6_metadata_scans_remain_sequential(dataset):
    """Decision 6: Metadata scans (counting lines, collecting unique image specs) remain sequential.

    The engine gets images alone, and is not called if there are no images to make.
    """
    asked = []

    class Counting:
        def map_batches(self, worker, jobs, **options):
            asked.append([job.name for job in jobs])
            return Engine().map_batches(worker, jobs, **options)

    rescale_here(dataset, engine=Counting())
    rescale_here(dataset, engine=Counting())

    assert [sorted(names) for names in asked] == [["images/0.jpg", "images/1.jpg", "images/2.jpg"]]


@pytest.fixture
def five(tmp_path):
    """A preset of five records."""
    dataset = public.raw_dataset(tmp_path / "five", [(96, 64)] * 5)
    rescale_here(dataset)
    return dataset.preset("p")


def spot_check(preset, first, **options):
    return validate(preset.jsonl("train"), options=Options(image_first=first, **options))


def replace_line(preset, number, line):
    lines = preset.jsonl("train").read_text().splitlines()
    lines[number - 1] = line
    preset.jsonl("train").write_text("".join(line + "\n" for line in lines))


def test_determinism_structural_failure_is_a_failure(five):
    """Validation determinism: Any structural failure is a validator failure (do not "sample around" invalid JSON)."""
    replace_line(five, 5, "{")

    assert [spot_check(five, first).passed for first in (1, 4, 0)] == [False] * 3
    assert not spot_check(five, 1, image_mode="none").passed


def test_determinism_full_file_is_scanned(five):
    """Validation determinism: The validator MUST still scan the full JSONL to completion to report stable summary counts."""
    replace_line(five, 1, "{")
    replace_line(five, 5, "[]")

    report = spot_check(five, 1)

    assert (report.checked, report.errors) == (5, 2)
    assert [line for line, _ in found_by(report)] == [1, 5]


def test_determinism_first_records_are_selected(five):
    """Validation determinism: Select exactly the first `N` structurally-parsed records in JSONL line order (no RNG)."""
    replace_line(five, 1, "{")
    shutil.rmtree(five.images)
    five.images.mkdir()

    for _ in range(3):
        assert [line for line, _ in found_by(spot_check(five, 2))] == [1, 2, 3], "line 1 does not count towards N"


def test_determinism_order_is_that_of_the_file(five):
    """Validation determinism: Run image checks on those records in that exact order."""
    lines = five.jsonl("train").read_text().splitlines()
    five.jsonl("train").write_text("".join(line + "\n" for line in reversed(lines)))
    shutil.rmtree(five.images)
    five.images.mkdir()

    said = [str(finding) for finding in spot_check(five, 3).findings]

    assert [name for text in said for name in ("4.jpg", "3.jpg", "2.jpg", "1.jpg", "0.jpg") if name in text] == [
        "4.jpg", "3.jpg", "2.jpg",
    ]  # fmt: skip


def test_determinism_no_record_is_replaced(five):
    """Validation determinism: Do not skip, replace, or resample any of those `N` records due to image-open failures."""
    (five.images / "0.jpg").write_bytes(b"no picture")
    (five.images / "2.jpg").write_bytes(b"no picture")

    assert [line for line, _ in found_by(spot_check(five, 2))] == [1], "the third is not looked at instead of the first"
    assert [line for line, _ in found_by(spot_check(five, 3))] == [1, 3]


# ---- invariants


def test_invariant_images_are_immutable(dataset, base):
    """Invariant: Preset `images/` are immutable once written by the rescale stage. No later step changes byte, time or inode."""
    before = inodes(base)
    put_records(dataset, crowd((3, 3, 1)))

    rescale_here(dataset)
    coord_here(dataset)
    coord_here(dataset, "p_max2")

    assert inodes(base) == before
    assert [len(record["objects"]) for record in records_of(base.jsonl("train"))] == [3, 3, 1], "records do follow"


def test_invariant_missing_images_are_created(dataset, base):
    """Invariant: allowed: create-missing only."""
    before = inodes(base)
    (base.images / "0.jpg").unlink()

    report = rescale_here(dataset)

    assert (report.counts["resized"], report.counts["kept"]) == (1, 2)
    kept = {name: there for name, there in inodes(base).items() if name != "images/0.jpg"}
    assert kept.items() <= before.items()


def test_invariant_existing_images_are_not_overwritten(dataset, base):
    """Invariant: disallowed: truncate/overwrite/replace existing paths in-place. Not even one that is damaged."""
    (base.images / "0.jpg").write_bytes(b"damaged")
    before = inodes(base)

    with pytest.raises(RescaleFailed, match=r"images/0\.jpg"):
        rescale_here(dataset)

    assert inodes(base) == before
    assert (base.images / "0.jpg").read_bytes() == b"damaged"


def test_invariant_manifest_records_the_parameters(base, derived):
    """Invariant: `pipeline_manifest.json` MUST record the rescale-affecting parameters, under `stage_stats.rescale`."""
    found = rescale_of(base)

    assert {name: found[name] for name in ("image_factor", "max_pixels", "min_pixels")} == {
        "image_factor": 32, "max_pixels": 786432, "min_pixels": 4096,
    }  # fmt: skip
    assert {"size_policy", "exif_policy", "max_aspect", "filter", "library", "quality"} <= found.keys()
    assert rescale_of(derived) == found


@pytest.mark.parametrize("asked", [{"max_pixels": 602112}, {"min_pixels": 1024}, {"image_factor": 28}])
def test_invariant_parameters_are_compared_before_any_work(dataset, base, asked):
    """Invariant: The rescale stage MUST compare the requested rescale params against the recorded params before any work."""
    (base.images / "0.jpg").unlink()

    said = refused_untouched(PresetConflict, dataset, rescale_here, **asked)

    ((name, value),) = asked.items()
    assert f"{name} recorded {rescale_of(base)[name]}, requested {value}" in said


@pytest.mark.parametrize("missing", ["max_pixels", "min_pixels", "image_factor"])
def test_invariant_missing_parameters_fail_fast(dataset, base, missing):
    """Invariant: If the recorded params are missing or differ, rescale MUST fail fast with an actionable rebuild hint."""
    manifest = read_preset_manifest(base)
    assert manifest
    del manifest["stage_stats"]["rescale"][missing]
    write_json(base.manifest, manifest)

    said = refused_untouched(PresetConflict, dataset, rescale_here)

    assert missing in said
    assert "choose a new preset name, or delete the preset directory" in said


@pytest.mark.parametrize("left", ["no manifest", "no stage_stats.rescale", "an empty directory"])
def test_invariant_missing_manifest_fails_fast(dataset, base, left):
    """Invariant: If `pipeline_manifest.json` is missing but the preset directory already exists, do not infer params."""
    if left == "no stage_stats.rescale":
        write_json(base.manifest, {"format": 1, "stage_stats": {}})
    else:
        base.manifest.unlink()
    if left == "an empty directory":
        shutil.rmtree(base.path)
        base.path.mkdir()

    said = refused_untouched(PresetConflict, dataset, rescale_here)

    assert "the parameters it was made with are not recorded" in said
    assert "delete the preset directory" in said


def test_invariant_rebuild_is_manual(dataset, base):
    """Invariant: rebuild is manual: the user either picks a new preset name or deliberately deletes the directory."""
    before = snapshot(base.path)
    rescale_here(dataset, "p2", image_factor=28)
    assert snapshot(base.path) == before

    shutil.rmtree(base.path)
    rescale_here(dataset, image_factor=28)

    assert rescale_of(base)["image_factor"] == 28


def test_risk_coord_writes_no_image(dataset, base, monkeypatch):
    """Risk: tools that repair or overwrite image files could mutate the shared inode across presets. Ours open none."""
    opened = []
    real = os.open
    watched = SimpleNamespace(open=lambda path, *rest, **more: opened.append(str(path)) or real(path, *rest, **more))
    monkeypatch.setattr(os, "open", watched.open)
    for path in base.images.iterdir():
        path.chmod(0o444)

    coord_here(dataset, "p_max2")

    assert opened, "the watch is in place"
    assert [path for path in opened if path.endswith(".jpg")] == []


# ---- acceptance checks, as written


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return public_data_runner(tmp_path_factory.mktemp("coordexp"))


def test_acceptance_base_preset_creation(runner):
    """Acceptance: ./public_data/run.sh coco rescale --preset rescale_32_768_bbox"""
    done, dataset = runner("./public_data/run.sh coco rescale --preset rescale_32_768_bbox")

    assert done.returncode == 0, done.stderr
    base = dataset.preset("rescale_32_768_bbox")
    assert base.jsonl("train").is_file()
    assert base.images.is_dir()
    assert not base.images.is_symlink()
    with Image.open(base.images / "0.jpg") as image:
        assert image.width * image.height <= 786432


def test_acceptance_derived_preset_creation(runner):
    """Acceptance: PUBLIC_DATA_MAX_OBJECTS=60 ./public_data/run.sh coco coord --preset rescale_32_768_bbox"""
    runner("./public_data/run.sh coco rescale --preset rescale_32_768_bbox")

    done, dataset = runner("PUBLIC_DATA_MAX_OBJECTS=60 ./public_data/run.sh coco coord --preset rescale_32_768_bbox")

    assert done.returncode == 0, done.stderr
    base, derived = dataset.preset("rescale_32_768_bbox"), dataset.preset("rescale_32_768_bbox_max60")
    assert sorted(inodes(derived)) == ["images/1.jpg", "images/2.jpg"]
    assert inodes(derived).items() <= inodes(base).items()


def test_acceptance_preflight_enforces_max_pixels_and_multiple_of(runner):
    """Acceptance: Training preflight validation uses the unified validator, which enforces both on `*.coord.jsonl`."""
    runner("./public_data/run.sh coco rescale --preset rescale_32_768_bbox")
    runner("PUBLIC_DATA_MAX_OBJECTS=60 ./public_data/run.sh coco coord --preset rescale_32_768_bbox")
    files = "public_data/coco/rescale_32_768_bbox_max60/{train,val}.coord.jsonl"
    preflight = f"bash {EXAMPLES}/preflight.sh"

    done, dataset = runner(f"{preflight} {files} -- echo training")
    assert (done.returncode, done.stdout) == (0, "training\n"), done.stderr
    done, _ = runner(f"{preflight} --max-pixels 5000 --multiple-of 64 {files} -- echo training")
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_pixels" in done.stderr
    assert "multiple_of" in done.stderr

    file = dataset.preset("rescale_32_768_bbox_max60").records("train", "coord")
    file.write_text(file.read_text().replace('"width":96', '"width":97').replace('"height":64', '"height":640000'))
    done, _ = runner(f"{preflight} {files} -- echo training")
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_pixels" in done.stderr, "by the manifest's limits"
    assert "multiple_of" in done.stderr
