"""From settings to a folder, its fingerprints, and complete checkpoints of the right kind only.

Spec: docs/spec/conventions.md#preview-models
"""

import fnmatch
import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from imagemill.domain.embedding_specs import DINOV3, T5, VAE
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.encoders import loading
from imagemill.encoders.preview import ensure_preview
from imagemill.errors import ModelUnusable, NonFiniteEmbedding

SPECS = [DINOV3, VAE, T5]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def by_kind(spec):
    return spec.kind


@pytest.fixture(autouse=True)
def forget_snapshots():
    loading._snapshot.cache_clear()
    yield
    loading._snapshot.cache_clear()


@pytest.fixture
def given(preview_root):
    """Return the arguments of every encoder's class methods besides the settings."""
    return lambda spec: {"spec": spec, "threads": 1, "preview_root": preview_root}


@pytest.fixture
def copy_of(preview_root, tmp_path):
    """Copy the preview folder of a kind, which a test may damage."""

    def copy(spec):
        return shutil.copytree(ensure_preview(spec, preview_root), tmp_path / spec.kind)

    return copy


def weights_of(folder):
    return next(folder.glob("*.safetensors"))


def edit_weights(folder, edit):
    tensors = load_file(weights_of(folder))
    edit(tensors)
    save_file(tensors, weights_of(folder), metadata={"format": "pt"})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def hub_cache(cache, repo, folder, inner=""):
    """Lay out a folder as huggingface_hub caches it: blobs by sha256, a snapshot of links, a branch."""
    store = cache / f"models--{repo.replace('/', '--')}"
    snapshot = store / "snapshots" / COMMIT / inner
    for part in (store / "blobs", store / "refs", snapshot):
        part.mkdir(parents=True)
    (store / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        blob = store / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


# ---- location of a model


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_folder_with_a_preview_model_is_recorded_as_preview_under_its_path(spec, given, copy_of):
    """Preview models can never be mistaken for real ones. Spec: docs/spec/conventions.md#provenance"""
    folder = copy_of(spec)

    by_path = spec.encoder_class().identify(EncoderSettings(model=str(folder)), **given(spec))
    by_name = spec.encoder_class().identify(EncoderSettings(), **given(spec))

    assert (str(folder), None, True) == (by_path.model, by_path.revision, by_path.preview)
    assert (by_name.model, by_name.revision, by_name.preview) == ("preview", None, True)
    assert by_path.key == by_name.key


def test_folder_without_marker_is_not_a_preview(given, copy_of):
    folder = copy_of(T5)
    (folder / "PREVIEW.json").unlink()

    assert not T5.encoder_class().identify(EncoderSettings(model=str(folder)), **given(T5)).preview


def test_subfolder_of_a_folder_is_used(given, copy_of, tmp_path):
    (tmp_path / "flux").mkdir()
    copy_of(VAE).rename(tmp_path / "flux" / "vae")
    settings = EncoderSettings(model=str(tmp_path / "flux"), subfolder="vae")

    assert VAE.encoder_class().identify(settings, **given(VAE)).preview


def test_folder_with_the_model_in_the_default_subfolder_is_refused_with_the_setting(given, copy_of, tmp_path):
    (tmp_path / "flux").mkdir()
    copy_of(VAE).rename(tmp_path / "flux" / "vae")

    with pytest.raises(ModelUnusable) as caught:
        VAE.encoder_class().identify(EncoderSettings(model=str(tmp_path / "flux")), **given(VAE))

    assert caught.value.what.endswith("cannot be used on cpu: it has no config.json")
    assert caught.value.do == "set encoders.vae_latents.subfolder: vae"


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_path_that_does_not_exist_is_refused_with_model_device_and_remedy(spec, given, tmp_path):
    """A model that cannot run fails in seconds with its name and device. Spec: docs/spec/stage2.md#embeddings"""
    settings = EncoderSettings(model=str(tmp_path / "nowhere"), device="cpu")

    with pytest.raises(ModelUnusable) as caught:
        spec.encoder_class().load(settings, **given(spec))

    assert str(caught.value) == (
        f"{spec.kind}: model {tmp_path}/nowhere cannot be used on cpu: there is no such folder\n"
        f"  do:    set encoders.{spec.kind}.model in imagemill.yaml to a hub id, a folder written by save_pretrained, "
        "or preview"
    )


def test_uncached_hub_model_offline_is_refused_with_licence_and_token(given):
    """FLUX.1-dev and DINOv3 are gated."""
    with pytest.raises(ModelUnusable) as caught:
        DINOV3.encoder_class().load(EncoderSettings(model=DINOV3.default_model, device="cpu"), **given(DINOV3))

    message = str(caught.value)
    assert f"dinov3_npy: model {DINOV3.default_model} cannot be used on cpu: " in message
    assert "HF_HUB_OFFLINE is set, so only the local cache was searched" in message
    assert f"accept its licence at https://huggingface.co/{DINOV3.default_model}" in message
    assert "hf auth login" in message


def test_refusal_survives_pickling_to_a_worker(given, tmp_path):
    with pytest.raises(ModelUnusable) as caught:
        T5.encoder_class().identify(EncoderSettings(model=str(tmp_path / "nowhere")), **given(T5))

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_cached_hub_model_is_used_with_its_commit(given, copy_of, tmp_path, monkeypatch):
    """HF_HUB_OFFLINE is respected; the revision recorded is the resolved commit. Reference: ModelIdentity."""
    hub_cache(tmp_path / "cache", "someone/flux", copy_of(VAE), inner="vae")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    settings = EncoderSettings(model="someone/flux", subfolder="vae")

    encoder = VAE.encoder_class().load(settings, **given(VAE))

    assert (
        encoder.identity.model,
        encoder.identity.revision,
        encoder.identity.preview,
    ) == ("someone/flux", COMMIT, True)
    assert VAE.encoder_class().identify(EncoderSettings(), **given(VAE)).key == encoder.identity.key


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Record the arguments of snapshot_download, which finds nothing."""
    calls = []

    def record(model, **options):
        calls.append((model, options))
        raise FileNotFoundError("nothing here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", record)
    return calls


@pytest.fixture
def hub(monkeypatch, copy_of, tmp_path):
    """A reachable hub with copies of the preview models as someone/<kind>; yields the patterns of each request."""
    requests = []
    folders = {f"someone/{spec.kind}": copy_of(spec) for spec in SPECS}

    def download(model, *, revision, allow_patterns):
        requests.append(allow_patterns)
        snapshot = tmp_path / "hub" / model / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        for path in folders[model].iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return SimpleNamespace(requests=requests, folders=folders)


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_looking_up_a_hub_model_fetches_no_weights(spec, given, hub):
    """All models are looked up before any work; their gigabytes are fetched later."""
    settings = EncoderSettings(model=f"someone/{spec.kind}")

    assert spec.encoder_class().look_up(settings, **given(spec)) is None

    assert not [name for patterns in hub.requests for name in patterns if name.endswith(".safetensors")]
    assert spec.encoder_class().identify(settings, **given(spec)).revision == COMMIT
    assert [name for name in hub.requests[-1] if name.endswith(".safetensors")]
    assert spec.encoder_class().look_up(settings, **given(spec)).revision == COMMIT, "the weights are there by now"


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_looking_up_a_local_model_gives_its_identity(spec, given, copy_of):
    for settings in (EncoderSettings(), EncoderSettings(model=str(copy_of(spec)))):
        encoder = spec.encoder_class()

        assert encoder.look_up(settings, **given(spec)) == encoder.identify(settings, **given(spec))


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_looking_up_refuses_models_that_loading_would_refuse(spec, given, hub, tmp_path):
    """A folder without weights and a configuration of another model, both local and on the hub."""
    look_up = spec.encoder_class().look_up
    folder = tmp_path / "local"
    shutil.copytree(hub.folders[f"someone/{spec.kind}"], folder)
    weights_of(folder).unlink()
    with pytest.raises(ModelUnusable, match="it has no"):
        look_up(EncoderSettings(model=str(folder)), **given(spec))

    edit_config(folder, model_type="bert", _class_name="Other")
    edit_config(hub.folders[f"someone/{spec.kind}"], model_type="bert", _class_name="Other")
    for model in (str(folder), f"someone/{spec.kind}"):
        with pytest.raises(ModelUnusable, match=r"config\.json has"):
            look_up(EncoderSettings(model=model), **given(spec))


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_weights_that_cannot_be_fetched_are_missing_at_once(spec, given, hub, monkeypatch):
    """With HF_HUB_OFFLINE, files missing from the cache cannot be fetched."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ModelUnusable, match=r"it has no \S+\.safetensors"):
        spec.encoder_class().look_up(EncoderSettings(model=f"someone/{spec.kind}"), **given(spec))


def test_only_needed_files_of_one_subfolder_are_fetched(given, asked):
    """Fetch only `vae/*` of FLUX, and never pickled weights."""
    settings = EncoderSettings(model="black-forest-labs/FLUX.1-dev", subfolder="vae", revision="main")

    with pytest.raises(ModelUnusable, match="nothing here"):
        VAE.encoder_class().identify(settings, **given(VAE))

    [(model, options)] = asked
    assert (model, options["revision"]) == ("black-forest-labs/FLUX.1-dev", "main")
    assert "vae/diffusion_pytorch_model.safetensors" in options["allow_patterns"]
    assert all(
        name.startswith("vae/") and name.endswith((".json", ".safetensors")) for name in options["allow_patterns"]
    )


def test_tokenizer_alone_is_fetched_without_weights(given, asked):
    """The mask comes from the tokenizer alone. Spec: docs/spec/stage2.md#record-fields"""
    with pytest.raises(ModelUnusable):
        T5.encoder_class().tokenizer(EncoderSettings(model="google-t5/t5-large"), **given(T5))

    assert not [name for name in asked[0][1]["allow_patterns"] if "safetensors" in name]


# ---- devices


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_device_auto_takes_cuda_then_mps_then_cpu(cuda, mps, expected, given, monkeypatch):
    """Reference: EncoderSettings.device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    assert expected == T5.encoder_class().identify(EncoderSettings(), **given(T5)).device


def test_unavailable_device_is_refused(given, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(ModelUnusable, match=r"t5_hidden: model preview cannot be used on cuda: .* has no cuda"):
        T5.encoder_class().load(EncoderSettings(device="cuda"), **given(T5))


def test_gpu_is_chosen_by_its_number_and_one_that_does_not_exist_is_refused_with_the_others(given, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert T5.encoder_class().identify(EncoderSettings(device="cuda:1"), **given(T5)).device == "cuda:1"
    with pytest.raises(ModelUnusable, match=r"cannot be used on cuda:2: .* has no cuda:2") as refused:
        T5.encoder_class().load(EncoderSettings(device="cuda:2"), **given(T5))
    assert refused.value.do == "set encoders.t5_hidden.device: auto, or choose from cuda, cpu, cuda:0, cuda:1"


def test_device_is_named_if_loading_fails(given, monkeypatch):
    def out_of_memory(self, *args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(torch.nn.Module, "to", out_of_memory)

    with pytest.raises(ModelUnusable, match="model preview cannot be used on cpu: OutOfMemoryError: tried to allocate"):
        VAE.encoder_class().load(EncoderSettings(device="cpu"), **given(VAE))


# ---- identity


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_identity_contains_everything_that_determines_the_bytes(spec, given):
    """Spec: docs/spec/conventions.md#provenance"""
    identity = spec.encoder_class().identify(EncoderSettings(), **given(spec))
    shared = {"weights_sha256", "config_sha256", "compute_dtype", "stored_dtype", "preprocessing", "output"}
    own = {
        DINOV3: {"preprocessor_sha256"},
        VAE: {"size", "memory_format", "scaled", "scaling_factor", "shift_factor", "crop_to_multiple_of", "tiling"},
        T5: {"tokenizer_sha256", "pad_rows", "padding", "tokens", "width"},
    }

    assert identity.facts.keys() == shared | own[spec]
    assert ("float32", spec.dtype) == (identity.facts["compute_dtype"], identity.facts["stored_dtype"])
    # Facts recorded as JSON must still compare equal after reading.
    assert json.loads(json.dumps(identity.facts)) == identity.facts


def test_vae_identity_contains_the_factors_for_decoding(given):
    facts = VAE.encoder_class().identify(EncoderSettings(), **given(VAE)).facts

    assert (facts["scaling_factor"], facts["shift_factor"], facts["scaled"]) == (0.3611, 0.1159, False)


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_identity_before_loading_equals_that_of_the_loaded_model(spec, given):
    encoder = spec.encoder_class().load(EncoderSettings(), **given(spec))

    assert spec.encoder_class().identify(EncoderSettings(), **given(spec)) == encoder.identity


def test_weights_config_tokenizer_and_dtype_change_the_identity(given, copy_of):
    folder = copy_of(T5)
    settings = EncoderSettings(model=str(folder))
    identify = T5.encoder_class().identify
    keys = [identify(settings, **given(T5)).key]

    edit_weights(folder, lambda tensors: tensors["shared.weight"].__iadd__(1))
    keys.append(identify(settings, **given(T5)).key)
    edit_config(folder, dropout_rate=0.5)
    keys.append(identify(settings, **given(T5)).key)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("-5.0", "-5.5"))
    keys.append(identify(settings, **given(T5)).key)
    keys.append(identify(EncoderSettings(model=str(folder), dtype="bfloat16"), **given(T5)).key)

    assert len(keys) == len(set(keys)) == 5


