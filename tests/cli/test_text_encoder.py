"""`t5_hidden: {model, subfolder, tokenizer_subfolder, tokens, padding}`: text encoders of other widths and lengths.

Spec: docs/spec/stage2.md#text-encoders
"""

import json

import numpy as np
import pytest
import torch

from imagemill.domain.embedding_specs import T5
from imagemill.domain.encoder_settings import T5Settings
from imagemill.encoders.t5 import T5Encoder
from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.jsonl import read_jsonl
from imagemill.reading import ShardDataset, ShardSet
from tests.cli.test_regenerate import made_files, use_model
from tests.encoders.test_text_pipelines import WIDTH, save_pipeline
from tests.helpers.product import imagemill, photos


@pytest.fixture(scope="module")
def pipeline(preview_root, tmp_path_factory):
    """A folder with a text encoder and its tokenizer, as in the repository of FLUX."""
    folder = tmp_path_factory.mktemp("flux")
    save_pipeline(folder, preview_root, "text_encoder_2", "tokenizer_2")
    return folder


@pytest.fixture
def use(data_root, pipeline):
    """Configure the text encoder of the pipeline, with further settings."""

    def use(**settings):
        folders = {"subfolder": "text_encoder_2", "tokenizer_subfolder": "tokenizer_2"}
        use_model(data_root, str(pipeline), "t5_hidden", **folders, **settings)

    return use


def product(root, *arguments, code=0):
    """Run a command with real models; return what it prints."""
    done = imagemill(*arguments, "--data-root", root.path)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def masks(root):
    return {len(line.value["t5_attention_mask"]) for line in read_jsonl(root.stage2_jsonl)}


def states(root):
    return {np.load(path).shape for path in (root.derived / "t5_hidden").glob("*.npy")}


def test_root_with_a_text_encoder_of_flux_is_complete_and_valid(data_root, use):
    photos(data_root.approved, 3)
    use(tokens=128, padding="attended")
    product(data_root, "run")

    assert (states(data_root), masks(data_root)) == ({(128, WIDTH)}, {128})
    assert "0 errors" in product(data_root, "verify")
    assert "0 errors" in product(data_root, "validate", data_root.stage2_jsonl)
    assert "nothing to do" in product(data_root, "run")
    batch = next(iter(ShardDataset(data_root.shards, 3, members=("t5h", "t5m"), allow_preview=True)))
    assert (batch["t5h"].shape, batch["t5m"].shape) == ((3, 128, WIDTH), (3, 128))
    card = (data_root.shards / "README.md").read_text()
    assert f"(128, {WIDTH})" in card
    assert "captions that fill all 128" in card


@pytest.mark.parametrize("change", [{"tokens": 64}, pytest.param({"padding": "zero"}, marks=pytest.mark.soak)])
def test_changed_length_or_padding_is_refused_until_the_kind_is_regenerated(data_root, use, change):
    photos(data_root.approved, 3)
    before = {"tokens": 128, "padding": "attended"}
    use(**before)
    product(data_root, "run")
    files = made_files(data_root)
    use(**before | change)

    said = product(data_root, "run", code=1)
    assert "differs in " in said
    assert made_files(data_root) == files

    product(data_root, "stage2", "--regenerate", "t5")
    product(data_root, "run")
    tokens = change.get("tokens", 128)
    assert (states(data_root), masks(data_root)) == ({(tokens, WIDTH)}, {tokens})
    assert "0 errors" in product(data_root, "verify")


def test_masks_have_the_configured_length_before_any_state_is_made(data_root, use):
    """A pass of another kind tokenises the captions too."""
    photos(data_root.approved, 2)
    use(tokens=32)
    product(data_root, "stage2", "--pass", "vae")
    assert masks(data_root) == {32}
    assert "t5_attention_mask" not in product(data_root, "verify", code=1), "only the missing files are findings"

    use(tokens=40)
    product(data_root, "stage2", "--pass", "vae")
    assert masks(data_root) == {40}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 1000}, "tokens"),
        ({"tokens": 7}, "tokens"),
        ({"padding": "max"}, "padding"),
        ({"subfolder": "text_encoder"}, "it has no config.json"),
        ({"tokenizer_subfolder": "tokenizer"}, "it has no tokenizer.json"),
    ],
)
def test_wrong_setting_is_refused_in_one_line_before_any_model_runs(data_root, pipeline, settings, message):
    photos(data_root.approved, 1)
    folders = {"subfolder": "text_encoder_2", "tokenizer_subfolder": "tokenizer_2"}
    use_model(data_root, str(pipeline), "t5_hidden", **folders | settings)

    said = product(data_root, "run", code=2 if message in ("tokens", "padding") else 1)

    assert any(line.startswith("imagemill: ") and message in line for line in said.splitlines())
    assert not list(data_root.derived.glob("*/*.npy"))


def test_clip_model_is_refused_as_a_t5_model(data_root, tmp_path):
    photos(data_root.approved, 1)
    (tmp_path / "clip").mkdir()
    (tmp_path / "clip" / "config.json").write_text(json.dumps({"model_type": "clip_text_model"}))
    use_model(data_root, str(tmp_path / "clip"), "t5_hidden")

    said = product(data_root, "run", code=1)

    assert "config.json has model_type 'clip_text_model', expected 't5' or 'umt5'" in said
    assert not list(data_root.derived.glob("*/*.npy"))


# ---- the empty caption


def test_state_of_the_empty_caption_is_that_of_the_model(data_root, use, pipeline):
    """Spec: docs/spec/stage2.md#empty-caption"""
    photos(data_root.approved, 2)
    use(tokens=128, padding="attended")
    product(data_root, "run")
    settings = T5Settings(
        model=str(pipeline),
        subfolder="text_encoder_2",
        tokenizer_subfolder="tokenizer_2",
        tokens=128,
        padding="attended",
    )
    threads = torch.get_num_threads()
    encoder = T5Encoder.load(settings, spec=T5, threads=threads, preview_root=pipeline)
    expected = encoder.encode([encoder.prepare("")])[0]

    opened: ShardSet | ShardDataset
    for opened in (
        ShardSet.open(data_root.shards, allow_preview=True),
        ShardDataset(data_root.shards, 1, allow_preview=True),
    ):
        np.testing.assert_allclose(opened.empty_caption("t5_hidden"), expected, atol=2e-3)
    assert opened.empty_caption("t5_hidden").dtype == np.float16


def test_empty_caption_follows_the_model_and_survives_other_changes(data_root):
    photos(data_root.approved, 2)
    product(data_root, "run")
    first = ShardSet.open(data_root.shards, allow_preview=True).empty_caption("t5_hidden")
    photos(data_root.approved, 3)
    product(data_root, "run")
    product(data_root, "withdraw", "photo0000")
    product(data_root, "run")
    assert np.array_equal(first, ShardSet.open(data_root.shards, allow_preview=True).empty_caption("t5_hidden"))
    assert "0 errors" in product(data_root, "verify")

    for path in data_root.empty_captions.iterdir():
        path.unlink()
    product(data_root, "shards", "--overwrite")
    assert np.array_equal(first, ShardSet.open(data_root.shards, allow_preview=True).empty_caption("t5_hidden"))

    (file,) = data_root.shards.glob("*/empty-t5_hidden.npy")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(ImagemillError, match="not the recorded bytes"):
        ShardSet.open(data_root.shards, allow_preview=True).empty_caption("t5_hidden")
    with pytest.raises(MissingInput, match="no state of the empty caption of 'vae_latents'"):
        ShardSet.open(data_root.shards, allow_preview=True).empty_caption("vae_latents")
