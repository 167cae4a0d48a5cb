"""Presets and groups of Stage-A in the viewer. Spec: docs/spec/conventions.md#viewer"""

import html
import json
import re

import pytest
from PIL import Image

from imagemill.domain.layout import DataRoot
from imagemill.look import records
from imagemill.pipeline.stage_a.missions import LABEL_FOLDERS
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.store.public_data import MANIFEST
from tests.helpers.look import page, viewing
from tests.helpers.product import photos

GROUP = "QC-TEMP-20250118-0015956"


@pytest.fixture
def root(tmp_path):
    root = DataRoot(tmp_path / "data")
    preset = root.public_data / "coco" / "rescale_32_768"
    (preset / "images").mkdir(parents=True)
    (preset / MANIFEST).write_text("{}")
    lines = []
    for number in range(50):
        Image.new("RGB", (64, 32), (number, 90, 30)).save(preset / "images" / f"{number:03d}.jpg")
        objects = [{"desc": "<b>bowl</b>", "bbox_2d": [1, 2.5, 30, 31]}]
        if number == 7:
            objects.append({"desc": "cup", "poly": [0, 0, 64, 0, 64, 32], "poly_points": 3})
        record = {"images": [f"images/{number:03d}.jpg"], "objects": objects, "width": 64, "height": 32}
        lines.append(json.dumps(record))
    (preset / "train.jsonl").write_text("\n".join([*lines, "no json"]) + "\n")
    (root.public_data / "secret.jpg").write_bytes((preset / "images" / "000.jpg").read_bytes())
    group = root.stage_a_input / "roof" / LABEL_FOLDERS["pass"] / GROUP
    photos(group, 2)
    record = {
        "group_id": GROUP, "mission": "roof", "label": "pass", "images": ["photo0000.jpg", "photo0001.jpg"],
        "per_image": {"image_1": "a red roof", "image_2": "<i>tiles</i>"},
    }  # fmt: skip
    root.stage_a_output.mkdir(parents=True)
    output_file(root.stage_a_output, "roof").write_text(json.dumps(record, ensure_ascii=False) + "\n")
    return root


@pytest.fixture
def client(root):
    with viewing(root) as client:
        yield client


def test_presets_and_missions_are_listed(client):
    text = page(client, "/presets")
    assert "preset?name=coco%2Frescale_32_768&amp;split=train" in text
    assert "groups?mission=roof" in text


def test_objects_are_drawn_and_filtered_by_class(client):
    text = page(client, "/preset?name=coco/rescale_32_768&split=train&page=2")
    assert "50 records" in text
    assert text.count("<polygon") == 10
    assert "<b>bowl" not in text
    text = page(client, "/preset?name=coco/rescale_32_768&split=train&class=cup")
    assert "1 record" in text
    assert 'points="1,2.5 30,2.5 30,31 1,31"' in text
    assert 'points="0,0 64,0 64,32"' in text
    for link in re.findall(r'href="(file\?[^"]+)"', text):
        assert client.get(f"/{html.unescape(link)}").headers["content-type"] == "image/jpeg"


def test_groups_show_images_beside_their_summaries(client):
    text = page(client, "/groups?mission=roof")
    assert "a red roof" in text
    assert "&lt;i&gt;tiles&lt;/i&gt;" in text
    links = re.findall(r'src="(file\?[^"]+)"', text)
    assert len(links) == 2
    for link in links:
        assert client.get(f"/{html.unescape(link)}").content[:3] == b"\xff\xd8\xff"


@pytest.mark.parametrize(
    "path",
    [
        "/preset?name=coco/absent&split=train", "/preset?name=coco/rescale_32_768&split=val", "/groups?mission=absent",
        "/file?preset=coco/rescale_32_768&path=../../secret.jpg", "/file?preset=../coco&path=images/000.jpg",
        "/file?mission=roof&path=../../secret.jpg", "/file?preset=coco/rescale_32_768&path=images/absent.jpg",
    ],
)  # fmt: skip
def test_what_no_record_can_name_is_not_found(client, path):
    assert client.get(path).status_code in (400, 404)


def test_link_that_leads_out_of_the_folder_is_not_followed(root, client):
    preset = root.public_data / "coco" / "rescale_32_768"
    (preset / "images" / "out.jpg").symlink_to(root.public_data / "secret.jpg")
    assert client.get("/file?preset=coco/rescale_32_768&path=images/out.jpg").status_code == 404


@pytest.mark.parametrize(
    "value", [None, [], 3, {"objects": 3}, {"objects": [3, {"desc": 1}, {"desc": "a", "bbox_2d": "x"}]}]
)
def test_record_that_is_none_has_no_objects(value):
    assert records._objects(value) == []