def test_json_layout_and_library_versions_do_not_change_the_identity(given, copy_of):
    """The identity uses config.json without volatile keys."""
    folder = copy_of(T5)
    settings = EncoderSettings(model=str(folder))
    before = T5.encoder_class().identify(settings, **given(T5)).key

    edit_config(folder, transformers_version="9.9", dtype="float16", torch_dtype="float16", _name_or_path="elsewhere")
    tokenizer = json.loads((folder / "tokenizer.json").read_text()) | {"truncation": {"max_length": 9}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert before == T5.encoder_class().identify(settings, **given(T5)).key


def test_threads_and_device_are_recorded_outside_the_key(given):
    identify = T5.encoder_class().identify

    one, two = (identify(EncoderSettings(), **{**given(T5), "threads": threads}) for threads in (1, 2))

    assert (1, 2, one.key) == (one.threads, two.threads, two.key)


def test_all_parts_of_sharded_weights_are_fingerprinted(given, copy_of):
    """The index of a sharded checkpoint names the parts."""
    folder = copy_of(T5)
    tensors = load_file(weights_of(folder))
    weights_of(folder).unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for part, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, folder / part, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: part for part, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    encoder = T5.encoder_class().load(EncoderSettings(model=str(folder)), **given(T5))
    whole = T5.encoder_class().load(EncoderSettings(), **given(T5))

    assert set(parts) == set(encoder.identity.files_sha256)
    assert whole.identity.key == encoder.identity.key, "resharded weights are the same model"
    caption = "a red bird"
    np.testing.assert_array_equal(whole.encode([whole.prepare(caption)]), encoder.encode([encoder.prepare(caption)]))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelUnusable, match=r"it has no model-00002-of-00002\.safetensors"):
        T5.encoder_class().identify(EncoderSettings(model=str(folder)), **given(T5))


