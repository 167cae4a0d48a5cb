"""Prompts of the vision-language model: one text file per mission, and one for captions.

    stage_a/<mission>.txt     that mission's images, in Chinese, one line
    stage_a/default.txt       every other mission's
    caption.txt               an image that has no caption, in English, one paragraph

Files named in imagemill.yaml take precedence: a mission's own, then `default`.

Prompts are used in encoders/vlm.py; answers are processed in pipeline/stage_a/summaries.py.
Spec: docs/spec/stage-a.md#work
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self

from imagemill.errors import MissingInput, WrongUsage

DEFAULT = "default"

_FOLDER = files(__name__)

# Of a caption. An English word is about 1.4 tokens.
_MOST_WORDS = 200


@dataclass(frozen=True, slots=True)
class Prompts:
    """Stage-A's prompts. `given`: mission, or `default`, → text that goes before ours."""

    given: Mapping[str, str]

    @classmethod
    def read(cls, paths: Mapping[str, str]) -> Self:
        """Read the configured files now, so that what is recorded is what is asked. Raises as `read_prompt` does."""
        return cls(
            {mission: read_prompt(Path(path), f"summarizer.prompts, {mission}") for mission, path in paths.items()}
        )

    def of(self, mission: str) -> str:
        """Return the prompt for a mission's images."""
        given = self.given.get(mission) or self.given.get(DEFAULT)
        ours = _ours()
        return given or ours.get(mission) or ours[DEFAULT]


def caption_prompt(path: str | None, tokens: int) -> str:
    """Return the captioner's prompt: that of the configured file, else the default. Raises as `read_prompt` does.

    Args:
        path: the configured file.
        tokens: most tokens of a caption that the text encoder reads, which determines the length that the default asks for.
    """
    if path is not None:
        return read_prompt(Path(path), "captioner.prompt")
    words = min(_MOST_WORDS, tokens * 2 // 3)
    return _FOLDER.joinpath("caption.txt").read_text("utf-8").strip().format(words=words)


def read_prompt(path: Path, setting: str) -> str:
    """Return the prompt in a text file, without surrounding white space.

    Raises:
        MissingInput: there is no such file. WrongUsage: it is blank, or no UTF-8 text.
    """
    do = f"save the prompt there as UTF-8 text, or correct {setting} in imagemill.yaml"
    try:
        text = path.read_text("utf-8-sig").strip()
    except OSError as error:
        raise MissingInput(f"prompt file cannot be read: {error.strerror}", where=path, do=do) from error
    except UnicodeDecodeError as error:
        raise WrongUsage(f"prompt file is not UTF-8 text: {error}", where=path, do=do) from error
    if not text:
        raise WrongUsage("prompt file is blank", where=path, do=do)
    return text


def _ours() -> dict[str, str]:
    # The folder is listed instead of building a path from the mission's name, so nothing outside the folder is read.
    return {
        file.name.removesuffix(".txt"): file.read_text("utf-8").strip()
        for file in _FOLDER.joinpath("stage_a").iterdir()
        if file.name.endswith(".txt")
    }
