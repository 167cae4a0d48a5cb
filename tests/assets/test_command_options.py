"""assets/command_options.py: options that a command passes to its runs but the launchpad does not offer."""

import dagster as dg

from assets.command_options import OPTIONS_TAG, ImageOptions, RankOptions, RecordOptions, read_options, split_options


def read(options, tags):
    """Return the options that an asset reads in a run with these tags."""
    found = []

    @dg.asset
    def reader(context: dg.AssetExecutionContext) -> None:
        found.append(read_options(context, options))

    assert dg.materialize([reader], tags=tags).success
    return found[0]


def test_options_of_a_command_reach_the_asset_through_the_tag():
    config, tags = split_options({"regenerate": True, "up_to": "b", "extract_only": None})

    assert config == {"regenerate": True}
    assert list(tags) == [OPTIONS_TAG]
    assert read(ImageOptions, tags) == ImageOptions(up_to="b")


def test_run_without_the_tag_has_the_defaults():
    assert split_options({"regenerate": False}) == ({"regenerate": False}, {})
    assert read(RecordOptions, {}) == RecordOptions()
    assert read(RankOptions, {}) == RankOptions()


def test_each_asset_of_a_run_reads_its_own_options():
    _, tags = split_options({"kinds": ["dinov3_npy"], "migrate": False, "up_to": "b"})

    assert read(ImageOptions, tags) == ImageOptions(up_to="b")
    assert read(RecordOptions, tags) == RecordOptions(migrate=False, up_to="b", kinds=("dinov3_npy",))
