"""Conversion of plain settings to typed ones; errors name the setting and its permitted values.

The settings are declared in config.py; YAML files are read in safe_yaml.py.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from imagemill.errors import WrongUsage
from imagemill.text.close_names import name_hint

T = TypeVar("T")

# msgspec names types as JSON does; the files are YAML.
_WORDS = {
    "Expected": "expected",
    "object": "a mapping",
    "array": "a list",
    "null": "nothing",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


class _Fault(NamedTuple):
    place: tuple[str, ...]
    what: str
    why: str | None
    do: str


def described(settings: msgspec.Struct, unset: msgspec.Struct, added: Collection[str]) -> str:
    """Return settings as a digest contains them: their repr, without those that came after the digest while they are unset.

    So the digest stays the same for upgraded data roots.

    Args:
        settings: the settings.
        unset: settings of the same type, of which those that came later are unset.
        added: names of those that came later.
    """
    values = ((name, getattr(settings, name)) for name in settings.__struct_fields__)
    shown = (f"{name}={value!r}" for name, value in values if name not in added or value != getattr(unset, name))
    return f"{type(settings).__name__}({', '.join(shown)})"


def convert_settings(
    value: Any,
    kind: type[T],
    *,
    where: object,
    line: Callable[[Sequence[str]], int] | None = None,
    place: tuple[str, ...] = (),
) -> T:
    """Return the settings as a struct of this type.

    Args:
        value: the plain settings.
        kind: the struct type.
        where: source of the settings, for messages.
        line: function that returns the line of a setting, given the names that lead to it.
        place: names that lead to `value`.

    Raises:
        WrongUsage: for an unknown setting, and for a value that a setting cannot have.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = next(_faults(value, kind, place), None) or _Fault(place, str(error), None, "correct the value")
        at = f"{Path(str(where)).name} line {line(fault.place)}: " if line and fault.place else ""
        raise WrongUsage(at + fault.what, where=where, why=fault.why, do=fault.do) from error


def _faults(value: Any, kind: Any, place: tuple[str, ...]) -> Iterator[_Fault]:
    """Yield the errors, setting by setting."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, Mapping):
        types = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for name, each in value.items():
            if name in types:
                yield from _faults(each, types[name], (*place, str(name)))
            else:
                where = ".".join(place) or "the configuration"
                hint = name_hint(str(name), list(types))
                yield _Fault(
                    (*place, str(name)), f"{where} has no setting {name!r}", hint, "correct the name, or remove it"
                )
    elif get_origin(kind) is dict and isinstance(value, Mapping):
        for name, each in value.items():
            if not isinstance(name, str):
                what = f"{'.'.join(place)}: a name cannot be {name!r}"
                yield _Fault((*place, str(name)), what, None, "write the name in quotation marks")
            yield from _faults(each, get_args(kind)[1], (*place, str(name)))
    else:
        yield from _leaf_fault(value, kind, place)


def _leaf_fault(value: Any, kind: Any, place: tuple[str, ...]) -> Iterator[_Fault]:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        name = ".".join(place) or "the configuration"
        if choices := get_args(kind) if get_origin(kind) is Literal else _examples(kind):
            yield _Fault(place, f"{name} cannot be {value!r}", None, f"choose from {', '.join(map(str, choices))}")
            return
        expected = str(error).partition(" - at ")[0].replace("`", "")
        expected = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), expected).replace(" | ", " or ")
        yield _Fault(place, f"{name} cannot be {value!r:.80}: {expected}", None, "correct the value")


def _examples(kind: Any) -> Sequence[Any]:
    """Return the examples of an annotated type."""
    return (
        next((one.examples for one in getattr(kind, "__metadata__", ()) if isinstance(one, msgspec.Meta)), None) or ()
    )
