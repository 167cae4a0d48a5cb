"""Input settings that a data root records, and the rule that follows from them: which pixels an array was made from.

They are settings of the ledger with the second copy of all settings. A new data root records the defaults, one that is older
than a setting records the value of its time.

Values are in domain/inputs.py. A changed configuration is applied in pipeline/stage2/input_settings.py.

Spec: docs/spec/conventions.md#old-data-roots, docs/spec/conventions.md#staleness
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from imagemill.domain.inputs import IGNORE, NEW_INPUTS, OLD_INPUTS, SRGB, ColorSetting, InputSettings, setting_text
from imagemill.domain.layout import DataRoot
from imagemill.fs.fingerprints import FileSignature
from imagemill.store.ledger import Ledger, SourceRow

COLOR = "pixels.color"

# Name of each setting, in imagemill.yaml and in the ledger, by field of InputSettings.
NAMES: Final = {
    "color": COLOR,
    "formats": "inputs.formats",
    "recursive": "inputs.recursive",
    "companions": "inputs.companions",
    "exclude": "inputs.exclude",
    "sidecars": "captions.sidecars",
    "lines": "captions.lines",
    "encoding": "captions.encoding",
    "metadata": "captions.metadata",
    "file_column": "captions.file_column",
    "text_column": "captions.text_column",
    "strip_prefix": "captions.strip_prefix",
    "folder": "captions.folder",
    "repeats": "inputs.repeats",
    "share": "share",
}
_TYPES: Final = {field.name: field.type for field in msgspec.structs.fields(InputSettings)}

# Colours of arrays that are adopted: present if the ledger was lost, and its second copy says how they were made.
ADOPTED = "adopted.color"


class PixelRule(NamedTuple):
    """The input that an array of pixels must have.

    Attributes:
        color: how pixels are read.
        adopted: how the pixels of an array without a recorded input were read.
    """

    color: ColorSetting = SRGB
    adopted: ColorSetting = IGNORE

    @classmethod
    def read(cls, ledger: Ledger) -> "PixelRule":
        """Return the rule of a data root."""
        return cls(recorded_inputs(ledger.setting).color, SRGB if ledger.setting(ADOPTED) == SRGB else IGNORE)

    def ending(self, state: str | None) -> str | None:
        """Return what follows the fingerprint of an image in `SourceRow.pixel_input`, for one state of its colours."""
        return SourceRow("", "", FileSignature(""), "", 0, 0, state).pixel_input(self.color)

    def made_from(self, source: str | None, image: SourceRow) -> str | None:
        """Return the recorded input of an array, that of an adopted one if it is None."""
        return image.pixel_input(self.adopted) if source is None else source

    def is_current(self, source: str | None, image: SourceRow) -> bool:
        """Return whether an array with this recorded input was made from the pixels that the image has now."""
        wanted = image.pixel_input(self.color)
        return wanted is not None and self.made_from(source, image) == wanted


def recorded_inputs(setting: Callable[[str], str | None], otherwise: InputSettings = NEW_INPUTS) -> InputSettings:
    """Return the recorded settings. `setting` returns a setting by name; `otherwise` has the values of those it lacks."""
    found = {field: setting(name) for field, name in NAMES.items()}
    known = {field: _decoded(field, text) for field, text in found.items() if text is not None}
    return msgspec.structs.replace(otherwise, **known)


def record_inputs(ledger: Ledger, inputs: InputSettings) -> None:
    """Record the settings."""
    with ledger.transaction():
        for field, name in NAMES.items():
            ledger.record_setting(name, _encoded(getattr(inputs, field)))


def changes(before: InputSettings, now: InputSettings) -> Iterator[str]:
    """Yield a line for people for each setting that differs."""
    for field, name in NAMES.items():
        old, new = getattr(before, field), getattr(now, field)
        if old != new:
            yield f"{name} is now {setting_text(new)}; it was {setting_text(old)}"


def _encoded(value: object) -> str:
    """Return the value as the ledger stores it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()


def _decoded(field: str, text: str) -> Any:
    is_text = isinstance(getattr(NEW_INPUTS, field), str)
    return msgspec.convert(text, _TYPES[field]) if is_text else msgspec.json.decode(text, type=_TYPES[field])


def first_inputs(root: DataRoot, *, copied: bool) -> InputSettings:
    """Return the settings of a data root that has recorded none.

    Args:
        root: the data root.
        copied: whether there is a second copy of its settings.
    """
    is_old = copied or root.stage2_jsonl.exists() or _has_files(root)
    return OLD_INPUTS if is_old else NEW_INPUTS


def _has_files(root: DataRoot) -> bool:
    """Return whether there are arrays or shards: a folder with something in it, apart from hidden files."""
    folders = [root.shards, *(path for path in _listed(root.derived) if path.is_dir())]
    return any(not path.name.startswith(".") for folder in folders for path in _listed(folder))


def _listed(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from folder.iterdir()
