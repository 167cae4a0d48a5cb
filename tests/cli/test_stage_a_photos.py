"""All 128 photographs through `imagemill stage-a` with the preview model.

A smaller set runs through the assets in each `make test`: tests/assets/test_stage_a_photos.py.
"""

import shutil
from itertools import cycle

import pytest
from PIL import Image

from imagemill.pipeline.stage_a.missions import LABEL_FOLDERS
from imagemill.pipeline.stage_a.rank_files import output_file, rank_files
from imagemill.validation.validator import validate
from tests.helpers.product import imagemill
from tests.helpers.stage_a import MISSION
from tests.helpers.stage_a_runs import summaries_alone, summaries_written

SIZES = (20, 1, 19, 2, 18, 3, 17, 4, 16, 5, 15, 6, 2)
EXTENSIONS = (".jpg", ".jpeg", ".png", ".JPG")


@pytest.fixture
def tickets(data_root, coco128):
    """Thirteen tickets of 1 to 20 photographs, labels and extensions in turn; every third has no id."""
    photos = iter(sorted((coco128 / "images" / "train2017").iterdir()))
    extensions = cycle(EXTENSIONS)
    for number, size in enumerate(SIZES):
        folder = data_root.stage_a_input / MISSION / list(LABEL_FOLDERS.values())[number % 2] / f"ticket {number}"
        folder.mkdir(parents=True)
        name = f"photo {number}" if number % 3 == 2 else f"QC-TEMP-20250118-{number}"
        for n, photo, extension in zip(range(1, size + 1), photos, extensions, strict=False):
            if extension == ".png":
                Image.open(photo).save(folder / f"{name}-{n}.png", compress_level=1)
            else:
                shutil.copy(photo, folder / f"{name}-{n}{extension}")
    assert next(photos, None) is None
    return data_root


@pytest.mark.soak
def test_all_photos_give_the_same_groups_in_both_modes_on_one_two_and_four_ranks(tickets):
    """Identical group sets, complete coverage, each image with its own summary; every run infers every image."""
    summaries = summaries_alone(tickets)
    assert sorted(len(images) for images in summaries.values()) == sorted(SIZES)
    assert len({text for images in summaries.values() for text in images.values()}) > 100, "texts differ"

    for mode in ("per_group", "per_image"):
        for world_size in (1, 2, 4):
            arguments = ["--mission", MISSION, "--sharding_mode", mode, "--world-size", world_size, "--fresh"]
            done = imagemill("stage-a", "--data-root", tickets.path, *arguments)
            assert done.returncode == 0, done.stderr
            assert "inferred=128 reused=0 failed=0" in done.stdout
            assert "preview model: these summaries do not describe the images" in done.stdout
            output = output_file(tickets.stage_a_output, MISSION)
            assert summaries_written(tickets) == summaries, (mode, world_size)
            assert validate(output).passed
            assert rank_files(tickets.stage_a_output, MISSION) == {}
