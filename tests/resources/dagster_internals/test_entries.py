"""resources/dagster_internals/entries.py: entries made from an earlier one are those that Dagster writes."""

import time
from types import SimpleNamespace

import dagster as dg
import pytest
from dagster._core.definitions.dependency import NodeHandle
from dagster._core.errors import DagsterInvalidMetadata
from dagster._core.execution.plan.handle import StepHandle
from hypothesis import given
from hypothesis import strategies as st

from resources.dagster_internals.entries import MaterializationEntries, new_entry

KEY = dg.AssetKey(["a", "b"])
NODE = NodeHandle("node", None)
STEP = SimpleNamespace(handle=StepHandle(NODE), node_handle=NODE, kind=SimpleNamespace(value="COMPUTE"), key="node")

texts = st.text(max_size=8)
values = st.one_of(texts, st.integers(), st.booleans(), texts.map(dg.MetadataValue.md), st.just({"a": [1]}))
tags = st.dictionaries(
    st.sampled_from(["dagster/data_version", "dagster/code_version", "a"]), st.text("ab-1", max_size=6)
)
materialisations = st.tuples(
    st.none() | st.text(min_size=1, max_size=8),
    st.dictionaries(st.sampled_from(["model", "look"]), values),
    tags,
)


@given(st.lists(materialisations, max_size=12), st.sampled_from([(), ("run", "job", STEP)]))
def test_each_entry_is_that_of_its_own_event(events, of_run):
    entries = MaterializationEntries(KEY, *of_run)

    for partition, metadata, given_tags in events:
        event = dg.AssetMaterialization(KEY, partition=partition, metadata=metadata, tags=given_tags)
        began = time.time()
        entry = entries.entry(partition, metadata, given_tags)
        assert began <= entry.timestamp <= time.time()
        assert entry == new_entry(event, *of_run)._replace(timestamp=entry.timestamp)
        assert type(entry.dagster_event.event_specific_data.materialization) is dg.AssetMaterialization


def test_metadata_that_dagster_refuses_is_refused_later_too():
    entries = MaterializationEntries(KEY)
    entries.entry("first", {"model": "name"}, {})

    with pytest.raises(DagsterInvalidMetadata):
        entries.entry("second", {"model": object()}, {})
