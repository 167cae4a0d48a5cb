"""JSON of materialisations as Dagster stores it, in a tenth of its time.

The events of a batch differ in partition, values of metadata, tags and time. Dagster serialises the first event of each kind,
with placeholders there; the others are that text with their own values.

Used in storage.py. tests/dagster_project/internals/test_event_json.py compares the texts with Dagster's.
"""

import math
from collections.abc import Callable, Hashable
from json.encoder import encode_basestring_ascii
from operator import itemgetter
from typing import Any, NamedTuple

import dagster as dg
from dagster import DagsterEventType, EventLogEntry
from dagster._core.events import StepMaterializationData
from dagster_shared.serdes import serialize_value

# Metadata values of one field.
_FIELDS = {
    dg.TextMetadataValue: "text",
    dg.MarkdownMetadataValue: "md_str",
    dg.UrlMetadataValue: "url",
    dg.PathMetadataValue: "path",
    dg.IntMetadataValue: "value",
    dg.FloatMetadataValue: "value",
}

# Most templates that are kept: one for each run, asset, and set of metadata.
_MOST = 256


class _Parts(NamedTuple):
    """The parts of an event: what it shares with others, and its own values."""

    shape: Hashable
    values: list[Any]


class _Template(NamedTuple):
    """The text of an event without its values: `texts` has an empty place for each of `ordered(values)`."""

    texts: list[str]
    ordered: Callable[[list[Any]], tuple[Any, ...]]


class EventJson:
    """Serialises events; keeps a template of each kind of materialisation."""

    def __init__(self) -> None:
        self._templates: dict[Hashable, _Template | None] = {}

    def text(self, event: EventLogEntry) -> str:
        """Return an event as Dagster stores it."""
        parts = _parts(event)
        if parts is None:
            return serialize_value(event)
        if parts.shape not in self._templates:
            if len(self._templates) >= _MOST:
                self._templates.clear()
            self._templates[parts.shape] = _template(event, parts)
        template = self._templates[parts.shape]
        if template is None:
            return serialize_value(event)
        filled = template.texts.copy()
        filled[1::2] = map(_json, template.ordered(parts.values))
        return "".join(filled)


def _json(value: str | int | float) -> str:
    return encode_basestring_ascii(value) if isinstance(value, str) else repr(value)


def _parts(event: EventLogEntry) -> _Parts | None:
    """Return the parts of the materialisation of a partition; None for other events, and for values of other types."""
    of_asset = event.dagster_event
    if of_asset is None or of_asset.event_type_value != DagsterEventType.ASSET_MATERIALIZATION.value:
        return None
    data = of_asset.event_specific_data
    if type(data) is not StepMaterializationData or data.asset_lineage or of_asset.logging_tags or event.error_info:
        return None
    made = data.materialization
    if made.partition is None or made.description is not None:
        return None
    tags = made.tags or {}
    values: list[Any] = [made.partition]
    kinds = []
    for value in made.metadata.values():
        kind = type(value)
        field = _FIELDS.get(kind)
        values.append(getattr(value, field) if field else None)
        kinds.append(kind)
    values += tags.values()
    values.append(event.timestamp)
    for value in values:
        kind = type(value)
        if kind is not str and kind is not int and not (kind is float and math.isfinite(value)):
            return None
    shape = (
        event.run_id, event.step_key, event.level, event.job_name, event.user_message, of_asset.message, of_asset.pid,
        of_asset.job_name, made.asset_key, made.tags is None, *kinds, *made.metadata, None, *tags,
    )  # fmt: skip
    return _Parts((*shape, *map(type, values)), values)


def _template(event: EventLogEntry, parts: _Parts) -> _Template | None:
    """Return the template of an event with these parts; None if Dagster's text does not contain each value once."""
    marks = [_placeholder(value, number) for number, value in enumerate(parts.values)]
    partition, *inner, timestamp = marks
    of_asset = event.get_dagster_event()
    made = of_asset.step_materialization_data.materialization
    metadata = {
        label: _with_value(value, mark) for (label, value), mark in zip(made.metadata.items(), inner, strict=False)
    }
    tags = made.tags and dict(zip(made.tags, inner[len(metadata) :], strict=True))
    data = StepMaterializationData(made._replace(partition=partition, metadata=metadata, tags=tags))
    sample = event._replace(timestamp=timestamp, dagster_event=of_asset._replace(event_specific_data=data))
    text, written = serialize_value(sample), [_json(mark) for mark in marks]
    if any(text.count(mark) != 1 for mark in written):
        return None
    order = sorted(range(len(written)), key=lambda number: text.index(written[number]))
    texts = []
    for number in order:
        before, _, text = text.partition(written[number])
        texts += [before, ""]
    return _Template([*texts, text], itemgetter(*order))


def _with_value(metadata: dg.MetadataValue[Any], value: object) -> dg.MetadataValue[Any]:
    kind: Any = type(metadata)
    return kind(value)


def _placeholder(value: object, number: int) -> str | int | float:
    """Return a value of the same type that occurs nowhere else in an event."""
    if isinstance(value, str):
        return f"\u27e8{number}\u27e9"
    whole = 10**15 + 1009 * number + 1
    return whole + 0.5 if isinstance(value, float) else whole
