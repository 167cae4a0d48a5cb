"""dagster_project/internals/event_json.py: the text of an event is the one that Dagster writes."""

import dagster as dg
import pytest
from dagster_shared.serdes import serialize_value
from hypothesis import given
from hypothesis import strategies as st

from dagster_project.internals.event_json import EventJson
from resources.dagster_internals.entries import new_entry

texts = st.text(max_size=20)
values = st.one_of(
    texts,
    st.integers(-(2**40), 2**60),
    st.floats(),
    st.booleans(),
    texts.map(dg.MetadataValue.md),
    texts.map(dg.MetadataValue.url),
    texts.map(dg.MetadataValue.path),
    st.just(dg.MetadataValue.json({"a": [1]})),
    st.none().map(dg.FloatMetadataValue),
)
labels = st.text("abc ()⟨⟩0", min_size=1, max_size=6)
tags = st.dictionaries(st.sampled_from(["dagster/data_version", "z", "a"]), st.text("ab-1", max_size=6))
materialisations = st.fixed_dictionaries(
    {
        "asset_key": st.sampled_from(["dinov3_npy", "approved_images"]),
        "description": st.none() | texts,
        "metadata": st.dictionaries(labels, values, max_size=4),
        "partition": st.none() | st.text(min_size=1, max_size=20),
        "tags": st.none() | tags,
    }
).map(lambda given: dg.AssetMaterialization(**given))
observations = st.dictionaries(labels, values).map(lambda metadata: dg.AssetObservation("a", metadata=metadata))


@given(st.lists(st.tuples(st.one_of(materialisations, observations), st.sampled_from(["", "run"])), max_size=8))
def test_text_is_that_of_dagster(events):
    """For any order of events with any metadata, and for values that look like placeholders."""
    texts_of = EventJson()

    for event, run_id in events:
        entry = new_entry(event, run_id)
        assert texts_of.text(entry) == serialize_value(entry)


@pytest.mark.parametrize("value", ["⟨1⟩", "COMPUTE", '"', "\ud800", "", "ü\u2028\0"])
def test_values_that_occur_elsewhere_in_the_text(value):
    texts_of = EventJson()

    for number in range(3):
        made = dg.AssetMaterialization(
            "a", partition=f"{value}{number}", metadata={"label": value, value or "x": value}
        )
        entry = new_entry(made, "run", "job")
        assert texts_of.text(entry) == serialize_value(entry)


def test_images_of_one_asset_share_a_template():
    texts_of = EventJson()

    for number in range(100):
        made = dg.AssetMaterialization("a", partition=str(number), metadata={"size (kB)": number / 10})
        texts_of.text(new_entry(made, "run", "job"))

    assert len(texts_of._templates) == 1
