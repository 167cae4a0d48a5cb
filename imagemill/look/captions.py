"""The part of a caption that a text encoder sees, by the tokenizer alone.

Captions are tokenised for models in encoders/captions.py; models are found, and fetched, in encoders/loading.py.
"""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from imagemill.domain.encoder_settings import PREVIEW, EncoderSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


def caption_cut(text: str, tokenizer_folder: Path, tokens: int) -> int | None:
    """Return how many characters of a caption its text encoder sees, `len(text)` if it sees all.

    An encoder keeps the first `tokens` - 1 tokens and the end token.

    Args:
        text: the caption.
        tokenizer_folder: folder with the tokenizer of the encoder's model.
        tokens: most tokens of the encoder.

    Returns:
        None if the folder has no `tokenizer.json`, or one that cannot be read.
    """
    tokenizer = _tokenizer(tokenizer_folder / _FILE)
    if tokenizer is None:
        return None
    # A lone surrogate becomes one character, as in encoders/captions.py.
    encoding = tokenizer.encode(text.encode("utf-8", "replace").decode("utf-8"))
    if len(encoding.ids) <= tokens:
        return len(text)
    # A character may have several tokens: one of which some are cut off is not seen.
    seen = max((end for _, end in encoding.offsets[: tokens - 1]), default=0)
    return min(seen, encoding.offsets[tokens - 1][0])


def tokenizer_folder(settings: EncoderSettings) -> Path | None:
    """Return the folder of a text encoder's tokenizer on this machine; None if it has none, as preview models.

    Of a hub model, that is its folder in the hub's cache.
    """
    if settings.model == PREVIEW:  # also beside a folder of this name
        return None
    own = getattr(settings, "tokenizer_subfolder", None)
    inside = Path(settings.subfolder or "" if own is None else own)
    folder = Path(settings.model).expanduser() / inside
    if (folder / _FILE).is_file():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError, OSError):
        found = try_to_load_from_cache(settings.model, (inside / _FILE).as_posix(), revision=settings.revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def _tokenizer(path: Path) -> "Tokenizer | None":
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=8)
def _loaded(path: Path, mtime_ns: int) -> "Tokenizer | None":
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception:  # the library raises Exception itself for a damaged file
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
