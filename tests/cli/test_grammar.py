"""Syntax of the command line.

Spec: docs/spec/conventions.md#exit-codes, docs/spec/conventions.md#commands
"""

import os

import pytest

from imagemill.domain.layout import DataRoot
from tests.helpers.product import contents, imagemill, photos, snapshot


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A data root with twelve small photographs, run once with stub encoders."""
    root = DataRoot(tmp_path_factory.mktemp("small") / "data")
    photos(root.approved, 12)
    done = imagemill("run", "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--nonsense"],
        ["run", "--passes", "dinov3,nonsense"],
        ["stage2", "--pass", "nonsense"],
        ["stage2", "--limit", "0"],
        ["shards", "--shard-size", "0"],
        ["shards", "--bucket", "512x512"],
        ["shards", "--bucket", "../../etc"],
        ["shards", "--progress", "5"],
        ["validate"],
        ["validate", "--kind", "nonsense", "x"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_error(tmp_path, arguments):
    done = imagemill(*arguments, IMAGEMILL_DATA_ROOT=tmp_path / "data")

    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert not (tmp_path / "data" / "shards").exists()


def test_multi_word_options_accept_dash_and_underscore(small):
    assert (
        imagemill("shards", "--dry_run", "--overwrite", "--shard_size", "5", "--data_root", small.path).returncode == 0
    )


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["stage2"], ["shards"], ["status"], ["explain", "x"], ["verify"], ["validate", "missing.jsonl"]],
)
def test_missing_input_exits_with_1_and_a_remedy(tmp_path, arguments):
    done = imagemill(*arguments, "--data-root", tmp_path / "data", stub=True)

    assert done.returncode == 1
    assert "do:" in done.stderr
    assert "Traceback" not in done.stderr


def test_invalid_configuration_is_named(small, tmp_path):
    config = tmp_path / "imagemill.yaml"
    config.write_text("encoders: {vae_latents: {dtpye: float32}}\n")

    done = imagemill("run", "--data-root", small.path, "--config", config, stub=True)

    assert done.returncode == 2
    assert "dtpye" in done.stderr
    assert "Traceback" not in done.stderr


def test_error_for_images_without_captions_explains_how_to_add_them(data_root):
    photos(data_root.approved, 2)
    for caption in data_root.approved.glob("*.txt"):
        caption.unlink()

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 1, "every input refused"
    assert "missing_caption" in done.stdout
    assert "photo0000.txt" in done.stdout


def test_fail_on_skip_makes_a_refused_input_an_error(small, tmp_path):
    root = DataRoot(tmp_path / "data")
    photos(root.approved, 2)
    (root.approved / "broken.png").write_bytes(b"no")

    assert imagemill("run", "--data-root", root.path, stub=True).returncode == 0
    assert imagemill("run", "--fail-on-skip", "--data-root", root.path, stub=True).returncode == 1


def test_limit_selects_the_first_images_with_work_in_name_order(data_root):
    """Spec: docs/spec/stage2.md#pass-names"""
    photos(data_root.approved, 6)
    folder = data_root.derived / "dinov3"

    imagemill("stage2", "--limit", 2, "--data-root", data_root.path, stub=True)
    assert sorted(path.stem for path in folder.iterdir()) == ["photo0000", "photo0001"]
    imagemill("stage2", "--limit", 3, "--data-root", data_root.path, stub=True)
    assert sorted(path.stem for path in folder.iterdir()) == [f"photo{n:04d}" for n in range(5)]


def test_any_order_of_passes_gives_the_result_of_all(data_root, tmp_path):
    photos(data_root.approved, 5)
    other = DataRoot(tmp_path / "other" / "data")
    photos(other.approved, 5)
    (other.approved / "broken.jpg").write_bytes(b"no")
    (data_root.approved / "broken.jpg").write_bytes(b"no")

    imagemill("run", "--data-root", data_root.path, stub=True)
    for name in ("t5", "vae", "dinov3"):
        imagemill("stage2", "--pass", name, "--data-root", other.path, stub=True)
    imagemill("run", "--data-root", other.path, stub=True)

    assert contents(other) == contents(data_root)


def test_shards_command_refuses_existing_shards_without_an_option(small):
    """Spec: docs/spec/shards.md#existing-shards"""
    before = snapshot(small.shards)

    refused = imagemill("shards", "--data-root", small.path, stub=True)
    assert refused.returncode == 1
    assert "--overwrite" in refused.stderr
    assert snapshot(small.shards) == before
    assert imagemill("shards", "--dry-run", "--data-root", small.path).returncode == 1

    done = imagemill("shards", "--overwrite", "--shard-size", 5, "--data-root", small.path, stub=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "total_records=12 ready_records=12 skipped_incomplete=0 filtered=0 written_samples=12 written_shards=3"
    )
    dry = imagemill("shards", "--dry-run", "--overwrite", "--shard-size", 5, "--data-root", small.path)
    assert dry.stdout.splitlines()[-1].endswith(done.stdout.splitlines()[-1])


def test_shards_in_another_folder_are_remembered(small, tmp_path):
    output = tmp_path / "elsewhere"

    done = imagemill("shards", "--output-dir", output, "--data-root", small.path, stub=True)
    assert done.returncode == 0, done.stderr
    assert list(output.glob("bucket_*/shard-000000.tar"))
    assert str(output) in imagemill("verify", "--data-root", small.path).stdout

    imagemill("shards", "--output-dir", small.shards, "--overwrite", "--data-root", small.path, stub=True)


def test_edited_caption_and_replaced_image_update_exactly_their_derived_data(data_root):
    """Spec: docs/spec/conventions.md#staleness"""
    photos(data_root.approved, 4)
    imagemill("run", "--data-root", data_root.path, stub=True)
    before = snapshot(data_root.derived)

    (data_root.approved / "photo0001.txt").write_text("another caption\n")
    os.replace(data_root.approved / "photo0002.jpg", data_root.approved / "moved.tmp")
    photos(data_root.path / "more", 9)
    (data_root.path / "more" / "photo0008.jpg").rename(data_root.approved / "photo0002.jpg")
    (data_root.approved / "moved.tmp").unlink()
    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 0, done.stdout
    after = snapshot(data_root.derived)
    changed = {str(path).removeprefix(str(data_root.derived) + "/") for path in after if after[path] != before[path]}
    assert changed == {
        "t5_hidden/photo0001.npy", "dinov3/photo0002.npy", "vae_latents/photo0002.npy", "approved_image_dataset.jsonl",
    }  # fmt: skip


def test_model_other_than_the_recorded_one_is_refused(data_root):
    """A folder never mixes two models. Spec: docs/spec/conventions.md#provenance"""
    photos(data_root.approved, 2)
    imagemill("run", "--data-root", data_root.path, stub=True)
    before = snapshot(data_root.derived)
    data_root.config_file.write_text("encoders: {dinov3_npy: {model: another/model}}\n")

    done = imagemill("run", "--data-root", data_root.path, stub=True)

    assert done.returncode == 1
    assert "another/model" in done.stdout + done.stderr
    assert snapshot(data_root.derived) == before
