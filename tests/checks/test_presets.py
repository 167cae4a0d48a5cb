"""Checks of public data: invalid data is not passed downstream. Spec: docs/spec/validation.md#checks"""

import dagster as dg
import pytest

from assets.presets import derived_preset, raw_dataset, rescale_preset
from checks.presets import derived_valid, raw_current_checks, raw_valid, rescaled_valid
from dagster_project.work import open_command
from imagemill.pipeline.session import open_session
from tests.helpers import public
from tests.helpers.presets import SIZES, coco_annotations, make_here, public_data
from tests.helpers.public import put_records
from tests.helpers.wiring import checks_of, history, materialize


@pytest.fixture
def instance():
    with history() as instance:
        yield instance


@pytest.fixture
def dataset(data_root, instance):
    """Two rescaled presets, one of them with coordinates and a derived preset."""
    dataset = public.raw_dataset(public_data(data_root).path / "coco", SIZES)
    for key in ("coco/p", "coco/q"):
        assert make_here(data_root, instance, rescale_preset, key, library="pillow", workers=1).success
    for key in ("coco/p", "coco/p_max1"):
        assert make_here(data_root, instance, derived_preset, key).success
    return dataset


def evaluated(root, instance, asset, key, *checks, **config):
    result = make_here(root, instance, asset, key, *checks, **config)
    return result, {name.partition(":")[2]: evaluation for name, evaluation in checks_of(result).items()}


def alone(root, instance, asset, validity):
    """Evaluate a check without its asset and without a partition."""
    result = materialize(root, instance, asset, validity, selection=dg.AssetSelection.all_asset_checks())
    (evaluation,) = checks_of(result).values()
    return evaluation


def test_checks_of_valid_presets_pass_and_count_every_record(data_root, instance, dataset):
    result, found = evaluated(data_root, instance, rescale_preset, "coco/p", rescaled_valid)
    assert result.success
    assert found["rescaled_valid"].passed
    result, found = evaluated(data_root, instance, derived_preset, "coco/p_max1", derived_valid)
    assert result.success
    assert found["derived_valid"].passed
    assert found["derived_valid"].metadata["checked"].value == 3 * 3 + 1, "three files of three records, and the folder"


def test_check_of_raw_records_covers_every_split(data_root, instance):
    annotations = coco_annotations(data_root.path / "source")
    given = {
        "adapter": "coco",
        "annotations": {"train": str(annotations)},
        "images": str(annotations.parent / "images"),
    }

    put_records(public_data(data_root).dataset("of_somebody_else"), ["{"])

    result, found = evaluated(data_root, instance, raw_dataset, "coco", raw_valid, **given)
    assert result.success, "a run is about its own dataset"
    assert found["raw_valid"].metadata["checked"].value == 3

    (annotations.parent / "images" / "train1.jpg").write_bytes(b"no picture")
    result, found = evaluated(data_root, instance, raw_dataset, "coco", raw_valid, **given)
    assert not result.success, "blocking"
    assert "train.jsonl:2" in found["raw_valid"].metadata["first findings"].value


@pytest.mark.parametrize(
    ("asset", "validity", "key"),
    [(rescale_preset, rescaled_valid, "coco/p"), (derived_preset, derived_valid, "coco/p_max1")],
)
def test_invalid_preset_fails_only_its_own_run(data_root, instance, dataset, asset, validity, key):
    folder = dataset.preset(key.partition("/")[2]).path
    (folder / "train.raw.jsonl").write_text("")

    result, found = evaluated(data_root, instance, asset, key, validity)

    (evaluation,) = found.values()
    assert not result.success, "blocking"
    assert evaluation.description == "legacy_file: 1"
    other = "coco/q" if asset is rescale_preset else "coco/p"
    assert evaluated(data_root, instance, asset, other, validity)[0].success


def test_copy_instead_of_a_link_is_found(data_root, instance, dataset):
    image = dataset.preset("p_max1").images / "0.jpg"
    data = image.read_bytes()
    image.unlink()
    image.write_bytes(data)

    evaluation = alone(data_root, instance, derived_preset, derived_valid)

    assert not evaluation.passed
    assert "images/0.jpg" in evaluation.metadata["first findings"].value


def test_check_without_a_partition_covers_every_preset(data_root, instance, dataset):
    (dataset.preset("q").path / "train.raw.jsonl").write_text("")

    found = alone(data_root, instance, rescale_preset, rescaled_valid)

    assert found.description == "legacy_file: 1"
    assert found.metadata["checked"].value > 10


def test_outcome_of_a_command_line_run_lists_the_findings(data_root, instance, dataset):
    (dataset.preset("q").path / "train.raw.jsonl").write_text("")

    with open_session(data_root.path) as session, open_command(session) as work:
        work.make_preset("rescale_preset", "coco/q")

    assert work.error
    assert "check rescale_preset:rescaled_valid failed: legacy_file: 1" in work.error
    assert "train.raw.jsonl" in work.error
    assert "Dagster" not in work.error


@pytest.mark.parametrize("number", [0, 1])
def test_preset_of_raw_records_that_changed_is_a_warning(data_root, instance, dataset, number):
    """The fingerprints in the manifest are compared, also those of a derived preset. Missing raw records change nothing."""
    current = raw_current_checks[number]
    asset, key = ((rescale_preset, "coco/p"), (derived_preset, "coco/p_max1"))[number]

    evaluation = alone(data_root, instance, asset, current)
    assert (evaluation.passed, evaluation.description) == (True, "no findings")

    raw = dataset.raw_jsonl("train")
    lines = raw.read_bytes().splitlines(keepends=True)
    raw.write_bytes(b"".join(lines[:-1]))

    evaluation = alone(data_root, instance, asset, current)
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert f"{key} train" in evaluation.description
    assert evaluation.metadata["look"].value == "[records with their boxes](/imagemill/presets)"

    raw.unlink()
    assert alone(data_root, instance, asset, current).passed


def test_raw_records_of_another_dataset_leave_a_preset_fresh(data_root, instance, dataset):
    """Every preset depends on all datasets, so raw records have no data version of their own."""
    annotations = coco_annotations(data_root.path / "source")
    given = {
        "adapter": "coco",
        "annotations": {"train": str(annotations)},
        "images": str(annotations.parent / "images"),
    }

    def version():
        assert make_here(data_root, instance, raw_dataset, "other", **given).success
        (record,) = instance.fetch_materializations(raw_dataset.key, limit=1).records
        return record.asset_materialization.tags["dagster/data_version"]

    first = version()
    annotations.write_text(annotations.read_text().replace("person", "child"))
    assert version() == first
