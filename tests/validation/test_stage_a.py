"""Stage-A output: five fields, and exact correspondence of summaries and images. Spec: docs/spec/stage-a.md#work"""

import pytest

from imagemill.formats.jsonl import write_jsonl
from imagemill.validation.findings import collect
from imagemill.validation.stage_a import stage_a_records
from tests.helpers.situations import GROUP


def check(tmp_path, *records, name="m_stage_a.jsonl"):
    write_jsonl(tmp_path / name, records)
    return collect(name, "stage-a", stage_a_records(tmp_path / name))


def without(name):
    return {key: value for key, value in GROUP.items() if key != name}


def test_same_id_under_both_labels_is_two_groups(tmp_path):
    assert check(tmp_path, GROUP, {**GROUP, "label": "fail"}).findings == []


@pytest.mark.parametrize(
    ("record", "rule", "field"),
    [
        (without("mission"), "fields", "mission"), (without("per_image"), "fields", "per_image"),
        ({**GROUP, "verdict": "ok"}, "fields", "verdict"), ({**GROUP, "group_id": 7}, "group", "group_id"),
        ({**GROUP, "mission": ""}, "group", "mission"), ({**GROUP, "mission": "n"}, "mission", "mission"),
        ({**GROUP, "label": ["pass"]}, "label", "label"), ({**GROUP, "images": []}, "group_images", "images"),
        ({**GROUP, "images": ["1.jpg", 2]}, "group_images", "images"),
        ({**GROUP, "images": ["a/1.jpg", "2.jpg"]}, "group_images", "images"),
        ({**GROUP, "images": ["1.webp", "2.jpg"]}, "group_images", "images"),
        ({**GROUP, "images": "1.jpg"}, "group_images", "images"),
        ({**GROUP, "per_image": ["一", "二"]}, "coverage", "per_image"),
        ({**GROUP, "per_image": {"image_1": "一", "image_3": "三"}}, "coverage", "per_image"),
        ({**GROUP, "per_image": {"image_1": "一", "image_2": "二", "image_03": "三"}}, "coverage", "per_image"),
        ({**GROUP, "per_image": {"image_1": "一", "image_2": ""}}, "summary", "per_image.image_2"),
        ({**GROUP, "per_image": {"image_1": "a\nb", "image_2": "二"}}, "summary", "per_image.image_1"),
        ({**GROUP, "per_image": {"image_1": None, "image_2": "二"}}, "summary", "per_image.image_1"),
    ],
)  # fmt: skip
def test_broken_record_is_found_with_its_field(tmp_path, record, rule, field):
    (found,) = check(tmp_path, record).findings

    assert (found.rule, found.field, found.line) == (rule, field, 1)


def test_record_of_nothing_lacks_all_five_fields(tmp_path):
    assert check(tmp_path, {}).rules == {"fields": 5}


def test_mission_is_compared_where_the_file_is_named_after_one(tmp_path):
    assert check(tmp_path, GROUP, name="other_stage_a.jsonl").rules == {"mission": 1}
    assert check(tmp_path, GROUP, name="other.jsonl").findings == []
