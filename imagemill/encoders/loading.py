"""Loading of checked models from settings: one path for preview, local and hub checkpoints.

    settings ──resolve──> folder ──fingerprints──> ModelIdentity
                             └─────load_model────> weights, gated

A model name is first resolved to a folder and everything is read from it, so the fingerprints are those of the loaded files.

Input and output of each model are in dinov3.py, flux_vae.py and t5.py; preview weights in preview.py.

Spec: docs/spec/conventions.md#provenance, docs/spec/stage2.md#first-image
"""

import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from imagemill.domain.embedding_specs import EmbeddingSpec, ModelSpec
from imagemill.domain.encoder_settings import PREVIEW, ModelSettings
from imagemill.encoders.preview import LIBRARY_KEYS, MARKER, ensure_preview, is_preview
from imagemill.encoders.weight_digests import blob_sha256, weight_digests
from imagemill.errors import ModelUnusable, NonFiniteEmbedding, WeightsMissing, WrongUsage
from imagemill.formats.manifest import sha256_file
from imagemill.fs.fingerprints import FileSignature, file_signature
from imagemill.store.provenance import SCHEME, ModelIdentity

# Keys of config.json that describe how or where a checkpoint was saved, not the computation.
VOLATILE_KEYS = LIBRARY_KEYS | {"_name_or_path", "torch_dtype", "architectures"}

_WEIGHTS_SUFFIX = ".safetensors"

# Libraries that compute the embeddings; their versions are recorded beside an identity.
_LIBRARIES = ("torch", "transformers", "diffusers")


# ---- location of a model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder as configured, found on this machine.

    Attributes:
        spec: kind of model.
        settings: as configured, with the dtype resolved.
        path: the folder with `config.json`.
        revision: commit on the hub; None for a folder.
        device: device to run on, resolved: `cuda`, `cuda:1`, `mps` or `cpu`.
        digests: folder of known digests of weights.
    """

    spec: ModelSpec
    settings: ModelSettings
    path: Path
    revision: str | None
    device: str
    digests: Path

    @property
    def torch_dtype(self) -> torch.dtype:
        """Compute dtype."""
        return getattr(torch, self.settings.dtype)

    @property
    def host_dtype(self) -> torch.dtype:
        """Dtype of prepared pixels: never less than float32."""
        return torch.float64 if self.settings.dtype == "float64" else torch.float32

    def json(self, name: str = "config.json") -> dict[str, Any]:
        """Read a JSON file of the folder. Raises ModelUnusable if it is missing or not an object."""
        try:
            value = json.loads((self.path / name).read_text("utf-8"))
        except FileNotFoundError:
            raise self.unusable(f"it has no {name}") from None
        except (ValueError, RecursionError) as error:
            raise self.unusable(f"{name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self.unusable(f"{name} is not a JSON object")
        return value

    def unusable(self, reason: str, *, error: type[ModelUnusable] = ModelUnusable) -> ModelUnusable:
        """Return the error of this checkpoint, with the reason and a remedy."""
        setting = f"set {self.spec.section}.model in imagemill.yaml"
        do = f"copy or fetch the model again, or {setting} to another one, or to preview"
        return _unusable(self.spec, self.settings, self.device, reason, where=self.path, do=do, error=error)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Convert any exception of a library in the block to ModelUnusable with the names of model and device."""
        try:
            yield
        except ModelUnusable:
            raise
        except Exception as error:
            raise self.unusable(f"{type(error).__name__}: {error}") from error


def resolve(
    settings: ModelSettings,
    *,
    spec: ModelSpec,
    preview_root: Path,
    files: Sequence[str],
    config: str = "config.json",
    weights: bool = True,
) -> Checkpoint:
    """Find the folder of these settings: the preview model, an existing folder, or a snapshot from the hub.

    Args:
        settings: model, revision, subfolder, device and dtype.
        spec: the kind of model.
        preview_root: folder of preview models.
        files: patterns, relative to the folder, of the files to fetch from the hub. HF_HUB_OFFLINE=1 uses the cache alone.
        config: a file that must exist.
        weights: whether to fetch weights too; without them, a model of the hub is found in seconds.

    Raises:
        ModelUnusable: if there is no such folder or hub model, no access, or no such device.
    """
    device = _pick_device(spec, settings)
    wanted = [name for name in files if weights or not name.endswith(_WEIGHTS_SUFFIX)]
    path, revision = _folder(settings, spec, preview_root, device, wanted)
    if not (path / config).is_file():
        inner = spec.default_subfolder
        hint = f"set {spec.section}.subfolder: {inner}" if inner and (path / inner / config).is_file() else None
        raise _unusable(spec, settings, device, f"it has no {config}", where=path, do=hint)
    if settings.dtype == "auto":
        settings = msgspec.structs.replace(settings, dtype=auto_dtype(device))
    return Checkpoint(spec, settings, path, revision, device, preview_root.with_name("weight_digests"))


