"""Checkpoints that cannot be used as a CLIP text encoder.

Their states are compared with pipelines in test_text_pipelines.py.
"""

import json

import pytest
import torch

from imagemill.domain.embedding_specs import CLIP_TEXT, T5
from imagemill.domain.encoder_settings import ClipTextSettings, T5Settings
from imagemill.encoders.clip_text import ClipTextEncoder
from imagemill.encoders.t5 import T5Encoder
from imagemill.errors import ModelUnusable
from tests.encoders.test_text_pipelines import save_clip


@pytest.fixture
def folder(preview_root, tmp_path):
    save_clip(tmp_path, preview_root, "", width=16, projected=True)
    return tmp_path


def load(folder, **settings):
    chosen = ClipTextSettings(
        model=str(folder), subfolder="text_encoder", tokenizer_subfolder="tokenizer", device="cpu", **settings
    )
    return ClipTextEncoder.load(chosen, spec=CLIP_TEXT, threads=torch.get_num_threads(), preview_root=folder)


def edit(folder, **changes):
    path = folder / "text_encoder" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("name", ["max_position_embeddings", "hidden_size", "projection_dim"])
def test_configuration_without_a_size_is_refused(folder, name):
    edit(folder, **{name: None})

    with pytest.raises(ModelUnusable, match=r"config\.json does not determine"):
        load(folder, pooled="projected")


def test_tokenizer_that_knows_more_than_the_model_is_refused(folder):
    path = folder / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for number in range(10_000):
        tokenizer["model"]["vocab"].setdefault(f"piece{number}", len(tokenizer["model"]["vocab"]))
    path.write_text(json.dumps(tokenizer))

    with pytest.raises(ModelUnusable, match=r"its tokenizer knows .* pieces, its model"):
        load(folder)


def test_missing_tokenizer_is_named(folder):
    (folder / "tokenizer" / "tokenizer_config.json").unlink()

    with pytest.raises(ModelUnusable, match=r"it has no tokenizer_config\.json"):
        load(folder)


def test_clip_folder_is_no_t5_encoder(folder):
    settings = T5Settings(model=str(folder), subfolder="text_encoder", device="cpu")

    with pytest.raises(ModelUnusable, match=r"config\.json has model_type 'clip_text_model', expected 't5' or 'umt5'"):
        T5Encoder.look_up(settings, spec=T5, threads=2, preview_root=folder)


def test_identity_names_the_vocabulary_and_the_padding(folder, preview_root):
    plain = load(folder).identity
    save_clip(folder, preview_root, "", width=16, projected=True, pad="!")
    padded = load(folder).identity

    assert plain.facts["pad_id"] != padded.facts["pad_id"]
    assert plain.facts["tokenizer_sha256"] == padded.facts["tokenizer_sha256"] or plain.key != padded.key
    assert (plain.facts["tokens"], plain.facts["width"], plain.facts["pooled_width"]) == (77, 16, 16)


def test_vocabulary_and_merges_without_tokenizer_json_are_read(folder):
    """The repositories of FLUX and SDXL have no tokenizer.json for CLIP."""
    tokenizer = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    expected = load(folder).prepare("a red bird near the river").payload
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in tokenizer["model"]["merges"])
    (folder / "tokenizer" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer" / "tokenizer.json").unlink()

    encoder = load(folder)

    assert encoder.prepare("a red bird near the river").payload == expected
    assert encoder.encode([encoder.prepare("dog")])[0]["pooled"].any()
