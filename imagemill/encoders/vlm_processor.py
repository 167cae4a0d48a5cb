"""Processor of images and text for models of the Qwen3-VL class, without torchvision.

transformers' own processor for these models has a video half, which needs torchvision, whose builds fit one build of torch each.
Ours leaves that half out, and prepares pixels with transformers' PIL code whether torchvision is installed or not: the model's
input is then the same on every machine.

The model is in vlm.py.
"""

import functools
from typing import Any

from imagemill.encoders.loading import Checkpoint, library
from imagemill.errors import ModelUnusable

IMAGE, VIDEO, VISION_BEGIN, VISION_END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"


@functools.lru_cache(maxsize=1)
def _processor_class() -> Any:
    """Return a subclass of Qwen3VLProcessor (transformers) without its video half, which needs torchvision."""
    library("transformers")
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.processing_utils import ProcessorMixin

    class ImageOnlyQwen3VLProcessor(Qwen3VLProcessor):
        # Without an argument called video_processor, `from_pretrained` does not look for one.
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
        ):
            for name, token in (
                ("image_token", IMAGE),
                ("video_token", VIDEO),
                ("vision_start_token", VISION_BEGIN),
                ("vision_end_token", VISION_END),
            ):
                setattr(self, name, token)
                setattr(self, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    return ImageOnlyQwen3VLProcessor


def load_processor(checkpoint: Checkpoint) -> Any:
    """Load the processor. Raises ModelUnusable if files are missing, it pads on the right, or it has no chat template."""
    with checkpoint.loading():
        processor = _processor_class().from_pretrained(
            checkpoint.path, local_files_only=True, padding_side="left", backend="pil"
        )
    if processor.tokenizer.padding_side != "left":
        raise pads_right(checkpoint)
    if not processor.chat_template:
        raise checkpoint.unusable("it has no chat template")
    return processor


def require_one_vocabulary(checkpoint: Checkpoint, processor: Any, config: Any) -> None:
    """Raise ModelUnusable if tokenizer and model do not match; without its files a tokenizer loads empty."""
    ours, models = processor.image_token_id, config.image_token_id
    if ours != models:
        raise checkpoint.unusable(f"the number of the token {IMAGE} is {ours} in its tokenizer, {models} in its model")
    known, size = len(processor.tokenizer), config.text_config.vocab_size
    if known > size:
        raise checkpoint.unusable(f"its tokenizer knows {known} tokens, its model {size}")


def pads_right(checkpoint: Checkpoint) -> ModelUnusable:
    """Return the error of a processor that does not pad on the left."""
    # The model would continue after the padding: answers in a batch would silently differ from single ones.
    return checkpoint.unusable("its processor does not pad on the left")


def image_size(processor: Any, max_pixels: int) -> dict[str, int]:
    """Return the fewest and most pixels of a scaled image, which transformers calls edges."""
    own = processor.image_processor.size
    most = min(own["longest_edge"], max_pixels)
    return {"shortest_edge": min(own["shortest_edge"], most), "longest_edge": most}
