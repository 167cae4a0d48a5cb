"""`imagemill validate`: options reach the validator; text output for people, JSON for programs.

Spec: docs/spec/conventions.md#command-line
"""

import json

import pytest
from click.testing import CliRunner

from dagster_project.cli.main import cli
from imagemill.formats.jsonl import write_jsonl
from imagemill.pipeline.shards.shard_sets import bucket_folder
from tests.helpers.rot import rot
from tests.helpers.situations import PRESET_RECORD, SQUARE, preset, shards, stage2_folder
from tests.helpers.stage2 import picture


@pytest.fixture
def validate(monkeypatch, tmp_path):
    """Run the command in this process; with --json also return the reports."""
    monkeypatch.setenv("IMAGEMILL_DATA_ROOT", str(tmp_path / "data"))

    def run(*arguments):
        done = CliRunner().invoke(cli, ["validate", *map(str, arguments)])
        lines = done.stdout.splitlines() if "--json" in arguments and done.exit_code != 2 else []
        return done, [json.loads(line) for line in lines]

    return run


def rules_of(validate, *arguments):
    done, reports = validate(*arguments, "--json")
    assert done.exit_code == (0 if all(report["passed"] for report in reports) else 1)
    return [report["rules"] for report in reports]


def test_limits_and_image_checks_are_options(validate, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [PRESET_RECORD, {**PRESET_RECORD, "images": ["images/b.jpg"]}])
    (tmp_path / "images").mkdir()
    picture(tmp_path / "images" / "a.jpg", size=(32, 64))
    path = tmp_path / "train.jsonl"

    assert rules_of(validate, path) == [{"size_differs": 1, "image_missing": 1}]
    assert rules_of(validate, path, "--image-check-mode", "exists") == [{"image_missing": 1}]
    assert rules_of(validate, path, "--image_check_mode", "none") == [{}]
    assert rules_of(validate, path, "--image-check-n", "1") == [{"size_differs": 1}]
    assert rules_of(validate, path, "--image-check-n", "-1") == [{"size_differs": 1, "image_missing": 1}]
    assert rules_of(validate, path, "--max-pixels", "2047") == [{"max_pixels": 2}]
    assert rules_of(validate, path, "--max-pixels", "2048", "--multiple-of", "48", "--image-check-n", "1") == [
        {"multiple_of": 4}
    ]


def test_real_images_directory_is_required_with_the_flag(validate, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [PRESET_RECORD])
    (tmp_path / "images").symlink_to("nowhere")

    assert rules_of(validate, tmp_path / "train.jsonl", "--image-check-mode", "none") == [{}]
    assert rules_of(
        validate, tmp_path / "train.jsonl", "--image-check-mode", "none", "--enforce-real-images-dir"
    ) == [{"images_folder": 1}]  # fmt: skip


def test_every_file_is_reported_regardless_of_the_first_one(validate, tmp_path):
    """One call reports several files."""
    folder = preset(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{\n")

    done, reports = validate(tmp_path / "bad.jsonl", tmp_path / "gone.jsonl", folder, "--json")

    assert done.exit_code == 1
    assert [(report["kind"], report["passed"], report["rules"]) for report in reports] == [
        ("stage2", False, {"strict_json": 1}), ("", False, {"missing_input": 1}), ("preset", True, {}), ("preset", True, {}),
    ]  # fmt: skip
    assert "nothing to validate" in done.stderr


def test_json_has_every_key_always(validate, tmp_path):
    (tmp_path / "bad.jsonl").write_text("\n")

    _, (report,) = validate(tmp_path / "bad.jsonl", "--json")

    assert report == {
        "passed": False, "file": str(tmp_path / "bad.jsonl"), "kind": "stage2", "checked": 1, "errors": 1, "warnings": 0,
        "rules": {"strict_json": 1},
        "findings": [
            {"file": "bad.jsonl", "line": 1, "field": "", "item": "", "rule": "strict_json", "severity": "error",
             "message": "blank", "remedy": "repair or remove the line"}
        ],
    }  # fmt: skip


def test_text_has_line_rule_message_and_remedy(validate, tmp_path):
    (tmp_path / "bad.jsonl").write_text("\n")

    done, _ = validate(tmp_path / "bad.jsonl")

    assert done.exit_code == 1
    assert done.stdout.splitlines()[:2] == ["bad.jsonl:1: strict_json: blank", "  do: repair or remove the line"]


def test_warnings_alone_exit_with_0(validate, tmp_path):
    root = stage2_folder(tmp_path)
    (root.approved / "a.png").unlink()

    assert rules_of(validate, root.stage2_jsonl) == [{"source_missing": 1}]


def test_samples_of_shards_are_compared_on_request(validate, tmp_path):
    root = shards(tmp_path)
    path = root.derived / "dinov3" / "a.npy"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    folder = bucket_folder(root.shards, SQUARE)

    assert rules_of(validate, folder) == [{}]
    assert rules_of(validate, folder / "shard-000000.tar", "--sample", "1") == [{"verbatim": 1}]


@pytest.mark.parametrize(
    "options",
    [["--kind", "nonsense"], ["--max-pixels", "0"], ["--multiple-of", "x"], ["--image-check-mode", "look"],
     ["--image-check-n", "many"], ["--nonsense"]],
)  # fmt: skip
def test_invalid_value_is_wrong_usage(validate, tmp_path, options):
    (tmp_path / "x.jsonl").touch()

    assert validate(tmp_path / "x.jsonl", *options)[0].exit_code == 2


def test_report_of_records_states_that_no_npy_file_was_opened(validate, tmp_path):
    root = stage2_folder(tmp_path)
    (root.derived / "vae_latents" / "a.npy").write_bytes(b"")

    done, _ = validate(root.stage2_jsonl)

    assert done.exit_code == 0
    assert "the npy files were not opened; `imagemill verify` reads them" in done.stdout


def test_sampled_shards_report_a_damaged_file_instead_of_the_tar(validate, tmp_path):
    root = shards(tmp_path)
    rot(root.derived / "vae_latents" / "a.npy")

    assert rules_of(validate, bucket_folder(root.shards, SQUARE), "--sample", "0") == [{"damaged": 1}]