def auto_dtype(device: str) -> Literal["bfloat16", "float32"]:
    """Return the compute dtype that `auto` selects: on cuda, float32 without TF32 has about an eighth of bfloat16's speed."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def _folder(
    settings: ModelSettings, spec: ModelSpec, preview_root: Path, device: str, files: Sequence[str]
) -> tuple[Path, str | None]:
    if settings.model == PREVIEW:
        return ensure_preview(spec, preview_root), None
    inner = settings.subfolder or ""
    folder = Path(os.path.expanduser(settings.model))
    if folder.is_dir():
        return folder / inner, None
    patterns = tuple(f"{inner}/{name}" if inner else name for name in (*files, MARKER))
    try:
        snapshot = _snapshot(settings.model, settings.revision, patterns)
    except Exception as error:
        raise _not_fetched(settings, spec, device, error) from error
    return snapshot / inner, snapshot.name


@functools.lru_cache(maxsize=32)
def _snapshot(model: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # Cached per process, so that `identify` and `load` use one commit even if a branch moves between them.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return Path(snapshot_download(model, revision=revision, allow_patterns=list(patterns)))


def _not_fetched(settings: ModelSettings, spec: ModelSpec, device: str, error: Exception) -> ModelUnusable:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    if isinstance(error, HFValidationError):
        return _unusable(spec, settings, device, "there is no such folder")
    offline = "; HF_HUB_OFFLINE is set, so only the local cache was searched" if constants.HF_HUB_OFFLINE else ""
    return _unusable(
        spec,
        settings,
        device,
        f"the folder does not exist, and the model could not be loaded from the hub{offline}",
        why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else repr(error),
        do=f"check {spec.section}.model and revision in imagemill.yaml; for a gated model accept its licence at "
        f"https://huggingface.co/{settings.model} and log in with `hf auth login`, or set HF_TOKEN",
    )


def _unusable(
    spec: ModelSpec,
    settings: ModelSettings,
    device: str,
    reason: str,
    *,
    where: object = None,
    why: str | None = None,
    do: str | None = None,
    error: type[ModelUnusable] = ModelUnusable,
) -> ModelUnusable:
    do = (
        do or f"set {spec.section}.model in imagemill.yaml to a hub id, a folder written by save_pretrained, or preview"
    )
    return error(
        f"{spec.kind}: model {settings.model} cannot be used on {device}: {reason}", where=where, why=why, do=do
    )


def _pick_device(spec: ModelSpec, settings: ModelSettings) -> str:
    """Return the device: `auto` takes cuda (ROCm too), then mps, then cpu; a device requested by name must exist."""
    there = existing_devices()
    if settings.device == "auto":
        return there[0]
    if settings.device not in there:
        reason = f"this machine or this build of torch ({torch.__version__}) has no {settings.device}"
        do = f"set {spec.section}.device: auto, or choose from {', '.join(there)}"
        raise _unusable(spec, settings, settings.device, reason, do=do)
    return settings.device


def existing_devices() -> list[str]:
    """Return the names of the devices of this machine, the one that `auto` takes first."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [*(["cuda"] if gpus else []), *(["mps"] if torch.backends.mps.is_available() else []), "cpu", *gpus]


def chosen_devices(chosen: Literal["all"] | Sequence[int | str] | None, existing: Sequence[str]) -> list[str]:
    """Return the device of each worker process; `auto` alone for one worker on the device that it selects.

    Args:
        chosen: `devices` of the configuration.
        existing: names of the devices of this machine.

    Raises:
        WrongUsage: if a chosen device does not exist.
    """
    if chosen is None:
        return ["auto"]
    if chosen == "all":
        return [name for name in existing if name.startswith("cuda:")] or ["auto"]
    names = [f"cuda:{device}" if isinstance(device, int) else device for device in chosen]
    if missing := [name for name in names if name not in existing]:
        raise WrongUsage(
            f"devices: this machine or this build of torch ({torch.__version__}) has no {missing[0]}",
            where="imagemill.yaml",
            do=f"choose from {', '.join(existing)}, or write devices: all",
        )
    return names


