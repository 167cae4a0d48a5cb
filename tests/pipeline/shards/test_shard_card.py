"""Documents beside the bucket folders: the dataset card and Energon's blend, both derived from manifests alone.

tests/spec/test_shards_readback.py checks that `datasets` and Energon accept them.
"""

from pathlib import Path

import pytest
import yaml
from huggingface_hub import DatasetCard

from imagemill.formats.energon import METADATASET
from imagemill.formats.jsonl import write_jsonl
from imagemill.formats.manifest import write_json
from imagemill.pipeline.shards import shard_card
from imagemill.pipeline.shards.shard_card import CARD, MARKER, OTHER_CARD, write_beside, write_card, write_metadataset
from imagemill.pipeline.shards.shard_manifest import FORMAT
from imagemill.pipeline.shards.shard_sets import MANIFEST, TOMBSTONES, Tombstone
from imagemill.pipeline.shards.shard_statistics import Measures, statistics_of

PROJECT = Path(__file__).parents[3]
FIXTURES = PROJECT / "tests/fixtures/dataset_cards"
SQUARE, TALL = "1024x1024", "832x1216"
MEMBERS = ["json", "dinov3.npy", "vae.npy", "t5h.npy", "t5m.npy"]


def maker(**changes):
    return {
        "model": "org/vae",
        "revision": "abc",
        "key": "k1",
        "preview": False,
        "facts": {},
        "unknown_maker": 0,
    } | changes


def bucket_set(output, bucket=SQUARE, *, samples=3, shards=((3, 1_500_000),), why=(), **changes):
    """Write a bucket's documents without tars: nothing else may be read."""
    folder = output / f"bucket_{bucket}"
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {
        "format": FORMAT, "bucket": bucket, "digest": "d", "samples": samples, "tombstones": len(why), "appended": False,
        "members": MEMBERS, "parameters": {}, "provenance": {"vae_latents": maker()},
        "shards": [{"name": f"shard-{n:06d}.tar", "samples": s, "bytes": b, "checksum": ""} for n, (s, b) in enumerate(shards)],
    }  # fmt: skip
    write_json(folder / MANIFEST, manifest | changes)
    if why:
        write_jsonl(folder / TOMBSTONES, [Tombstone(f"i{n}", "shard-000000.tar", n, w) for n, w in enumerate(why)])
    return folder


def written(output, **options):
    return write_card(output, **options).read_text()


def front_matter(text):
    """Return the block that the hub reads: between the first two lines of three hyphens."""
    before, matter, _ = text.split("---\n", 2)
    assert before == ""
    return yaml.safe_load(matter)


