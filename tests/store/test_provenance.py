"""One folder never mixes two models, and identities of earlier schemes remain valid."""

import msgspec
import pytest

from imagemill.errors import ImagemillError, ModelMismatch
from imagemill.fs.fingerprints import posix_signature
from imagemill.store import provenance
from imagemill.store.ledger import FileRow, Ledger
from imagemill.store.provenance import (
    UNKNOWN,
    UNKNOWN_PREVIEW,
    ModelIdentity,
    differing_facts,
    forget_identity,
    guard_identity,
    read_identity,
    recall_identity,
)


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def identity(**changes):
    given = {"kind": "vae_latents", "model": "a/b", "revision": "1", "facts": {"weights": "x", "dtype": "float32"}}
    return ModelIdentity(**{**given, **changes})


def made_by(ledger, model_key):
    ledger.record_files([FileRow("vae_latents", "a", posix_signature(1, 2, 3), "s", "c", model_key)])


def test_first_model_is_recorded_and_the_same_one_passes(ledger):
    guard_identity(ledger, identity())
    guard_identity(ledger, identity())

    assert read_identity(ledger, "vae_latents") == identity()
    assert read_identity(ledger, "dinov3_npy") is None


def test_other_weights_are_refused_and_the_difference_is_named(ledger):
    guard_identity(ledger, identity())

    with pytest.raises(ModelMismatch, match=r"differs in dtype, weights"):
        guard_identity(ledger, identity(facts={"weights": "y", "dtype": "bfloat16"}))
    assert read_identity(ledger, "vae_latents") == identity(), "the record stays"


def test_same_weights_from_a_mirror_on_another_device_are_the_same_model(ledger):
    guard_identity(ledger, identity())

    guard_identity(ledger, identity(model="mirror/b", revision="2", device="cuda", threads=8))


def test_another_model_is_refused_where_only_the_record_of_the_first_is_lost(ledger):
    """The rows of the files still contain their model key."""
    made_by(ledger, identity().key)

    with pytest.raises(ModelMismatch, match="files of another model are there"):
        guard_identity(ledger, identity(facts={"weights": "y"}))
    assert read_identity(ledger, "vae_latents") is None

    assert guard_identity(ledger, identity()) == identity(), "the model that made them goes on"


def test_adopted_files_never_block_a_model(ledger):
    made_by(ledger, UNKNOWN)

    assert guard_identity(ledger, identity()) == identity()


def test_real_model_is_refused_beside_adopted_files_of_a_preview_model(ledger):
    made_by(ledger, UNKNOWN_PREVIEW)

    with pytest.raises(ModelMismatch, match="a preview model"):
        guard_identity(ledger, identity())
    assert guard_identity(ledger, identity(preview=True)).preview


def test_identity_of_an_older_scheme_equals_one_that_adds_old_values(monkeypatch):
    """A fact added by a later scheme has its old value in identities without it."""
    old, size = identity(), {"size": "original"}
    new = identity(facts={**old.facts, **size}, scheme=2)

    assert differing_facts(old, new) == []
    assert differing_facts(old, identity(facts={**old.facts, "size": "bucket"}, scheme=2)) == ["size"]
    assert differing_facts(old, identity(facts={**old.facts, "novel": 1}, scheme=2)) == ["novel"]
    assert differing_facts(new, old) == []
    assert differing_facts(old, identity(facts={**old.facts, **size})) == ["size"], "of one scheme, a fact is a fact"
    assert provenance.SCHEME == 3


def test_recorded_identity_of_an_older_scheme_stays_in_force(ledger):
    """Files made before and after the new scheme have one model key."""
    guard_identity(ledger, identity())

    new = identity(facts={**identity().facts, "size": "original"}, scheme=2)
    assert guard_identity(ledger, new) == identity()
    assert read_identity(ledger, "vae_latents") == identity()


FILES = {"model.safetensors": "ab"}


def of_tensors(weights="tensors", files=FILES):
    facts = {"weights_sha256": weights, "dtype": "float32", "size": "original"}
    return identity(facts=facts, scheme=3, files_sha256=files, libraries={"torch": "2.13.0"})


@pytest.mark.parametrize("scheme", [1, 2])
def test_identity_of_weight_files_stays_in_force_for_the_same_files(ledger, scheme):
    """Schemes 1 and 2 recorded the weight files. Spec: docs/spec/conventions.md#provenance"""
    size = {"size": "original"} if scheme == 2 else {}
    old = identity(facts={"weights_sha256": FILES, "dtype": "float32", **size}, scheme=scheme)
    provenance.record_identity(ledger, old)
    stored = ledger.setting("identity.vae_latents")

    assert guard_identity(ledger, of_tensors()) == old
    assert ledger.setting("identity.vae_latents") == stored, "never rewritten"
    with pytest.raises(ModelMismatch, match="differs in weights_sha256"):
        guard_identity(ledger, of_tensors(files={"model.safetensors": "cd"}))
    with pytest.raises(ModelMismatch, match="differs in weights_sha256"):
        guard_identity(ledger, of_tensors(files={"model-00001-of-00001.safetensors": "ef"}))


def test_identity_of_tensors_does_not_depend_on_files_and_libraries(ledger):
    guard_identity(ledger, of_tensors())

    resharded = of_tensors(files={"a.safetensors": "1", "b.safetensors": "2"})
    assert guard_identity(ledger, msgspec.structs.replace(resharded, libraries={"torch": "9"})) == of_tensors()
    with pytest.raises(ModelMismatch, match="differs in weights_sha256"):
        guard_identity(ledger, of_tensors("others"))


def test_lost_record_of_a_model_by_files_is_restored_from_the_keys_of_its_files(ledger):
    """New files get the key of the existing ones."""
    former = of_tensors().former
    made_by(ledger, former.key)

    assert guard_identity(ledger, of_tensors()) == former == read_identity(ledger, "vae_latents")
    assert former.scheme == 2
    assert former.libraries is None


def test_forgotten_identity_can_be_recalled(ledger):
    guard_identity(ledger, identity())

    forget_identity(ledger, "vae_latents")
    assert read_identity(ledger, "vae_latents") is None

    recall_identity(ledger, "vae_latents")
    assert read_identity(ledger, "vae_latents") == identity()


def test_record_of_a_model_that_cannot_be_read_names_the_repair(ledger):
    ledger.record_setting("identity.vae_latents", "{")

    with pytest.raises(ImagemillError, match="the recorded model cannot be read") as caught:
        read_identity(ledger, "vae_latents")

    assert "`imagemill repair`" in str(caught.value.do)


@pytest.mark.parametrize(("width", "differing"), [(1024, []), (4096, ["width"])])
@pytest.mark.parametrize("scheme", [1, 2])
def test_fact_that_the_newest_scheme_adds_has_its_old_value_in_both_older_ones(scheme, width, differing):
    old = identity(facts={"weights_sha256": FILES, "tokens": 77}, scheme=scheme)
    facts = {"weights_sha256": "of tensors", "tokens": 77, "width": width}
    new = identity(facts=facts, scheme=3, files_sha256=FILES)

    assert differing_facts(old, new) == differing_facts(new, old) == differing
