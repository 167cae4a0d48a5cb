"""Twenty remedies, executed word for word: the test causes a fault and follows the remedy in the error message.

The sample was drawn with `random.Random(15).sample` from the rows with a remedy in
docs/reference/messages.csv, excluding those that require a broken disk, another user or a reader in a training process.
"""

import json
import re
import shlex
import shutil
import sys

import pytest
from PIL import Image

from imagemill.domain.layout import DataRoot
from imagemill.formats.jsonl import read_jsonl
from imagemill.store.ledger import Ledger
from imagemill.store.public_data import PublicData
from tests.helpers.commands import called
from tests.helpers.public import raw_dataset
from tests.helpers.rot import rot
from tests.helpers.stage2 import photos, picture
from tests.helpers.stage_a import ticket
from tests.helpers.stubs import stub_captioner
from tests.helpers.wiring import stub_every_kind

SQUARE, WIDE = "bucket_1024x1024", "bucket_1216x832"


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    stub_every_kind(monkeypatch)
    stub_captioner(monkeypatch.setattr)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A complete data root of three images."""
    root = DataRoot(tmp_path_factory.mktemp("remedies") / "data")
    root.approved.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        stub_every_kind(patch)
        photos(root, "a", "b", "c", size=(24, 24))
        assert called(root, "run").code == 0
    return root


@pytest.fixture
def root(made, tmp_path):
    """A copy of the complete data root for one test."""
    copy = DataRoot(tmp_path / "copy" / "data")
    shutil.copytree(made.path, copy.path, symlinks=True)
    assert called(copy, "run").code == 0
    return copy


def remedy_of(ended, *words):
    """Return the remedy that contains these words from the output of a failed command."""
    assert ended.code != 0, ended.text
    return shown_remedy(ended, *words)


def shown_remedy(ended, *words):
    for word in words:
        assert word in ended.text
    remedies = [line.partition("do:")[2].strip() for line in ended.text.splitlines() if line.strip().startswith("do:")]
    assert remedies, ended.text
    return remedies[0]


def follow(root, remedy):
    """Run the command that a remedy quotes or consists of."""
    quoted = re.search(r"`imagemill ([^`]+)`", remedy) or re.search(
        r"imagemill ((?:stage2|shards|run)\b[^:;,]*)", remedy
    )
    assert quoted, remedy
    ended = called(root, *shlex.split(quoted[1].split(" --data-root")[0]))
    assert ended.code == 0, ended.text
    return ended


def records(root):
    return {line.value["image_id"]: line.value for line in read_jsonl(root.stage2_jsonl)}


def edit_record(root, image_id, **changes):
    lines = [{**record, **(changes if image_id == name else {})} for name, record in records(root).items()]
    root.stage2_jsonl.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def problems(root):
    with Ledger(root.ledger, read_only=True) as ledger:
        return {(problem.item, problem.reason) for problem in ledger.problems()}


# ---- shards


def test_existing_shards_are_replaced_by_overwrite(root):
    remedy = remedy_of(called(root, "shards"), "shards already exist")

    follow(root, remedy)

    assert called(root, "validate", root.shards / SQUARE).code == 0


def test_one_of_two_contradicting_options_is_accepted(root):
    assert remedy_of(called(root, "shards", "--overwrite", "--append"), "contradict") == "give one of them"

    for option in ("--overwrite", "--append"):
        assert called(root, "shards", option).code == 0


@pytest.mark.parametrize("content", ["{", "[]", '{"samples": 1}'])
def test_manifest_of_another_program_is_replaced_by_overwrite(root, content):
    (root.shards / SQUARE / "manifest.json").write_text(content)
    remedy = remedy_of(called(root, "validate", root.shards / SQUARE), "manifest")

    follow(root, remedy)

    assert called(root, "validate", root.shards / SQUARE).code == 0


def test_missing_manifest_is_written_by_overwrite(root):
    (root.shards / SQUARE / "manifest.json").unlink()
    remedy = remedy_of(called(root, "validate", root.shards / SQUARE), "has no manifest.json")

    follow(root, remedy)

    assert called(root, "validate", root.shards / SQUARE).code == 0


def test_unreadable_index_is_written_by_overwrite(root):
    (root.shards / SQUARE / "index.jsonl").write_text("{\n")
    remedy = remedy_of(called(root, "validate", root.shards / SQUARE), "index")

    follow(root, remedy)

    assert called(root, "validate", root.shards / SQUARE).code == 0


def test_sample_packed_in_two_buckets_is_resolved_by_packing_both(root):
    picture(root.approved / "a.png", size=(36, 24))
    assert called(root, "stage2").code == 0
    command = ["shards", "--overwrite", "--bucket", WIDE.removeprefix("bucket_")]
    remedy = remedy_of(called(root, *command), "would be in two buckets")

    assert "or without any" in remedy
    assert called(root, "shards", "--overwrite").code == 0

    assert called(root, "verify").code == 0
    assert f"{WIDE}/" in called(root, "explain", "a").text


# ---- records and files


def test_blank_caption_of_a_record_is_resolved_by_a_sidecar(root):
    edit_record(root, "a", caption=" ")
    remedy = remedy_of(called(root, "validate", root.stage2_jsonl), "caption")

    (root.approved / "a.txt").write_text("a red ball")
    follow(root, remedy)

    assert called(root, "validate", root.stage2_jsonl).code == 0
    assert records(root)["a"]["caption"] == "a red ball"


def test_damaged_file_is_restored_by_the_next_run(root):
    path = root.derived / "dinov3" / "a.npy"
    good = path.read_bytes()
    rot(path)
    assert called(root, "stage2", "--verify").code == 1
    remedy = shown_remedy(called(root, "explain", "a"), "does not contain the recorded bytes")

    follow(root, remedy)

    assert path.read_bytes() == good
    assert ("a", "damaged") not in problems(root)


def test_damage_found_by_verify_is_recorded_and_restored(root):
    """Two commands, in the order of the remedy."""
    path = root.derived / "vae_latents" / "b.npy"
    good = path.read_bytes()
    rot(path)
    remedy = remedy_of(called(root, "verify"), "damaged")

    note, restore = re.findall(r"`imagemill ([^`]+)`", remedy)
    assert called(root, *note.split()).code == 1
    assert called(root, *restore.split()).code == 0

    assert path.read_bytes() == good
    assert called(root, "verify").code == 0


def test_verify_alone_is_accepted(root):
    remedy = remedy_of(called(root, "stage2", "--verify", "--pass", "t5"), "--verify makes no embeddings")

    assert remedy == "give it alone"
    assert called(root, "stage2", "--verify").code == 0


@pytest.mark.parametrize("way", ["restore the image", "delete"])
def test_file_of_a_missing_image_no_longer_stops_a_regeneration(root, way):
    image = (root.approved / "a.png").read_bytes()
    (root.approved / "a.png").unlink()
    root.config_file.write_text('{"encoders": {"vae_latents": {"model": "newer"}}}')
    called(root, "stage2", "--regenerate", "vae")
    remedy = shown_remedy(called(root, "explain", "a"), "cannot_regenerate")

    assert way in remedy
    if way == "delete":
        (root.derived / remedy.rpartition(" ")[2].removeprefix("derived/")).unlink()
    else:
        (root.approved / "a.png").write_bytes(image)
    assert called(root, "stage2").code == 0

    with Ledger(root.ledger, read_only=True) as ledger:
        assert not ledger.regenerating()


# ---- approved images


def test_link_to_itself_is_removed(root):
    loop = root.approved / "loop.png"
    loop.symlink_to(loop.name)
    called(root, "run")
    assert shown_remedy(called(root, "explain", "loop"), "leads back to itself").startswith("remove it")

    loop.unlink()

    called(root, "run")
    assert "not_a_file" not in {reason for _, reason in problems(root)}


@pytest.mark.slow
def test_image_with_too_many_pixels_is_scaled_down(root):
    path = root.approved / "huge.png"
    Image.new("1", (14_000, 13_000)).save(path)
    (root.approved / "huge.txt").write_text("white")
    called(root, "run")
    assert shown_remedy(called(root, "explain", "huge"), "too_large") == "scale it down"

    Image.new("1", (140, 130)).save(path)

    assert called(root, "run").code == 0
    assert "huge" in records(root)


def test_folder_named_like_a_sidecar_is_replaced_by_the_sidecar(root):
    root.config_file.write_text("inputs: {recursive: false}\n")  # else the folder is read as one with images
    sidecar = root.approved / "a.txt"
    sidecar.unlink()
    sidecar.mkdir()
    called(root, "run")
    remedy = shown_remedy(called(root, "explain", "a"), "a.txt is a folder")

    assert remedy == "rename or move the folder, then write the caption to a file a.txt"
    sidecar.rename(root.path / "elsewhere")
    sidecar.write_text("a caption")

    assert called(root, "run").code == 0
    assert records(root)["a"]["caption"] == "a caption"
    assert "do:" not in called(root, "explain", "a").text


def test_image_of_an_unsupported_type_is_converted(root):
    Image.new("RGB", (24, 24)).save(root.approved / "d.tga")
    (root.approved / "d.txt").write_text("black")
    called(root, "run")
    assert shown_remedy(called(root, "explain", "d"), "unsupported_type").startswith("convert it")

    Image.open(root.approved / "d.tga").convert("RGB").save(root.approved / "d.png")
    (root.approved / "d.tga").unlink()

    assert called(root, "run").code == 0
    assert "d" in records(root)


# ---- folders and settings


@pytest.mark.parametrize("command", [["status"], ["explain", "a"]])
def test_remedy_for_a_root_without_a_run_is_to_run(data_root, command):
    photos(data_root, "a", size=(24, 24))
    remedy = remedy_of(called(data_root, *command), "nothing has run on this data root yet")

    assert shlex.split(remedy) == ["imagemill", "run", "--data-root", str(data_root.path)]
    follow(data_root, remedy)

    assert called(data_root, *command).code == 0


def test_folder_without_images_becomes_a_data_root(tmp_path):
    root = DataRoot(tmp_path / "new")
    remedy = remedy_of(called(root, "shards"), "the data root does not exist")

    assert "create the folder with your images in approved/" in remedy
    root.approved.mkdir(parents=True)
    photos(root, "a", size=(24, 24))

    assert called(root, "run").code == 0


@pytest.mark.parametrize(
    ("text", "named", "remedy", "cured"),
    [
        (None, "cannot be read: Is a directory", "make it a readable file", "threads: 1"),
        ("threads: 99999999999999999999", "a number beyond 64 bits", "write a smaller number", "threads: 9"),
        (f"# {'x' * 65_536}\nthreads: 1", "longer than 65536 bytes", "shorten the file", "# x\nthreads: 1"),
        ("? [a, b]\n: 1", "a name that is not text", "write `name: value`", "threads: 1"),
    ],
    ids=["a folder", "a number", "length", "a name"],
)
def test_invalid_configuration_is_corrected(root, text, named, remedy, cured):
    if text is None:
        root.config_file.mkdir()
    else:
        root.config_file.write_text(text)
    assert remedy_of(called(root, "run"), named) == remedy

    if text is None:
        root.config_file.rmdir()
    root.config_file.write_text(cured)

    assert called(root, "run").code == 0


def test_missing_report_of_near_duplicates_is_made_by_the_next_run(root):
    root.config_file.write_text('{"near_duplicates": {"exclude": true}}')
    remedy = remedy_of(called(root, "shards", "--overwrite"), "no report of near duplicates")

    follow(root, remedy)

    assert called(root, "shards", "--overwrite").code == 0


def test_mistyped_mission_is_corrected(root, monkeypatch):
    ticket(root.stage_a_input, "pass", "a", "a.jpg", mission="shelf")
    monkeypatch.setitem(
        sys.modules, "tests.helpers.summarizers", __import__("tests.helpers.summarizers", fromlist=["x"])
    )
    remedy = remedy_of(called(root, "stage-a", "--mission", "shelv"), "similar names: shelf")

    assert "check --mission" in remedy
    assert called(root, "stage-a", "--mission", "shelf").code == 0


def test_preset_name_that_is_only_a_suffix_is_completed(root):
    dataset = PublicData(root.public_data).dataset("demo")
    raw_dataset(dataset.path, [(64, 64)])
    assert called(root, "preset", "rescale", "demo", "--preset", "small").code == 0
    remedy = remedy_of(
        called(root, "preset", "coord", "demo", "--preset", "_max3"), "there is no name before the suffix"
    )

    name = remedy.removeprefix("name it ").replace("<base preset>", "small").replace("{N}", "3")
    assert called(root, "preset", "coord", "demo", "--preset", name).code == 0
