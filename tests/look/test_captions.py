"""The part of a caption that a text encoder sees, compared with the tokenizer of the encoder itself."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagemill.domain.embedding_specs import CLIP_TEXT, T5
from imagemill.domain.encoder_settings import T5Settings
from imagemill.encoders.clip_text import ClipTokenizer
from imagemill.encoders.loading import Checkpoint
from imagemill.encoders.preview import ensure_preview
from imagemill.encoders.t5 import T5Tokenizer
from imagemill.look.captions import caption_cut, tokenizer_folder

WORDS = ("a", "photo", "of", "two", "brown", "dogs", "photographs", "on", "ζ,", "犬", "and", "🐕🏽", "in", "waterfalls")


@pytest.fixture(scope="module", params=["t5", "clip"])
def encoder(request, preview_root):
    """The folder of a preview model, and the tokenizer of its encoder."""
    spec, kind = {"t5": (T5, T5Tokenizer), "clip": (CLIP_TEXT, ClipTokenizer)}[request.param]
    folder = ensure_preview(spec, preview_root)
    settings = spec.settings_class(model=str(folder))
    return folder, kind(Checkpoint(spec, settings, folder, None, "cpu", folder), spec)


@given(st.lists(st.sampled_from(WORDS), max_size=60))
@settings(max_examples=60, deadline=None)
def test_cut_is_the_end_of_the_last_character_whose_tokens_the_encoder_keeps(encoder, words):
    folder, tokenizer = encoder
    text = " ".join(words)
    for tokens in (8, 20, 77):
        tokenizer.tokens = tokens
        ids, truncated = tokenizer.encode(text)

        cut = caption_cut(text, folder, tokens)

        assert (cut == len(text)) or truncated
        if truncated:
            assert 0 <= cut < len(text)
            if text[cut] == " ":  # otherwise inside a word, whose beginning alone may be other tokens
                seen = tokenizer._backend.encode(text[:cut]).ids[:-1]
                assert seen == ids[: len(seen)], "tokens of characters that are seen"
                assert len(seen) >= len(ids) - 4, "at most the bytes of one character are not counted"


def test_setting_of_truncation_in_the_file_has_no_influence(encoder, tmp_path):
    """Files of the hub may contain it."""
    folder, _ = encoder
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))

    assert caption_cut("a photo of two brown dogs", tmp_path, 77) == 25
    assert 0 < caption_cut("a photo of two brown dogs", tmp_path, 4) < 25


def test_characters_count_and_not_bytes_or_code_units(encoder):
    folder, _ = encoder
    text = "犬 🐕 " * 100
    cut = caption_cut(text, folder, 20)
    assert 0 < cut < len(text)
    assert caption_cut("\udcff a", folder, 77) == 3, "a lone surrogate is one character"


@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_folder_without_a_usable_tokenizer_gives_none(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert caption_cut("a photo", tmp_path, 77) is None
    assert caption_cut("a photo", tmp_path / "no folder", 77) is None


def test_replaced_tokenizer_is_read_again(encoder, tmp_path):
    folder, _ = encoder
    (tmp_path / "tokenizer.json").write_text("{}")
    assert caption_cut("a photo", tmp_path, 77) is None
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert caption_cut("a photo", tmp_path, 77) == 7


# ---- the folder of a tokenizer


def with_tokenizer(folder):
    """Return a folder that has a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_tokenizer_of_a_folder_is_in_its_subfolder(tmp_path):
    """That of the model, if the tokenizer has none of its own: as `CaptionTokenizer.folder`."""
    for subfolder, own, expected in (
        (None, None, tmp_path),
        ("text_encoder_2", None, tmp_path / "text_encoder_2"),
        ("text_encoder_2", "tokenizer_2", tmp_path / "tokenizer_2"),
        ("text_encoder_2", "", tmp_path),
    ):
        settings = T5Settings(model=str(tmp_path), subfolder=subfolder, tokenizer_subfolder=own)
        (expected / "tokenizer.json").unlink(missing_ok=True)
        assert tokenizer_folder(settings) is None
        with_tokenizer(expected)
        assert tokenizer_folder(settings) == expected


def test_preview_model_has_none_also_beside_a_folder_of_this_name(tmp_path, monkeypatch):
    with_tokenizer(tmp_path / "preview")
    monkeypatch.chdir(tmp_path)
    assert tokenizer_folder(T5Settings()) is None
    assert tokenizer_folder(T5Settings(model="./preview")) is not None


def test_tokenizer_of_the_hub_is_found_only_if_it_was_fetched(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    settings = T5Settings(model="google-t5/t5-large", tokenizer_subfolder="tokenizer")
    assert tokenizer_folder(settings) is None

    repository = tmp_path / "models--google-t5--t5-large"
    folder = with_tokenizer(repository / "snapshots" / "abc" / "tokenizer")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert tokenizer_folder(settings) == folder
    assert tokenizer_folder(T5Settings(model="/no/such/folder")) is None
