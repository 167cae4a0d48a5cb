"""The preview of the vision-language model: random words that depend on the image, in the real classes and files.

Its answers have no meaning; they are English words so that they are not mistaken for findings.

Values of its weights and the marker are in preview.py.

Spec: docs/spec/stage2.md#preview-models
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imagemill.encoders.loading import library
from imagemill.encoders.preview import save_preview, write_json
from imagemill.encoders.vlm_processor import IMAGE, VIDEO, VISION_BEGIN, VISION_END

_WORDS = """
    a the photo picture painting portrait view street house building room window door table chair food fruit car boat train
    bridge sign book man woman child people hand dog cat bird horse tree flower grass forest mountain river sea sky cloud
    sun snow rain night day city light dark bright red green blue yellow black white brown grey orange purple small large
    old young long round standing sitting walking running holding looking near under over behind between many some two
    three and with of in on at by from
"""
_TURNS = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""


def write_preview(folder: Path) -> None:
    """Write a model with two layers and a hundred words, whose order depends on image and prompt; 1 MB."""
    transformers = library("transformers")
    words = [f" {word}" for word in _WORDS.split()]
    tokenizer = _tokenizer(transformers, words)
    tokenizer.save_pretrained(folder)
    save_preview(transformers.Qwen3VLForConditionalGeneration(_config(transformers, tokenizer)), folder)
    write_json(folder / "preprocessor_config.json", _PREPROCESSOR)
    write_json(folder / "generation_config.json", _generation(tokenizer, words))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, "utf-8")


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


def _config(transformers: Any, tokenizer: Any) -> Any:
    image, video, begin, end = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO, VISION_BEGIN, VISION_END])
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
    )


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


_PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 256 * 256, "shortest_edge": 32 * 32},
    "temporal_patch_size": 2,
}
