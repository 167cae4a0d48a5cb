"""A data root whose identities contain the hashes of weight files goes on with the same files.

Spec: docs/spec/conventions.md#provenance
"""

import json
import shutil

import msgspec
import pytest

from imagemill.domain.embedding_specs import embedding_specs
from imagemill.encoders.preview import ensure_preview
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from tests.helpers.product import imagemill, photos, snapshot


def product(root, *arguments, code=0):
    done = imagemill(*arguments, "--data-root", root.path)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def root(data_root, preview_root):
    """One image, embedded by models in folders."""
    models = {
        spec.kind: {"model": str(shutil.copytree(ensure_preview(spec, preview_root), data_root.path / spec.kind))}
        for spec in embedding_specs()
    }
    data_root.config_file.write_text(json.dumps({"encoders": models}))
    photos(data_root.approved, 1)
    product(data_root, "stage2")
    return data_root


def make_old(root):
    """Give all identities and model keys the form of an earlier release; return the identities as stored."""
    with Ledger(root.ledger) as ledger:
        for spec in embedding_specs():
            new = msgspec.json.decode(ledger.setting(f"identity.{spec.kind}").encode(), type=ModelIdentity)
            old = new.former
            document = msgspec.to_builtins(old)
            del document["libraries"], document["files_sha256"]
            ledger.record_setting(f"identity.{spec.kind}", json.dumps(document))
            ledger.record_files(
                [msgspec.structs.replace(row, model_key=old.key) for row in ledger.files(spec.kind).values()]
            )
    return identities(root)


def identities(root):
    with Ledger(root.ledger) as ledger:
        return {name: value for name, value in ledger.settings().items() if name.startswith("identity.")}


def keys(root):
    with Ledger(root.ledger) as ledger:
        return [{row.model_key for row in ledger.files(spec.kind).values()} for spec in embedding_specs()]


def test_old_root_continues_and_refuses_other_weights(root):
    """New files get the recorded key, and no identity is rewritten."""
    old, before, of_files = make_old(root), snapshot(root.derived / "vae_latents"), keys(root)
    photos(root.approved, 2)

    assert "vae_latents 1 made" in product(root, "stage2")

    assert old == identities(root)
    assert before.items() <= snapshot(root.derived / "vae_latents").items()
    assert of_files == keys(root)
    [weights] = (root.path / "vae_latents").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    photos(root.approved, 3)
    assert "differs in weights_sha256" in product(root, "stage2", code=1)


def test_identity_and_manifest_of_a_new_root_name_the_libraries(root):
    """The manifest of an old identity is as before."""
    recorded = [json.loads(value) for value in identities(root).values()]
    product(root, "shards", "--allow-preview")
    [manifest] = root.shards.glob("*/manifest.json")
    entries = json.loads(manifest.read_text())["provenance"]

    assert {3} == {identity["scheme"] for identity in recorded}
    assert {64} == {len(identity["facts"]["weights_sha256"]) for identity in recorded}
    for identity in recorded:
        assert {"torch", "transformers", "diffusers"} == identity["libraries"].keys()
        assert identity["libraries"] == entries[identity["kind"]]["libraries"]

    make_old(root)
    product(root, "shards", "--allow-preview", "--overwrite")
    entries = json.loads(manifest.read_text())["provenance"].values()
    assert not any("libraries" in entry for entry in entries)
