"""Records with several captions, repeats of folders, and names of folders as captions, through the command line.

Spec: docs/spec/stage2.md#several-captions, docs/spec/stage2.md#repeats, docs/spec/stage2.md#caption-sources
"""

import json

import pytest

from imagemill.reading import ShardDataset
from tests.helpers.commands import called
from tests.helpers.stage2 import picture
from tests.helpers.wiring import stub_every_kind


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)


def put(root, path, text=None):
    file = root.approved / path
    file.parent.mkdir(parents=True, exist_ok=True)
    picture(file, size=(24, 24))
    if text is not None:
        file.with_suffix(".txt").write_text(text)


def run(root, config=None, *words):
    if config is not None:
        root.config_file.write_text(config)
    done = called(root, "run", *words)
    assert done.code == 0, done.text
    return done.text


def records(root):
    found = (json.loads(line) for line in root.stage2_jsonl.read_text().splitlines())
    return {record["image_id"]: record for record in found}


def edit(root, image_id, **fields):
    found = records(root)
    found[image_id] |= fields
    root.stage2_jsonl.write_text("".join(json.dumps(each) + "\n" for each in found.values()))


def trained(root):
    batches = ShardDataset(root.shards, 1, allow_preview=True)
    return {batch["image_id"][0]: (batch["captions"][0], batch["repeats"][0]) for batch in batches}


EACH = "captions: {lines: each}\n"


def test_each_line_is_a_caption_and_the_first_is_encoded(data_root):
    put(data_root, "a.png", "one\ntwo\n")
    put(data_root, "b.png", "only")

    text = run(data_root)
    assert "1 caption file with several lines, which are joined; captions.lines: each" in text
    assert records(data_root)["a"]["caption"] == "one two"
    assert "with several lines" not in run(data_root, EACH)

    assert records(data_root)["a"]["captions"] == ["one", "two"]
    assert records(data_root)["a"]["caption"] == "one"
    assert "captions" not in records(data_root)["b"]
    assert trained(data_root) == {"a": (["one", "two"], 1), "b": (["only"], 1)}
    assert called(data_root, "verify").code == 0
    assert json.loads(called(data_root, "explain", "a", "--json").text)["caption"]["others"] == ["two"]
    assert "no Dagster run was started" in run(data_root)


def test_only_the_changed_captions_are_encoded_again(data_root):
    put(data_root, "a.png", "one\ntwo\n")
    put(data_root, "b.png", "only")
    run(data_root)
    files = {name: (data_root.derived / "t5_hidden" / name).stat().st_mtime_ns for name in ("a.npy", "b.npy")}

    run(data_root, "captions: {lines: first}\n")

    changed = {name for name in files if (data_root.derived / "t5_hidden" / name).stat().st_mtime_ns != files[name]}
    assert changed == {"a.npy"}


def test_second_caption_changes_the_record_and_no_array(data_root):
    put(data_root, "a.png", "one\ntwo\n")
    run(data_root, EACH)
    before = (data_root.derived / "t5_hidden" / "a.npy").stat().st_mtime_ns

    (data_root.approved / "a.txt").write_text("one\nthree\n")
    run(data_root)

    assert trained(data_root) == {"a": (["one", "three"], 1)}
    assert (data_root.derived / "t5_hidden" / "a.npy").stat().st_mtime_ns == before
    assert any("two" in line for path in data_root.quarantine.rglob("*") if path.is_file() for line in path.open())


def test_edit_of_a_record_without_a_caption_file_is_accepted(data_root):
    put(data_root, "a.png", "one\ntwo\n")
    run(data_root, EACH)
    (data_root.approved / "a.txt").unlink()
    run(data_root)
    assert records(data_root)["a"]["captions"] == ["one", "two"], "a missing source makes nothing stale"

    edit(data_root, "a", caption="new")
    run(data_root)
    assert records(data_root)["a"]["captions"] == ["new", "two"]

    edit(data_root, "a", captions=["new", "two", "three"])
    run(data_root)
    assert trained(data_root) == {"a": (["new", "two", "three"], 1)}

    edit(data_root, "a", caption="alone", captions=["alone"])
    run(data_root)
    assert records(data_root)["a"]["caption"] == "alone"
    assert trained(data_root) == {"a": (["alone"], 1)}


def test_captions_survive_the_loss_of_the_ledger(data_root):
    put(data_root, "a.png", "one\ntwo\n")
    run(data_root, EACH)
    (data_root.approved / "a.txt").unlink()
    before = data_root.stage2_jsonl.read_bytes()
    for path in data_root.state.glob("ledger.sqlite*"):
        path.unlink()

    assert called(data_root, "repair", "--apply").code in (0, 1)
    run(data_root)

    assert data_root.stage2_jsonl.read_bytes() == before