def test_sha256_of_a_cached_blob_is_its_name(tmp_path):
    """No hashing is needed for files of the hub's cache."""
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.write_bytes(b"never read")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)

    assert loading.file_sha256(link) == "ab" * 32


def test_sha256_of_other_files_is_computed_again_only_if_they_change(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"one")
    loading.file_sha256(path)
    reads = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: reads.append(1) or digest(*args))

    loading.file_sha256(path)
    unread = len(reads)
    path.write_bytes(b"other")

    assert hashlib.sha256(b"other").hexdigest() == loading.file_sha256(path)
    assert (unread, len(reads)) == (0, 1)


# ---- only complete checkpoints of the right kind


@pytest.mark.parametrize(
    ("spec", "other", "reason"),
    [
        (DINOV3, T5, "config.json has model_type 't5', expected 'dinov3_vit'"),
        (T5, DINOV3, "config.json has model_type 'dinov3_vit', expected 't5' or 'umt5'"),
        (VAE, T5, "config.json has _class_name None, expected 'AutoencoderKL'"),
    ],
    ids=["t5 as dinov3", "dinov3 as t5", "t5 as vae"],
)
def test_folder_of_another_kind_is_refused(spec, other, reason, given, preview_root):
    """`from_pretrained` would load it with random weights."""
    folder = ensure_preview(other, preview_root)

    for call in (spec.encoder_class().identify, spec.encoder_class().load):
        with pytest.raises(ModelUnusable) as caught:
            call(EncoderSettings(model=str(folder), device="cpu"), **given(spec))
        assert caught.value.what == f"{spec.kind}: model {folder} cannot be used on cpu: {reason}"


