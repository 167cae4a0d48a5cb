"""Names of the run tags and event tags that Dagster reads.

Runs and events of existing histories contain them, so their values do not depend on the Dagster release;
tests/resources/dagster_internals/test_tags.py compares them with Dagster's.
"""

PARTITION_TAG = "dagster/partition"
RANGE_START_TAG = "dagster/asset_partition_range_start"
RANGE_END_TAG = "dagster/asset_partition_range_end"
MAX_RETRIES_TAG = "dagster/max_retries"
SCHEDULE_NAME_TAG = "dagster/schedule_name"
SENSOR_NAME_TAG = "dagster/sensor_name"
# Set on runs that a code server executes.
GRPC_INFO_TAG = ".dagster/grpc_info"
# "true" suppresses Dagster's own events for every asset of the run.
DEFER_TAG = "dagster/defer_asset_events"

DATA_VERSION_TAG = "dagster/data_version"
IS_USER_PROVIDED_TAG = "dagster/data_version_is_user_provided"
CODE_VERSION_TAG = "dagster/code_version"
INPUT_DATA_VERSION_PREFIX = "dagster/input_data_version"
INPUT_POINTER_PREFIX = "dagster/input_event_pointer"
NO_POINTER = "NULL"


def range_tags(first: str, last: str) -> dict[str, str]:
    """Return the tags of a run over every partition from `first` to `last`, in order of registration."""
    return {RANGE_START_TAG: first, RANGE_END_TAG: last}
