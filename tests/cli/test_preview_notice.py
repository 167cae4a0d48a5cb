"""Preview models are never silent: runs, reports and checks say so while their files are in the data root.

Spec: docs/spec/stage2.md#preview-models
"""

import json

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT
from tests.cli.test_regenerate import product
from tests.helpers.product import imagemill, photos

KINDS = [spec.kind for spec in embedding_specs()]
NOTICE = f"{PREVIEW_TEXT} ({', '.join(KINDS)})"


@pytest.fixture
def root(data_root):
    photos(data_root.approved, 3)
    return data_root


def lines(root, *arguments):
    done = imagemill(*arguments, "--data-root", root.path, stub=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("command", ["run", "stage2"])
def test_first_and_last_line_of_every_run_say_so(root, command):
    for _ in range(2):  # also if there is nothing to do
        said = lines(root, command)

        assert (said[0], said[-1]) == (NOTICE, NOTICE)


def test_status_and_explain_say_so(root):
    lines(root, "run")

    assert f"model       {NOTICE}" in lines(root, "status")
    assert json.loads("\n".join(lines(root, "status", "--json")))["previews"] == KINDS
    for kind in KINDS:
        (line,) = (line for line in lines(root, "explain", "photo0000") if line.strip().startswith(kind))
        assert f"model {PREVIEW_TEXT}" in line


def test_one_command_changes_all_kinds_to_real_models(root):
    lines(root, "run")
    root.config_file.write_text(json.dumps({"encoders": {kind: {"model": "real"} for kind in KINDS}}))

    lines(root, "stage2", "--regenerate", "all")
    said = lines(root, "run")

    assert PREVIEW_TEXT not in "\n".join([*said, *lines(root, "status"), *lines(root, "explain", "photo0000")])
    assert "nothing to do" in product(root, "run")


def test_one_real_kind_leaves_the_others_named(root):
    root.config_file.write_text(json.dumps({"encoders": {"vae_latents": {"model": "real"}}}))

    said = lines(root, "run")

    assert said[0] == said[-1] == f"{PREVIEW_TEXT} (dinov3_npy, t5_hidden)"