def rows(text, first):
    """Return the cells of the table row that begins with this cell."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


# ---- front matter


def test_front_matter_names_every_bucket_and_all_together(tmp_path):
    """`load_dataset(folder)` loads the default, `load_dataset(folder, bucket)` one bucket.

    Reference: hub, "Manual configuration".
    """
    bucket_set(tmp_path)
    bucket_set(tmp_path, TALL)

    configs = {config["config_name"]: config for config in front_matter(written(tmp_path))["configs"]}

    assert {name: config["data_files"] for name, config in configs.items()} == {
        "default": [{"split": "train", "path": "bucket_*/shard-*.tar"}],
        SQUARE: [{"split": "train", "path": f"bucket_{SQUARE}/shard-*.tar"}],
        TALL: [{"split": "train", "path": f"bucket_{TALL}/shard-*.tar"}],
    }
    assert configs["default"]["default"] is True


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(3, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (60_000, "10K<n<100K"), (10**9, "10M<n<100M")],
)
def test_front_matter_has_the_hubs_class_of_size(tmp_path, samples, expected):
    bucket_set(tmp_path, samples=samples)

    assert front_matter(written(tmp_path))["size_categories"] == [expected]


def test_licence_is_in_front_matter_where_one_is_configured(tmp_path):
    bucket_set(tmp_path)

    assert front_matter(written(tmp_path, licence="cc-by-4.0"))["license"] == "cc-by-4.0"
    assert "license" not in front_matter(written(tmp_path))


def test_hub_reads_the_front_matter_and_the_card(tmp_path):
    """Text that is not ASCII and long lines stay as they were written."""
    bucket_set(tmp_path)

    text = written(tmp_path, licence="Übersetzung " * 20)

    assert DatasetCard(text).data.to_dict() == front_matter(text)
    assert str(DatasetCard(text)) == text


# ---- sections


def test_counts_are_reported_by_bucket_and_in_all(tmp_path):
    bucket_set(tmp_path, samples=1500, shards=((1000, 2_000_000), (500, 1_000_000)))
    bucket_set(tmp_path, TALL, samples=7, shards=((7, 500),))

    text = written(tmp_path)

    assert rows(text, SQUARE) == [SQUARE, "1,500", "2", "3 MB"]
    assert rows(text, TALL) == [TALL, "7", "1", "500 B"]
    assert rows(text, "**all**") == ["**all**", "**1,507**", "3", "3 MB"]


def test_members_are_reported_with_dtype_and_shape(tmp_path):
    """Height precedes width; the bucket is named width x height."""
    bucket_set(tmp_path, TALL)

    text = written(tmp_path)

    assert rows(text, "`vae.npy`")[1:3] == ["float16", "(16, 152, 104); follows the image's own size"]
    assert rows(text, "`t5h.npy`")[1:3] == ["float16", "(77, 1024)"]
    assert rows(text, "`t5m.npy`")[1:3] == ["uint8", "(77,)"]


def test_member_of_an_unknown_kind_is_listed(tmp_path):
    bucket_set(tmp_path, members=[*MEMBERS, "pose.npy"])

    assert rows(written(tmp_path), "`pose.npy`")[0] == "`pose.npy`"


def test_models_are_reported_and_what_no_one_recorded(tmp_path):
    bucket_set(tmp_path, provenance={"vae_latents": maker(unknown_maker=2)})
    bucket_set(
        tmp_path, TALL, provenance={"vae_latents": maker(unknown_maker=3), "t5_hidden": maker(model=None, preview=None)}
    )

    text = written(tmp_path)

    assert rows(text, "vae_latents") == ["vae_latents", "`org/vae`", "`abc`", "`k1`", "no", "5"]
    assert rows(text, "t5_hidden") == ["t5_hidden", "not recorded", "`abc`", "`k1`", "unknown", "0"]
    assert "NOT FOR TRAINING" not in text


def test_preview_models_are_reported_before_anything_else(tmp_path):
    bucket_set(tmp_path, provenance={"vae_latents": maker(preview=True)})

    text = written(tmp_path)

    assert text.index("NOT FOR TRAINING. Preview models made: vae_latents") < text.index("## Buckets")
    assert rows(text, "vae_latents")[4] == "**preview: random weights**"


def test_histograms_sum_the_buckets(tmp_path):
    measures = [Measures(1024, 1024, 5)] * 3 + [Measures(500, 1000, 77)]
    bucket_set(tmp_path, samples=4, statistics=statistics_of(measures))
    bucket_set(tmp_path, TALL, samples=2, statistics=statistics_of([Measures(100, 900, 8), Measures(400, 1000, 8)]))

    text = written(tmp_path)

    assert rows(text, "1–8") == ["1–8", "5", "█" * 40]
    assert rows(text, "73–77") == ["73–77", "1", "█" * 8]
    assert rows(text, "9–16") == ["9–16", "0", ""]
    assert rows(text, "1.0")[1] == "3"
    assert rows(text, "<0.4")[1] == "1", "unusual ratios are in one class"
    assert rows(text, "0.4")[1] == "1"
    assert rows(text, "<2")[1] == "3"
    assert "captions that fill all 77, and may be cut off: 1" in text


def test_sets_without_statistics_are_reported_about(tmp_path):
    bucket_set(tmp_path, samples=4)
    assert "## Histograms" not in written(tmp_path)

    bucket_set(tmp_path, TALL, samples=1, statistics=statistics_of([Measures(100, 900, 8)]))
    assert "Not counted: 4 samples" in written(tmp_path)


def test_withdrawn_samples_are_counted_with_their_reasons(tmp_path):
    """`webdataset` and `datasets` ignore tombstones, so anyone who distributes the set needs to know."""
    bucket_set(tmp_path)
    assert "## Withdrawn" not in written(tmp_path)

    bucket_set(tmp_path, why=("withdrawn", "withdrawn", "not_ready"))
    assert "3 samples in the tars no longer count (1 not ready, 2 withdrawn)" in written(tmp_path)


def test_pipe_in_a_models_name_breaks_no_table(tmp_path):
    bucket_set(tmp_path, provenance={"vae_latents": maker(model="a|b")})

    assert "| `a\\|b` |" in written(tmp_path)


# ---- bytes


def all_sections(output):
    """Two buckets: one with statistics, a preview model, tombstones and an unknown kind; one written before statistics."""
    measures = [Measures(1024, 1024, 5)] * 1500 + [
        Measures(500, 1000, 77),
        Measures(100, 900, 8),
        Measures(9000, 900, 9),
    ]
    provenance = {"vae_latents": maker(preview=True, unknown_maker=1200), "dinov3": maker(model="a|b", revision=None)}
    bucket_set(
        output, samples=1503, shards=((1000, 2_345_678_901), (503, 999_999)), why=("withdrawn", "not_ready", "withdrawn"),
        statistics=statistics_of(measures), provenance=provenance, members=[*MEMBERS, "pose.npy"],
    )  # fmt: skip
    bucket_set(output, TALL, samples=7, shards=((7, 500),), provenance={"t5_hidden": maker(model=None, preview=None)})
    return {"licence": "cc-by-nc-sa-4.0"}


def no_optional_section(output):
    bucket_set(output, samples=1, shards=((1, 999),), provenance={})
    return {}


@pytest.mark.parametrize("case", [all_sections, no_optional_section], ids=lambda case: case.__name__)
def test_card_keeps_its_bytes(tmp_path, case):
    """The fixtures were written by the release before the template: the card of an unchanged set does not change."""
    options = case(tmp_path)

    path = write_card(tmp_path, **options)

    assert (FIXTURES / f"{case.__name__}.md").read_bytes() == path.read_bytes()


def test_wheel_contains_the_template():
    from hatchling.builders.wheel import WheelBuilder

    names = {file.distribution_path for file in WheelBuilder(str(PROJECT)).recurse_included_files()}

    assert "imagemill/pipeline/shards/dataset_card.md.jinja" in names


# ---- files


def test_equal_sets_give_equal_bytes_and_the_file_stays(tmp_path):
    bucket_set(tmp_path)
    first, inode = written(tmp_path), (tmp_path / CARD).stat().st_ino

    assert first == written(tmp_path)
    assert inode == (tmp_path / CARD).stat().st_ino, "what is the same is not written again"


def test_card_follows_its_sets(tmp_path):
    folder = bucket_set(tmp_path)
    write_card(tmp_path)
    write_metadataset(tmp_path)
    bucket_set(tmp_path, samples=2)

    assert rows(written(tmp_path), SQUARE)[1] == "2"

    (folder / MANIFEST).unlink()
    assert write_card(tmp_path) is None
    assert write_metadataset(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_readme_of_someone_else_stays(tmp_path):
    bucket_set(tmp_path)
    (tmp_path / CARD).write_text("mine")

    assert write_card(tmp_path) == tmp_path / OTHER_CARD
    assert (tmp_path / CARD).read_text() == "mine"
    assert MARKER in (tmp_path / OTHER_CARD).read_text()


def test_card_comes_home_when_the_other_readme_is_gone(tmp_path):
    bucket_set(tmp_path)
    (tmp_path / CARD).write_text("mine")
    write_card(tmp_path)
    (tmp_path / CARD).unlink()

    assert write_card(tmp_path) == tmp_path / CARD
    assert not (tmp_path / OTHER_CARD).exists()


def test_nothing_of_someone_else_is_touched(tmp_path):
    bucket_set(tmp_path)
    theirs = [tmp_path / name for name in (CARD, OTHER_CARD, METADATASET)]
    for path in theirs:
        path.write_text("mine")

    assert (write_card(tmp_path), write_metadataset(tmp_path)) == (None, None)
    assert [path.read_text() for path in theirs] == ["mine"] * 3


def test_readme_that_is_a_folder_or_a_link_is_not_ours(tmp_path):
    bucket_set(tmp_path)
    (tmp_path / CARD).symlink_to(tmp_path / "nowhere")
    (tmp_path / OTHER_CARD).mkdir()

    assert write_card(tmp_path) is None
    assert not (tmp_path / "nowhere").exists()


def test_link_to_a_card_of_ours_is_not_ours(tmp_path):
    """A user made the link; replacing it would leave the linked file without this name."""
    shards, elsewhere = tmp_path / "shards", tmp_path / "elsewhere"
    bucket_set(shards)
    bucket_set(elsewhere)
    (shards / CARD).symlink_to(write_card(elsewhere))

    assert write_card(shards) == shards / OTHER_CARD
    assert (shards / CARD).is_symlink()


def test_metadataset_names_every_bucket_with_samples(tmp_path):
    bucket_set(tmp_path, samples=30)
    bucket_set(tmp_path, TALL, samples=10)

    blend = yaml.safe_load(write_metadataset(tmp_path).read_text())["splits"]["train"]["blend_epochized"]

    assert {one["path"]: one["repetitions"] for one in blend} == {"./bucket_1024x1024": 1, "./bucket_832x1216": 1}


# ---- beside another run


def test_bucket_that_another_run_publishes_meanwhile_is_reported_of(tmp_path, monkeypatch):
    """Runs lease buckets, not the folder: the last run to check describes all of them."""
    bucket_set(tmp_path)
    write = shard_card.card

    def slow_card(sets, *arguments):
        if len(sets) == 1:
            bucket_set(tmp_path, TALL)
        return write(sets, *arguments)

    monkeypatch.setattr(shard_card, "card", slow_card)
    write_beside(tmp_path)

    assert [config["config_name"] for config in front_matter((tmp_path / CARD).read_text())["configs"]][1:] == [
        SQUARE,
        TALL,
    ]
    assert f"bucket_{TALL}" in (tmp_path / METADATASET).read_text()
