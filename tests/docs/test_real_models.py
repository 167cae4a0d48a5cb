"""docs/how-to/real-models.md: its configuration and commands, with checkpoints in place of the models on the hub."""

import re
import shlex
import shutil

import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.encoders.preview import MARKER, ensure_preview
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT
from tests.docs.console import ROOT
from tests.helpers.product import imagemill, photos

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "how-to" / "real-models.md").read_text("utf-8")


def saved_model(spec, folder, preview_root):
    """Write a checkpoint as `save_pretrained` does, in the subfolder of the kind's repository."""
    inner = folder / (spec.default_subfolder or "")
    shutil.copytree(ensure_preview(spec, preview_root), inner, ignore=shutil.ignore_patterns(MARKER))
    return folder


def test_commands_of_the_page_replace_preview_models(data_root, preview_root, tmp_path):
    (configuration,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for spec in embedding_specs():
        assert spec.default_model in configuration
        folder = saved_model(spec, tmp_path / spec.kind, preview_root)
        configuration = configuration.replace(spec.default_model, str(folder))
    photos(data_root.approved, 2)
    assert PREVIEW_TEXT in imagemill("run", "--data-root", data_root.path).stdout

    data_root.config_file.write_text(configuration.replace("bfloat16", "float32"))
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        done = imagemill(*arguments, "--data-root", data_root.path)
        assert (program, done.returncode) == ("imagemill", 0), done.stderr

    assert PREVIEW_TEXT not in done.stdout
    assert "2 samples in 1 shard" in done.stdout
