"""Real photographs through Stage-A with the preview model.

All 128 of them, through the command: tests/cli/test_stage_a_photos.py (soak).
"""

import shutil

import pytest
from PIL import Image

from imagemill.pipeline.stage_a.missions import LABEL_FOLDERS
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.validation.validator import validate
from tests.helpers.stage_a import MISSION
from tests.helpers.stage_a_runs import merge, metadata, rank, summaries_alone, summaries_written
from tests.helpers.wiring import history

SIZES = {"fail": (6, 1), "pass": (3, 4)}


@pytest.fixture
def tickets(data_root, coco128):
    """Fourteen photographs as four tickets: jpg, jpeg and png in turn; one folder has no id in its file names."""
    photos = iter(sorted((coco128 / "images" / "train2017").iterdir()))
    for label, sizes in SIZES.items():
        for number, size in enumerate(sizes):
            folder = data_root.stage_a_input / MISSION / LABEL_FOLDERS[label] / f"ticket {number}"
            folder.mkdir(parents=True)
            name = "photo" if number else "QC-TEMP-20250118-1"
            for n, photo in zip(range(1, size + 1), photos, strict=False):
                if n % 3:
                    shutil.copy(photo, folder / f"{name}-{n}.{('jpg', 'jpeg')[n % 2]}")
                else:
                    Image.open(photo).resize((160, 120)).save(folder / f"{name}-{n}.png")
    return data_root


def test_real_photos_give_the_same_groups_in_both_modes_on_one_two_and_four_ranks(tickets):
    """Group sets are identical, coverage is complete, images are aligned; both modes infer every image."""
    written, expected = {}, summaries_alone(tickets)
    with history() as instance:
        for mode, world_size, fresh in (("per_group", 1, True), ("per_image", 4, True), ("per_group", 2, False)):
            inferred = 0
            for number in range(world_size):
                assert rank(tickets, instance, number, world_size, summarizer=None, mode=mode, fresh=fresh).success
                inferred += metadata(instance, "stage_a_ranks")["inferred (images)"]
            assert inferred == (14 if fresh else 0)
            done = merge(tickets, instance, summarizer=None, mode=mode, world_size=world_size)
            assert done.success
            written[mode, world_size] = summaries_written(tickets)
            assert metadata(instance, "stage_a_groups")["written (groups)"] == 4
            for asset in ("stage_a_ranks", "stage_a_groups"):
                assert (
                    metadata(instance, asset)["preview"] == "preview model: these summaries do not describe the images"
                )

    assert all(summaries == expected for summaries in written.values()), "each image beside its own summary"
    assert {name: len(images) for name, images in expected.items()} == {
        "QC-TEMP-20250118-1::fail": 6, "ticket 1::fail": 1, "QC-TEMP-20250118-1::pass": 3, "ticket 1::pass": 4,
    }  # fmt: skip
    assert validate(output_file(tickets.stage_a_output, MISSION)).passed
