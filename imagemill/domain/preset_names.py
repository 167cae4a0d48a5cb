"""Preset names: `<base>`, and `<base>_max{N}` for a preset without the records that have more than N objects.

    rescale_32_768          a base preset
    rescale_32_768_max60    derived from it, N = 60
    rescale_32_768_max_60   refused: rename it to rescale_32_768_max60

This module parses and builds names, resolves N if it is given in several places, and determines which commands accept
it. Derived presets are made in pipeline/presets/derive.py; valid folder names are checked in public_data.py.

Spec: docs/spec/presets.md#hardlinks, docs/spec/presets.md#names-of-derived-presets,
docs/spec/presets.md#maximum-number-of-objects
"""

import re
from typing import Literal, NamedTuple, NoReturn

from imagemill.errors import WrongUsage

MAX_OBJECTS_VARIABLE = "PUBLIC_DATA_MAX_OBJECTS"

Command = Literal["convert", "rescale", "coord", "all", "validate"]

# Digits are 0 to 9 only; `\d` also matches digits of other scripts.
_SUFFIX = re.compile(r"(?s)(.*)_max([0-9]+)")
_OLD_SUFFIX = re.compile(r"_max_([0-9]+)(?=_|\Z)")
_NUMBER = re.compile(r"[0-9]+")

_SOURCES = {
    "suffix": "the preset's name",
    "flag": "--max-objects",
    "config": "presets.yaml",
    MAX_OBJECTS_VARIABLE: MAX_OBJECTS_VARIABLE,
}


class PresetName(NamedTuple):
    """A parsed preset name: `max_objects` is None for a base preset."""

    base: str
    max_objects: int | None = None

    @property
    def effective(self) -> str:
        """The name of the preset's folder."""
        return self.base if self.max_objects is None else f"{self.base}_max{self.max_objects}"


def parse_preset(name: str) -> PresetName:
    """Parse a preset's name.

    Raises:
        WrongUsage: if its suffix is `_max_{N}`, zero-padded, below 1, or one of two.
    """
    if old := _OLD_SUFFIX.search(name):
        rest = _OLD_SUFFIX.sub("", name)
        renamed = f"rename it to {rest}_max{int(old[1])}"
        _refuse(name, "the suffix is `_max{N}`; `_max_{N}` belongs to an older layout", renamed)
    match = _SUFFIX.fullmatch(name)
    if match is None:
        return PresetName(name)
    base, digits = match[1], match[2]
    if not base:
        _refuse(name, "there is no name before the suffix", "name it <base preset>_max{N}")
    stacked = _SUFFIX.fullmatch(base)
    if stacked:
        smaller = min(int(digits), int(stacked[2]))
        why = "two suffixes; records over the smaller limit are dropped either way"
        _refuse(name, why, f"rename it to {stacked[1]}_max{smaller}")
    if int(digits) < 1:
        _refuse(name, "max_objects must be at least 1", f"use {base}, or {base}_max{{N}} with N of 1 or more")
    if digits.startswith("0"):
        _refuse(name, "the number is zero-padded", f"rename it to {base}_max{int(digits)}")
    return PresetName(base, int(digits))


def derived_name(base: str, max_objects: int) -> str:
    """Return the name of a preset derived from a base preset; raise WrongUsage if the base is itself derived."""
    refuse_derived(base, "a derived preset is made of a base preset")
    return PresetName(base, max_objects_of(max_objects, "max_objects")).effective


def refuse_derived(name: str, why: str) -> None:
    """Raise WrongUsage unless the name is that of a base preset."""
    base, max_objects = parse_preset(name)
    if max_objects is not None:
        _refuse(
            name,
            why,
            f"use --preset {base}; then `imagemill preset coord … --preset {base} --max-objects {max_objects}`",
        )


def max_objects_of(value: int | str, source: str) -> int:
    """Return the number given by a flag, a variable or a configuration.

    Raises:
        WrongUsage: if it is not an integer of at least 1; the message contains `source`.
    """
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = int(value)
    if type(value) is not int or value < 1:
        raise WrongUsage(
            f"{source} is {value!r}: not a whole number of at least 1",
            why="records with more than N objects are dropped whole",
            do="give N of 1 or more, or leave it out for the base preset",
        )
    return value


def resolve_max_objects(**sources: int | str | None) -> int | None:
    """Return the one N given by the sources: `suffix`, `flag`, `config`, `PUBLIC_DATA_MAX_OBJECTS`.

    None and an empty variable count as not given. Equal values are accepted.

    Raises:
        WrongUsage: if two differ (both are named), or one is not a valid N.
    """
    given = {
        source: max_objects_of(value, _SOURCES[source])
        for source, value in sources.items()
        if value is not None and value != ""
    }
    (first, value), *others = given.items() or [("", None)]
    for source, other in others:
        if other != value:
            raise WrongUsage(
                f"max_objects differs: {value} by {_SOURCES[first]}, {other} by {_SOURCES[source]}",
                why="neither is silently overridden",
                do="give it in one place, or the same in both",
            )
    return value


def effective_preset(
    command: Command,
    preset: str,
    *,
    flag: int | str | None = None,
    config: int | str | None = None,
    environment: int | str | None = None,
) -> PresetName:
    """Return the preset that a command works on; no other function decides this.

    Args:
        command: the subcommand of `imagemill preset`.
        preset: its name as given.
        flag: `--max-objects`, for `coord` only.
        config: `max_objects` of presets.yaml, for `coord` only; other commands ignore it.
        environment: `PUBLIC_DATA_MAX_OBJECTS`, for `coord` only.

    Raises:
        WrongUsage: if a name or number is invalid, or two conflict; always before any work.
    """
    name = parse_preset(preset)
    if command == "coord":
        found = resolve_max_objects(
            suffix=name.max_objects, flag=flag, config=config, **{MAX_OBJECTS_VARIABLE: environment}
        )
        return PresetName(name.base, found)
    found = resolve_max_objects(flag=flag, **{MAX_OBJECTS_VARIABLE: environment})
    if found is not None and command != "convert":
        source = "flag" if flag not in {None, ""} else MAX_OBJECTS_VARIABLE
        raise WrongUsage(
            f"preset {command} takes no max_objects: {found} by {_SOURCES[source]}",
            why="only coord drops records",
            do=f"two steps: `imagemill preset rescale … --preset {name.base}`, "
            f"then `imagemill preset coord … --preset {name.base} --max-objects {found}`",
        )
    if command in {"rescale", "all"}:
        refuse_derived(preset, f"{command} makes images, and only a base preset has images of its own")
    return name


def _refuse(name: str, why: str, do: str) -> NoReturn:
    raise WrongUsage(f"{name!r} is not a valid preset name", why=why, do=do)
