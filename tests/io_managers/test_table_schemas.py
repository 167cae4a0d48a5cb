"""The columns that Dagster's catalog shows are the fields of the records."""

import msgspec

from imagemill.domain.preset_records import PresetRecord
from imagemill.domain.stage2_records import OPTIONAL_FIELDS, Stage2Record
from io_managers.table_schemas import PRESET_COLUMNS, STAGE2_COLUMNS, column_schema


def test_columns_are_the_fields_of_the_records_in_their_order():
    assert list(STAGE2_COLUMNS) == list(Stage2Record.__struct_fields__)
    assert list(PRESET_COLUMNS) == list(PresetRecord.__struct_fields__)


def test_optional_fields_may_be_absent_and_no_others():
    nullable = {column.name for column in column_schema(STAGE2_COLUMNS).columns if column.constraints.nullable}
    assert nullable == set(OPTIONAL_FIELDS)
    nullable = {column.name for column in column_schema(PRESET_COLUMNS).columns if column.constraints.nullable}
    assert nullable == {field.name for field in msgspec.structs.fields(PresetRecord) if not field.required}
