"""io_managers/figures.py: counters as displayed in the UI."""

from io_managers.figures import megabytes, with_units


def test_names_of_counters_contain_the_unit():
    counts = {"records": 3, "mask_corrected": 1, "truncated_captions": 2}

    assert with_units(counts, "records", truncated_captions="captions") == {
        "records": 3, "mask corrected (records)": 1, "truncated captions": 2,
    }  # fmt: skip


def test_sizes_are_decimal():
    assert megabytes(54_179_840) == {"size (MB)": 54.18}
