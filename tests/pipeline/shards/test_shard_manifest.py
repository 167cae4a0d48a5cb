"""The manifest of a set: a strict schema, and a digest over its content."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.errors import ImagemillError, MissingInput
from imagemill.formats.manifest import read_json, write_json
from imagemill.pipeline.shards.shard_manifest import (
    SEAL,
    Manifest,
    ShardParameters,
    content_digest,
    decode_manifest,
    document_of,
    seal_is_broken,
    sealed,
)
from imagemill.pipeline.shards.shard_sets import IndexLine, Tombstone, load_manifest, read_index, read_manifest
from tests.helpers.shard_sets import shard_set

DOCUMENT = {
    "format": "imagemill-shards/2", "bucket": "1024x1024", "digest": "d", "samples": 1, "tombstones": 0, "appended": False,
    "members": ["json", "vae.npy"], "parameters": {}, "provenance": {"vae_latents": {"preview": False}},
    "shards": [{"name": "shard-000000.tar", "samples": 1, "bytes": 10240, "checksum": "xxh3:0"}],
}  # fmt: skip

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@pytest.fixture
def folder(tmp_path):
    """One bucket's set, two tars."""
    return shard_set(tmp_path / "data", dict.fromkeys("abcde", (64, 64))).shards / "bucket_1024x1024"


def test_written_manifest_is_sealed_and_reads_back(folder):
    manifest = load_manifest(folder)

    assert manifest.sealed
    assert not seal_is_broken(read_json(folder / "manifest.json"))
    assert sealed(document_of(manifest)) == read_json(folder / "manifest.json")


def test_minimal_document_is_decoded():
    manifest = decode_manifest(DOCUMENT)

    assert isinstance(manifest, Manifest)
    assert (manifest.sealed, manifest.bytes, manifest.parameters) == (False, 10240, ShardParameters())


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "imagemill-shards/3"}, {"bucket": "1x1"}, {"bucket": None}, {"samples": -1}, {"samples": True},
        {"samples": "1"}, {"appended": 0}, {"more": 1}, {"parameters": {"shard_sise": 1}}, {"parameters": {"shard_size": 0}},
        {"provenance": {"vae_latents": {"previw": False}}}, {"provenance": {"vae_latents": {"preview": "no"}}},
        {"provenance": {"vae_latents": {"preview": 0}}}, {"statistics": {"more": {}}},
    ],
)  # fmt: skip
def test_document_that_breaks_the_schema_is_refused(changes):
    with pytest.raises(msgspec.ValidationError):
        decode_manifest({**DOCUMENT, **changes})


ESCAPES = [
    "../../victim",
    "/etc/passwd",
    "a/b",
    "..",
    "shard-000000.tar/../../x",
    "shard-000000.tar\n",
    "a\0b",
    "C:\\x",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_name_that_leaves_the_folder_is_refused_everywhere(name):
    """Tar names, kinds and members of a manifest, tar names and ids of an index and its tombstones."""
    (entry,) = DOCUMENT["shards"]
    for changes in ({"shards": [{**entry, "name": name}]}, {"provenance": {name: {}}}, {"members": ["json", name]}):
        with pytest.raises(msgspec.ValidationError):
            decode_manifest({**DOCUMENT, **changes})
    line = {"image_id": "a", "key": "a", "shard": "shard-000000.tar", "offset": 0, "size": 512, "digest": "d"}
    msgspec.convert(line, IndexLine)
    for kind in (IndexLine, Tombstone):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**line, "why": "changed", "shard": name}, kind)
    if name != "shard-000000.tar\n":
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({**line, "image_id": "../" + name}, IndexLine)


@given(st.text(alphabet=st.sampled_from("./\\\0\na-0shardtar"), max_size=24))
def test_accepted_tar_name_is_a_plain_file_name(name):
    try:
        decode_manifest({**DOCUMENT, "shards": [{**DOCUMENT["shards"][0], "name": name}]})
    except msgspec.ValidationError:
        return
    assert name.startswith("shard-")
    assert not set(name) & {"/", "\\", "\0", "\n"}


@given(st.dictionaries(st.text(), json_values, max_size=4), st.text(), json_values)
def test_digest_binds_every_value(document, name, value):
    changed = {**document, name: value}
    same = msgspec.json.encode(document, order="sorted") == msgspec.json.encode(changed, order="sorted")

    if name != SEAL:
        assert (content_digest(document) == content_digest(changed)) == same
    assert not seal_is_broken(sealed(document))


@pytest.mark.parametrize("preview", [True, False])
def test_edited_manifest_is_refused_and_is_reported(folder, preview):
    document = read_json(folder / "manifest.json")
    document["provenance"]["vae_latents"]["preview"] = preview
    document["provenance"]["vae_latents"]["model"] = "another/model"
    write_json(folder / "manifest.json", document)

    assert read_manifest(folder) is None
    with pytest.raises(ImagemillError, match=r"manifest.json was changed after it was written") as error:
        load_manifest(folder)
    assert "imagemill shards --overwrite" in str(error.value)


def test_manifest_written_with_other_white_space_is_the_same(folder):
    document = read_json(folder / "manifest.json")
    (folder / "manifest.json").write_bytes(msgspec.json.encode(document))

    assert load_manifest(folder).samples == 5


def test_missing_manifest_is_named(folder):
    (folder / "manifest.json").unlink()

    with pytest.raises(MissingInput, match=r"bucket_1024x1024 has no manifest.json"):
        load_manifest(folder)


def test_index_of_a_written_set_is_read(folder):
    assert [line.image_id for line in read_index(folder)] == list("abcde")
