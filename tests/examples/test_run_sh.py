"""`examples/public_data/run.sh`: the runner with the flags and the help of the original one.

Spec: docs/spec/presets.md#runner
"""

import pytest

from tests.helpers.presets import public_data_runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return public_data_runner(tmp_path_factory.mktemp("runner"))


def test_runner_help_names_every_command_and_flag(runner):
    for line in ("help", "coco help", "--help"):
        done, _ = runner(f"./public_data/run.sh {line}")
        assert done.returncode == 0, done.stderr
        words = (
            "convert",
            "rescale",
            "coord",
            "validate",
            "all",
            "help",
            "--preset",
            "--skip-image-check",
            "--raw-only",
        )
        assert [word for word in words if word not in done.stdout] == []


@pytest.mark.parametrize(
    ("line", "says"), [("coco squash", "no command 'squash'"), ("coco download", "nothing is downloaded")]
)
def test_runner_refuses_other_commands_as_wrong_usage(runner, line, says):
    done, _ = runner(f"./public_data/run.sh {line}")

    assert done.returncode == 2
    assert says in done.stderr


def test_runner_passes_words_behind_the_dashes_on_and_takes_the_default_preset(runner):
    """`default_preset` of presets.yaml, or the only preset; `coord` of a limited base makes base and derived preset."""
    done, dataset = runner("./public_data/run.sh coco rescale -- --max-pixels 786432 --split val")
    assert done.returncode == 0, done.stderr
    base = dataset.preset("rescale_32_768_bbox")
    assert base.jsonl("val").is_file()
    runner("./public_data/run.sh coco rescale")

    done, _ = runner("./public_data/run.sh coco coord")

    assert done.returncode == 0, done.stderr
    assert base.records("train", "coord").is_file()
    assert dataset.preset("rescale_32_768_bbox_max60").records("train", "coord").is_file()
    done, _ = runner("./public_data/run.sh coco validate --skip-image-check --preset-only")
    assert done.returncode == 0, done.stdout + done.stderr
    done, _ = runner("./public_data/run.sh coco validate --raw-only")
    assert (done.returncode, done.stdout.count(": passed: ")) == (0, 2), done.stdout + done.stderr