@pytest.mark.parametrize(
    ("spec", "change", "reason"),
    [
        (DINOV3, {"hidden_size": 384}, "hidden_size 384, expected 1024"),
        (VAE, {"latent_channels": 4}, "latent_channels 4, expected 16"),
        (VAE, {"down_block_types": ["DownEncoderBlock2D"] * 3}, "4 times smaller; required is 8"),
    ],
)
def test_model_of_another_size_is_refused(spec, change, reason, given, copy_of):
    folder = copy_of(spec)
    edit_config(folder, **change)

    with pytest.raises(ModelUnusable, match=reason):
        spec.encoder_class().identify(EncoderSettings(model=str(folder)), **given(spec))


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_checkpoint_with_a_missing_tensor_is_refused(spec, given, copy_of):
    """The tensor would be random and differ in each run."""
    folder = copy_of(spec)
    gone = {
        DINOV3: "layer.0.attention.o_proj.weight",
        VAE: "encoder.conv_out.weight",
        T5: "encoder.final_layer_norm.weight",
    }[spec]
    edit_weights(folder, lambda tensors: tensors.pop(gone))

    with pytest.raises(ModelUnusable, match=r"its weights are incomplete: missing keys .*weight"):
        spec.encoder_class().load(EncoderSettings(model=str(folder)), **given(spec))


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_checkpoint_with_a_tensor_of_another_shape_is_refused(spec, given, copy_of):
    folder = copy_of(spec)
    key = {DINOV3: "norm.weight", VAE: "encoder.conv_out.bias", T5: "encoder.final_layer_norm.weight"}[spec]
    edit_weights(folder, lambda tensors: tensors.update({key: np.ones(3, np.float16)}))

    with pytest.raises(ModelUnusable, match=rf"its weights are incomplete: mismatched keys .*{re.escape(key)}"):
        spec.encoder_class().load(EncoderSettings(model=str(folder), device="cpu"), **given(spec))


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_truncated_weights_are_refused(spec, given, copy_of):
    folder = copy_of(spec)
    os.truncate(weights_of(folder), 2000)

    with pytest.raises(ModelUnusable, match=f"{spec.kind}: model .* cannot be used on cpu"):
        spec.encoder_class().load(EncoderSettings(model=str(folder), device="cpu"), **given(spec))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("config.json", "it has no config.json"),
        ("model.safetensors", "it has no model.safetensors"),
        ("tokenizer.json", "it has no tokenizer.json"),
    ],
)
def test_folder_without_a_file_it_needs_is_refused(name, reason, given, copy_of):
    folder = copy_of(T5)
    (folder / name).unlink()

    with pytest.raises(ModelUnusable, match=reason):
        T5.encoder_class().identify(EncoderSettings(model=str(folder)), **given(T5))