def fetches_weights(checkpoint: Checkpoint) -> bool:
    """Return True if missing weights can still be fetched: for a model of the hub, unless only its cache is used."""
    from huggingface_hub import constants

    return checkpoint.revision is not None and not constants.HF_HUB_OFFLINE


# ---- identity of a model


def weight_files(checkpoint: Checkpoint, stem: str) -> list[Path]:
    """Return `<stem>.safetensors`, or the parts in its index. Raises WeightsMissing if one is missing."""
    whole, index = checkpoint.path / (stem + _WEIGHTS_SUFFIX), f"{stem}{_WEIGHTS_SUFFIX}.index.json"
    if whole.is_file():
        return [whole]
    if not (checkpoint.path / index).is_file():
        raise checkpoint.unusable(f"it has no {whole.name}", error=WeightsMissing)
    names = sorted(set(checkpoint.json(index).get("weight_map", {}).values()))
    missing = [name for name in names if not (checkpoint.path / name).is_file()]
    if missing or not names:
        absent = missing[0] if missing else f"weights in {index}"
        raise checkpoint.unusable(f"it has no {absent}", error=WeightsMissing)
    return [checkpoint.path / name for name in names]


def weight_patterns(stem: str) -> tuple[str, ...]:
    """Return patterns of the files to fetch for `weight_files`: never pickles, never other variants."""
    return f"{stem}{_WEIGHTS_SUFFIX}", f"{stem}-*{_WEIGHTS_SUFFIX}", f"{stem}{_WEIGHTS_SUFFIX}.index.json"


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file: the name of its blob in the hub's cache, else computed, once per size, mtime and inode."""
    real = path.resolve()
    return blob_sha256(real) or _read_sha256(real, file_signature(real))


@functools.lru_cache(maxsize=64)
def _read_sha256(path: Path, _: FileSignature) -> str:
    return sha256_file(path)


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that compute the embeddings."""
    found = {name: importlib.util.find_spec(name) for name in _LIBRARIES}
    return {name: importlib.metadata.version(name) for name, spec in found.items() if spec}


def json_sha256(value: Mapping[str, Any], *, without: Iterable[str] = VOLATILE_KEYS) -> str:
    """Return the sha256 of a JSON object, independent of its layout and the order of its keys."""
    kept = {key: value[key] for key in value.keys() - set(without)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def expect_config(checkpoint: Checkpoint, **wanted: Any) -> None:
    """Check that config.json has the values that this encoder needs; a tuple lists the permitted ones.

    Raises:
        ModelUnusable: if it is another kind of model, which `from_pretrained` would load with random weights.
    """
    config = checkpoint.json()
    for key, value in wanted.items():
        values = value if isinstance(value, tuple) else (value,)
        if config.get(key) not in values:
            expected = " or ".join(map(repr, values))
            raise checkpoint.unusable(f"config.json has {key} {config.get(key)!r}, expected {expected}")


def identity(checkpoint: Checkpoint, *, threads: int, weights: str, **facts: Any) -> ModelIdentity:
    """Return the identity of a checkpoint: its weights, configuration and compute dtype, and `facts`, JSON values only.

    Raises:
        ModelUnusable: if weights are missing or cannot be read.
    """
    paths = weight_files(checkpoint, weights)
    with checkpoint.loading():
        digests = weight_digests(paths, checkpoint.digests)
    return ModelIdentity(
        kind=checkpoint.spec.kind,
        model=checkpoint.settings.model,
        revision=checkpoint.revision,
        preview=is_preview(checkpoint.path),
        device=checkpoint.device,
        threads=threads,
        scheme=SCHEME,
        libraries=library_versions(),
        files_sha256=digests.files,
        facts={
            "weights_sha256": digests.tensors,
            "config_sha256": json_sha256(checkpoint.json()),
            "compute_dtype": checkpoint.settings.dtype,
            **facts,
        },
    )


# ---- loading


def load_model(model_class: Any, checkpoint: Checkpoint, **options: Any) -> Any:
    """Call `from_pretrained`, on the CPU, for inference; only complete checkpoints pass.

    Raises:
        ModelUnusable: if weights are missing or of another shape (they would be random), or if the library raises.
    """
    with checkpoint.loading():
        model, info = model_class.from_pretrained(
            checkpoint.path,
            local_files_only=True,
            use_safetensors=True,
            dtype=checkpoint.torch_dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `gate` reports them with the tensor's name
            **options,
        )
        gate(checkpoint, info)
        return model.eval().requires_grad_(False)


def gate(checkpoint: Checkpoint, info: Mapping[str, Any]) -> None:
    """Refuse problems that `from_pretrained` only logs. Unexpected keys are accepted: the T5 checkpoint has a decoder too."""
    for name in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, info.get(name) or ())):
            shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            raise checkpoint.unusable(f"its weights are incomplete: {name.replace('_', ' ')} {shown}")


def release() -> None:
    """Free the memory of models that are no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- arithmetic


