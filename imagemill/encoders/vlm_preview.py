"""The preview of the vision-language model: random words that depend on the image, in the real classes and files.

Its answers have no meaning; they are English words so that they are not mistaken for findings.

Values of its weights and the marker are in preview.py.

Spec: docs/spec/stage2.md#preview-models
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imagemill.encoders.loading import library
from imagemill.encoders.preview import preview_data, save_preview, write_json
from imagemill.encoders.vlm_processor import IMAGE, VIDEO, VISION_BEGIN, VISION_END

_TURNS = ("<|im_start|>", "<|im_end|>")


def write_preview(folder: Path) -> None:
    """Write a model with two layers and a hundred words, whose order depends on image and prompt; 1 MB."""
    transformers = library("transformers")
    words, data = [f" {word}" for word in preview_data("vlm_words.txt").split()], json.loads(preview_data("vlm.json"))
    tokenizer = _tokenizer(transformers, words)
    tokenizer.save_pretrained(folder)
    save_preview(transformers.Qwen3VLForConditionalGeneration(_config(transformers, tokenizer, data["config"])), folder)
    write_json(folder / "preprocessor_config.json", data["preprocessor"])
    write_json(folder / "generation_config.json", _generation(tokenizer, words))
    (folder / "chat_template.jinja").write_text(preview_data("vlm_chat_template.jinja"), "utf-8")


def _tokenizer(transformers: Any, words: Sequence[str]) -> Any:
    """Build a tokenizer with one token per byte, so that any text is a prompt, and whole words, so that any answer is text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = transformers.Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(bytes_to_unicode().values())},
        merges=[],
        eos_token="<|endoftext|>",
        # As in the real model, this is not the end token: words of the prompt, including padding, are not repeated.
        pad_token="<|pad|>",
        padding_side="left",
        extra_special_tokens=[*_TURNS, VISION_BEGIN, VISION_END, IMAGE, VIDEO],
    )
    tokenizer.add_tokens(list(words))
    return tokenizer


def _config(transformers: Any, tokenizer: Any, config: dict[str, Any]) -> Any:
    image, video, begin, end = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO, VISION_BEGIN, VISION_END])
    config["text_config"]["vocab_size"] = len(tokenizer)
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": begin, "vision_end_token_id": end}
    return transformers.Qwen3VLConfig(**config, **ids)


def _generation(tokenizer: Any, words: Sequence[str]) -> dict[str, Any]:
    """At most twelve words, no word twice, never the end alone: single bytes would not be text."""
    end = tokenizer.eos_token_id
    speakable = {end, *tokenizer.convert_tokens_to_ids(list(words))}
    return {
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
        "suppress_tokens": [token for token in range(len(tokenizer)) if token not in speakable],
        "begin_suppress_tokens": [end],
        "no_repeat_ngram_size": 1,
        "max_new_tokens": 12,
    }