def test_pickled_weights_are_not_read(given, copy_of):
    """Loading a pickle executes code in it."""
    folder = copy_of(T5)
    weights_of(folder).rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelUnusable, match=r"it has no model\.safetensors"):
        T5.encoder_class().load(EncoderSettings(model=str(folder)), **given(T5))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_config_other_than_a_json_object_is_refused(text, given, copy_of):
    folder = copy_of(T5)
    (folder / "config.json").write_text(text)

    with pytest.raises(ModelUnusable, match=r"config\.json is not"):
        T5.encoder_class().identify(EncoderSettings(model=str(folder)), **given(T5))


def test_decoder_of_the_full_t5_checkpoint_is_ignored(given, copy_of):
    """t5-large contains encoder and decoder; only the encoder is loaded."""
    folder = copy_of(T5)
    edit_weights(folder, lambda t: t.update({"decoder.final_layer_norm.weight": np.ones(1024, np.float16)}))

    T5.encoder_class().load(EncoderSettings(model=str(folder)), **given(T5)).close()


# ---- arithmetic and environment


def test_loading_sets_threads_and_true_float32(given):
    """The thread count is configuration. Spec: docs/spec/stage2.md#first-image"""
    before = torch.get_num_threads()
    try:
        T5.encoder_class().load(EncoderSettings(), **{**given(T5), "threads": before + 1})
        assert before + 1 == torch.get_num_threads()
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_loading_prints_nothing(spec, given, capfd, recwarn):
    """Progress bars and hints of the libraries are silenced."""
    spec.encoder_class().load(EncoderSettings(), **given(spec)).close()

    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_value_beyond_the_stored_dtype_is_refused():
    """Values must be finite before and after the cast. Spec: docs/spec/stage2.md#vae-latents"""
    with pytest.raises(NonFiniteEmbedding, match="vae_latents: a value of 70000 does not fit into float16"):
        loading.to_stored(torch.tensor([1.0, -70000.0]), VAE)


