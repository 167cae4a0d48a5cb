"""Checks of the embedding assets: they pass on the output of a run, and fail on files damaged later.

Spec: docs/spec/conventions.md#completion-and-identity
"""

import dagster as dg
import numpy as np
import pytest

from assets.embeddings import embedding_assets
from checks.embeddings import embedding_checks
from imagemill.domain.embedding_specs import VAE, embedding_specs
from imagemill.pipeline.stage2.models_in_use import PREVIEW_TEXT
from imagemill.pipeline.stage2.regenerate import regenerate
from imagemill.store.ledger import Ledger
from tests.helpers.stage2 import embed, photos
from tests.helpers.wiring import check, checks_of, history, materialize, stub_every_kind

KEYS = ["a", "b"]
EVERY_CHECK = {f"{spec.kind}:{name}" for spec in embedding_specs() for name in ("files_valid", "inputs_accepted")}


@pytest.fixture
def instance(monkeypatch):
    stub_every_kind(monkeypatch)
    with history(*KEYS) as instance:
        yield instance


def test_every_kind_has_a_check():
    assert {key.to_user_string() for check in embedding_checks for key in check.check_keys} == EVERY_CHECK


def test_checks_pass_on_output_of_a_run_and_fail_on_a_damaged_file(data_root, instance):
    photos(data_root, *KEYS)
    made = materialize(data_root, instance, *embedding_assets, *embedding_checks, keys=KEYS, deferred=True)

    assert made.success
    assert {name: e.passed for name, e in checks_of(made).items()} == dict.fromkeys(EVERY_CHECK, True)
    assert checks_of(made)["vae_latents:files_valid"].metadata["checked"].value == 2

    np.save(data_root.derived / VAE.folder / "b.npy", np.zeros((16, 3, 3), np.float16))
    found = check(data_root, instance, *embedding_assets, *embedding_checks)

    assert {name for name, e in found.items() if not e.passed} == {"vae_latents:files_valid"}
    evaluation = found["vae_latents:files_valid"]
    assert evaluation.description == f"wrong_shape: 1; {PREVIEW_TEXT}"
    assert "b" in evaluation.metadata["first findings"].value
    assert evaluation.metadata["errors"].value == 1


@pytest.mark.parametrize("spec", embedding_specs(), ids=lambda spec: spec.kind)
def test_check_fails_if_a_byte_is_missing(data_root, instance, spec):
    photos(data_root, *KEYS)
    embed(data_root)
    path = data_root.derived / spec.folder / "a.npy"
    path.write_bytes(path.read_bytes()[:-1])

    assert {
        name for name, e in check(data_root, instance, *embedding_assets, *embedding_checks).items() if not e.passed
    } == {f"{spec.kind}:files_valid"}


def test_checks_pass_without_files(data_root, instance):
    assert all(
        evaluation.passed for evaluation in check(data_root, instance, *embedding_assets, *embedding_checks).values()
    )


def test_refused_image_is_a_warning_with_its_reason_for_every_kind(data_root, instance):
    """The UI shows the image as missing, with the reason."""
    photos(data_root, *KEYS)
    (data_root.approved / "b.png").write_bytes(b"no picture")

    made = materialize(data_root, instance, *embedding_assets, *embedding_checks, keys=KEYS, deferred=True)

    assert made.success, "a warning fails nothing"
    for spec in embedding_specs():
        evaluation = checks_of(made)[f"{spec.kind}:inputs_accepted"]
        assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
        (row,) = evaluation.metadata["inputs"].records
        assert (row.data["image"], row.data["reason"].split(":")[0]) == ("b", "undecodable")
        assert checks_of(made)[f"{spec.kind}:files_valid"].passed


def test_unfinished_regeneration_is_a_warning(data_root, instance):
    """The folder contains files of two models. Spec: docs/spec/conventions.md#provenance"""
    photos(data_root, *KEYS)
    embed(data_root, model="real")
    with Ledger(data_root.ledger) as ledger:
        regenerate(ledger, VAE.kind, "run")

    found = check(data_root, instance, *embedding_assets, *embedding_checks)

    evaluation = found["vae_latents:files_valid"]
    assert (evaluation.passed, evaluation.severity) == (False, dg.AssetCheckSeverity.WARN)
    assert evaluation.metadata["look"].value == "[images that wait](/imagemill/images?show=waiting)"
    assert "regeneration not finished: 0 of 2 files replaced" in evaluation.description
    assert found["dinov3_npy:files_valid"].passed
    assert found["dinov3_npy:files_valid"].metadata["model"].value == "real"