def set_up_arithmetic(threads: int) -> None:
    """Fix the settings that affect the last bits in this process: the number of threads, and full float32 precision."""
    torch.set_num_threads(threads)
    # By default cuDNN convolves float32 in TF32, which has 10 bits of mantissa. For speed, bfloat16 can be configured.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def require_pixels(kind: str, item: object) -> np.ndarray:
    """Return the item as uint8 (H, W, 3). Raises TypeError otherwise, which is an error of the caller, not of an image."""
    if not isinstance(item, np.ndarray) or item.dtype != np.uint8 or item.ndim != 3 or item.shape[2] != 3:
        got = f"{item.dtype} {item.shape}" if isinstance(item, np.ndarray) else type(item).__name__
        raise TypeError(f"{kind} takes uint8 pixels (height, width, 3), not {got}")
    return item


@functools.lru_cache(maxsize=64)
def _copies(device: str) -> Any:
    """Return the stream of a GPU on which inputs are copied while the batch before them is computed."""
    return torch.cuda.Stream(device)


def to_device(values: torch.Tensor, device: str) -> torch.Tensor:
    """Copy values to a device, to cuda without waiting for what it computes."""
    if not device.startswith("cuda"):
        return values.to(device)
    with torch.cuda.stream(_copies(device)):
        copied = values.pin_memory().to(device, non_blocking=True)
    computing = torch.cuda.current_stream(copied.device)
    computing.wait_stream(_copies(device))
    copied.record_stream(computing)  # its memory is used again only after the model has read it
    return copied


def to_stored(values: torch.Tensor, spec: EmbeddingSpec) -> np.ndarray:
    """Return `begin_storing` of these values, after waiting for the device."""
    return begin_storing(values, spec)()


def begin_storing(values: torch.Tensor, spec: EmbeddingSpec) -> Callable[[], np.ndarray]:
    """Cast to the stored dtype and copy to the host; return a function that waits for both, once, and returns the array.

    It raises:
        NonFiniteEmbedding: if a value is NaN or infinite, or becomes infinite by the cast.
    """
    stored = values.to(getattr(torch, spec.dtype))
    # A value that was not finite before the cast is not finite after it.
    on_host, is_finite, done = stored, torch.isfinite(stored).all(), None
    if stored.is_cuda:
        on_host, is_finite = _to_host(stored), _to_host(is_finite)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(stored.device))

    def collect() -> np.ndarray:
        if done is not None:
            done.synchronize()
        if not is_finite:
            raise _not_finite(values, spec)
        return on_host.cpu().numpy()

    return collect


def _to_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _not_finite(values: torch.Tensor, spec: EmbeddingSpec) -> NonFiniteEmbedding:
    if torch.isfinite(values).all():
        largest = values.abs().max().item()
        return NonFiniteEmbedding(
            f"{spec.kind}: a value of {largest:g} does not fit into {spec.dtype}",
            do=f"check the model: one made for {spec.kind} produces smaller values",
        )
    return NonFiniteEmbedding(
        f"{spec.kind}: the model produced NaN or infinity",
        do=f"set {spec.section}.dtype: float32, or check the model's weights",
    )


# ---- libraries


@functools.lru_cache(maxsize=4)
def library(name: str) -> Any:
    """Import transformers or diffusers without progress bars and log messages; errors that matter are raised.

    Raises:
        ModelUnusable: if an installed torchvision breaks them.
    """
    check_torchvision()
    module = importlib.import_module(name)
    logging = importlib.import_module(f"{name}.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return module


def check_torchvision() -> None:
    """Check that an installed torchvision fits torch; otherwise every model class would fail to import.

    Raises:
        ModelUnusable: if torchvision is installed and cannot be imported.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        raise ModelUnusable(
            f"torchvision does not match torch {torch.__version__}: {error}",
            why="transformers and diffusers import it where it is installed, so no model can be loaded",
            do="uninstall torchvision (imagemill does not need it), or install the build that belongs to this torch",
        ) from error