def test_nan_before_the_cast_is_refused():
    with pytest.raises(NonFiniteEmbedding, match="vae_latents: the model produced NaN or infinity"):
        loading.to_stored(torch.tensor([1.0, float("nan")]), VAE)


def test_torchvision_built_for_another_torch_is_named(tmp_path, monkeypatch):
    """Its import breaks every model class, with error messages that do not mention torchvision."""
    (tmp_path / "torchvision").mkdir()
    text = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(
        ModelUnusable, match=r"torchvision does not match torch .*: operator torchvision::nms"
    ) as caught:
        loading.check_torchvision()

    assert "uninstall torchvision" in caught.value.do


def test_machine_without_torchvision_passes(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)

    assert loading.check_torchvision() is None


def test_shared_modules_do_not_list_the_kinds():
    """Kinds added by users work without changes to these modules."""
    folder = Path(loading.__file__).parent

    for name in ("loading.py", "preview.py"):
        code = (folder / name).read_text()
        assert not [
            word for spec in SPECS for word in (spec.encoder, f'"{spec.kind}"', spec.default_model) if word in code
        ]


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", "bfloat16"), ("cuda:1", "bfloat16"), ("cpu", "float32"), ("mps", "float32")]
)
def test_auto_dtype_follows_the_device(device, expected):
    assert expected == loading.auto_dtype(device)


def test_identity_contains_the_dtype_that_auto_selected(given):
    settings = DINOV3.settings_class(device="cpu")

    assert settings.dtype == "auto"
    assert DINOV3.encoder_class().identify(settings, **given(DINOV3)).facts["compute_dtype"] == "float32"


@pytest.mark.parametrize("spec", SPECS, ids=by_kind)
def test_launched_batches_give_the_arrays_of_single_ones(spec, given):
    """A batch is launched before the results of the one before it are collected."""
    encoder = spec.encoder_class().load(EncoderSettings(), **given(spec))
    items = ["a red cube", "a blue ball on a chair"] if spec.source == "caption" else [noise(1), noise(2)]
    batches = [[encoder.prepare(item)] for item in items]

    first, second = [encoder.launch(batch) for batch in batches]

    for collect, batch in ((second, batches[1]), (first, batches[0])):
        (launched,), (encoded,) = collect(), encoder.encode(batch)
        assert launched.tobytes() == encoded.tobytes()
    assert encoder.overlaps is False, "a CPU computes within the call"


def noise(seed):
    return np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)


def test_error_of_a_launched_batch_is_raised_where_it_is_collected():
    collect = loading.begin_storing(torch.tensor([1.0, float("inf")]), VAE)

    with pytest.raises(NonFiniteEmbedding):
        collect()
