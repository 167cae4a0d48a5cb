"""Contact sheets of presets."""

import numpy as np
from PIL import Image

from imagemill.pipeline.contact_sheet import PAGE_CHARACTERS
from imagemill.pipeline.presets.preset_sheet import (
    CELL,
    SHEET,
    draw_preset_sheet,
    draw_record,
    sheet_page,
    write_preset_sheet,
)
from imagemill.pipeline.presets.rescale import plan_rescale, run_rescale
from imagemill.pipeline.presets.rescale_plan import choose_parameters
from resources.engine import Engine
from tests.helpers.public import picture, put_records, raw_dataset, record, snapshot


def rescaled(dataset):
    preset = dataset.preset("r")
    parameters = choose_parameters(preset, library="pillow")
    run_rescale(plan_rescale(dataset, "r", parameters), Engine().map_batches)
    return preset


def changed(image, plain):
    """Return the changed part of a picture as a rectangle."""
    ys, xs = np.nonzero((np.asarray(image) != np.asarray(plain)).any(axis=2))
    return xs.min(), ys.min(), xs.max(), ys.max()


def test_box_and_name_are_drawn_where_the_record_says(tmp_path):
    dataset = raw_dataset(tmp_path, [(CELL, 300)])
    plain = draw_record(dataset.raw, record("0.jpg", CELL, 300) | {"objects": []})

    drawn = draw_record(dataset.raw, record("0.jpg", CELL, 300, {"desc": "a", "bbox_2d": [100, 50, 300, 200]}))
    outlined = draw_record(dataset.raw, record("0.jpg", CELL, 300, {"desc": "a", "poly": [100, 50, 300, 50, 300, 200]}))

    assert drawn.size == (CELL, 300)
    for image in (drawn, outlined):
        assert np.abs(np.array(changed(image, plain)) - [100, 50, 300, 200]).max() <= 2


def test_large_picture_is_fitted_with_its_boxes(tmp_path):
    dataset = raw_dataset(tmp_path, [(CELL * 2, CELL)])
    name, size = "0.jpg", (CELL * 2, CELL)
    plain = draw_record(dataset.raw, record(name, *size) | {"objects": []})

    drawn = draw_record(dataset.raw, record(name, *size, {"desc": "a", "bbox_2d": [200, 100, 400, 300]}))

    assert drawn.size == (CELL, CELL // 2)
    assert np.abs(np.array(changed(drawn, plain)) - [100, 50, 200, 150]).max() <= 2


def test_sheet_shows_raw_beside_preset(tmp_path):
    dataset = raw_dataset(tmp_path, [(101, 67), (96, 64), (42, 41)])

    sheet = draw_preset_sheet(dataset, rescaled(dataset))

    halves = np.asarray(sheet)[:, : sheet.width // 2], np.asarray(sheet)[:, sheet.width // 2 :]
    assert all((half < 100).any() for half in halves)
    assert CELL < sheet.height < 3 * CELL


def test_few_of_many_are_shown(tmp_path):
    dataset = raw_dataset(tmp_path, [(64, 64)] * 9)
    assert 2 * CELL < draw_preset_sheet(dataset, rescaled(dataset), count=2).height < 3 * CELL


def test_image_that_is_gone_and_a_name_of_any_script_are_no_error(tmp_path):
    dataset = raw_dataset(tmp_path, [(64, 64)])
    put_records(dataset, [record("0.jpg", 64, 64, {"desc": "猫 \U0001f408", "bbox_2d": [-5, -5, 900, 900]})])
    preset = rescaled(dataset)
    (dataset.raw_images / "0.jpg").write_bytes(picture(64, 64)[:50])
    (preset.images / "0.jpg").unlink()

    assert draw_preset_sheet(dataset, preset).mode == "RGB"


def test_preset_without_records_is_reported(tmp_path):
    dataset = raw_dataset(tmp_path, [])
    assert (np.asarray(draw_preset_sheet(dataset, rescaled(dataset))) < 100).any()


def test_sheet_lies_beside_the_records_and_an_equal_one_stays(tmp_path):
    dataset = raw_dataset(tmp_path, [(101, 67)])
    preset = rescaled(dataset)

    path = write_preset_sheet(dataset, preset)
    before = snapshot(preset.path)
    assert "](data:image/jpeg;base64," in sheet_page(path)
    assert len(sheet_page(path)) <= PAGE_CHARACTERS
    write_preset_sheet(dataset, preset)

    assert path == preset.path / SHEET
    assert Image.open(path).format == "PNG"
    assert snapshot(preset.path) == before
