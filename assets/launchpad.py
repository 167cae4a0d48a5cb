"""Options that may be left unset, as the launchpad shows them.

Dagster's launchpad lists an option with its default only if that is not null. An option that may be left unset therefore has a
default that means "unset", such as 0 or an empty text, and reads as None in the asset; a list or mapping stays empty.
"""

from enum import StrEnum
from typing import Any

import dagster as dg
from pydantic import Field, ValidationInfo, field_validator

# Name and value of the choice that means "unset".
UNSET = "unset"


class LaunchpadConfig(dg.Config):
    """Configuration of an asset whose fields may be made by `unset`."""

    @field_validator("*", mode="before")
    @classmethod
    def _none_if_unset(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        is_unset = field.json_schema_extra and type(value) is type(field.default) and value == field.default
        return None if is_unset else value


def unset(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field that is None while it has its default.

    Args:
        description: `{unset}` in it is replaced by the default.
    """
    name = f"`{default}`" if isinstance(default, str | int | float) and default != "" else "empty"
    marked = {"json_schema_extra": {UNSET: True}, "validate_default": True}
    return Field(default, description=description.format(unset=name), **marked, **constraints)


def choice(name: str, values: Any) -> Any:
    """Return an enumeration of text values, with a member that means "unset"."""
    return StrEnum(name, {UNSET: UNSET, **{value: value for value in values}})