def test_fields_of_other_programs_stay_until_the_feature_writes_them(data_root):
    put(data_root, "10_dog/a.png", "one\ntwo")
    run(data_root, "inputs: {recursive: true}\n")
    edit(data_root, "10_dog%2Fa", captions="theirs", repeats={"theirs": 1})
    run(data_root)
    assert records(data_root)["10_dog%2Fa"]["captions"] == "theirs"
    assert trained(data_root)["10_dog%2Fa"] == (["one two"], 1)

    text = run(data_root, "captions: {lines: each}\ninputs: {repeats: kohya}\n")

    assert "1 whose extra field captions was replaced" in text
    assert "1 whose extra field repeats was replaced" in text
    assert trained(data_root) == {"10_dog%2Fa": (["one", "two"], 10)}


def test_repeats_come_and_go_with_the_setting(data_root):
    put(data_root, "10_dog/a.png", "a")
    put(data_root, "2024_trip/deep/b.png", "b")
    put(data_root, "c.png", "c")
    text = run(data_root)
    assert "kohya: 2 folders, repeats 10, 2024; inputs.repeats: kohya records them" in text
    assert all("repeats" not in record for record in records(data_root).values())

    text = run(data_root, "inputs: {repeats: kohya}\n")
    assert "inputs.repeats is now kohya; it was off" in text
    assert "kohya records them" not in text
    assert {i: repeats for i, (_, repeats) in trained(data_root).items()} == {
        "10_dog%2Fa": 10, "2024_trip%2Fdeep%2Fb": 2024, "c": 1,
    }  # fmt: skip
    assert len(ShardDataset(data_root.shards, 1, repeats=True, allow_preview=True)) == 2035

    run(data_root, "inputs: {repeats: off}\n")
    assert all("repeats" not in record for record in records(data_root).values())


def test_name_of_the_folder_is_the_caption_of_images_without_one(data_root):
    put(data_root, "10_sks  dog/a.png")
    put(data_root, "10_sks  dog/b.png", "of the file")
    put(data_root, "cats/deep/c.png")
    put(data_root, "d.png")
    put(data_root, "cats/bad.png", "0 0.1 0.2 0.3 0.4")
    called(data_root, "run")
    data_root.config_file.write_text("captions: {folder: true}\n")

    done = called(data_root, "run")

    assert {i: captions for i, (captions, _) in trained(data_root).items()} == {
        "10_sks  dog%2Fa": ["sks dog"], "10_sks  dog%2Fb": ["of the file"], "cats%2Fdeep%2Fc": ["deep"],
    }  # fmt: skip
    assert "annotation_not_caption" in done.text
    assert "missing_caption" in done.text

    (data_root.approved / "cats/deep/c.txt").write_text("a cat")
    called(data_root, "run")
    assert trained(data_root)["cats%2Fdeep%2Fc"] == (["a cat"], 1)


def test_edited_record_precedes_the_name_of_the_folder(data_root):
    put(data_root, "dogs/a.png")
    run(data_root, "captions: {folder: true}\n")
    edit(data_root, "dogs%2Fa", caption="edited")
    run(data_root)
    assert trained(data_root) == {"dogs%2Fa": (["edited"], 1)}


def test_each_image_has_one_problem_and_a_metadata_file_its_own(data_root):
    """Spec: docs/spec/stage2.md#metadata-files"""
    put(data_root, "good.png")
    put(data_root, "labels.png", "0 0.1 0.2 0.3 0.4")
    (data_root.approved / "bad.png").write_bytes(b"no image")
    (data_root.approved / "bad.txt").write_text("0 0.1 0.2 0.3 0.4")
    rows = [{"file_name": "good.png", "text": "x"}, {"file_name": "gone.png", "text": "y"}]
    (data_root.approved / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    done = called(data_root, "run")

    assert "3 images seen: 1 embedded, 2 refused" in done.text
    assert "1 row without an image (2: gone.png)" in done.text
    listed = json.loads(called(data_root, "problems", "--json").text)
    found = {problem["item"]: problem["reason"] for problem in listed}
    assert len(found) == len(listed)
    assert found == {
        "bad": "undecodable", "labels": "annotation_not_caption", "metadata.jsonl": "row_without_image",
    }  # fmt: skip
    (data_root.approved / "bad.png").unlink()
    picture(data_root.approved / "bad.png", size=(24, 24))
    called(data_root, "run")
    assert (
        json.loads(called(data_root, "explain", "bad", "--json").text)["problems"][0]["reason"]
        == "annotation_not_caption"
    )


def test_row_that_disappears_with_its_file_is_no_problem_any_more(data_root):
    put(data_root, "good.png", "x")
    (data_root.approved / "captions.json").write_text('{"gone.png": "y"}')
    assert "row_without_image" in called(data_root, "run").text

    (data_root.approved / "captions.json").unlink()

    assert "row_without_image" not in called(data_root, "run").text
    assert "row_without_image" not in called(data_root, "status", "--fresh").text
