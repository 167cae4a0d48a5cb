"""Tag names equal Dagster's."""

import pytest
from dagster._core.definitions import data_version
from dagster._core.storage import tags as run_tags

from resources.dagster_internals import tags

OF_RUNS = {
    "PARTITION_TAG": "PARTITION_NAME_TAG",
    "RANGE_START_TAG": "ASSET_PARTITION_RANGE_START_TAG",
    "RANGE_END_TAG": "ASSET_PARTITION_RANGE_END_TAG",
    "MAX_RETRIES_TAG": "MAX_RETRIES_TAG",
    "SCHEDULE_NAME_TAG": "SCHEDULE_NAME_TAG",
    "SENSOR_NAME_TAG": "SENSOR_NAME_TAG",
    "GRPC_INFO_TAG": "GRPC_INFO_TAG",
    "DEFER_TAG": "EXTERNALLY_MANAGED_ASSETS_TAG",
}
OF_EVENTS = {
    "DATA_VERSION_TAG": "DATA_VERSION_TAG",
    "IS_USER_PROVIDED_TAG": "DATA_VERSION_IS_USER_PROVIDED_TAG",
    "CODE_VERSION_TAG": "CODE_VERSION_TAG",
    "INPUT_DATA_VERSION_PREFIX": "INPUT_DATA_VERSION_TAG_PREFIX",
    "INPUT_POINTER_PREFIX": "INPUT_EVENT_POINTER_TAG_PREFIX",
    "NO_POINTER": "NULL_EVENT_POINTER",
}


@pytest.mark.parametrize(
    ("module", "names"), [(run_tags, OF_RUNS), (data_version, OF_EVENTS)], ids=["of runs", "of events"]
)
def test_tags_equal_those_that_dagster_reads(module, names):
    """Histories contain them, so imagemill does not support a release with other names."""
    assert {ours: getattr(tags, ours) for ours in names} == {ours: getattr(module, of) for ours, of in names.items()}


def test_every_tag_is_compared():
    assert {name for name in vars(tags) if name.isupper()} == OF_RUNS.keys() | OF_EVENTS.keys()
