"""Typed configuration, read from `imagemill.yaml`. Without a file the defaults apply, which are preview models.

    encoders:
      vae_latents: {model: black-forest-labs/FLUX.1-dev, subfolder: vae, revision: main, device: auto, dtype: bfloat16}
    summarizer: {model: Qwen/Qwen3-VL-4B-Instruct, dtype: bfloat16, prompts: {default: prompts/summary.txt}}
    captioner: {enabled: true, model: Qwen/Qwen3-VL-4B-Instruct, dtype: bfloat16}
    threads: 2

Live objects that are built from it belong in resources/.
Spec: docs/spec/conventions.md#command-line
"""

import functools
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from imagemill.domain.embedding_specs import DINOV3, T5, EmbeddingSpec, use_kinds
from imagemill.domain.encoder_settings import EncoderSettings, ModelSettings, Positive
from imagemill.domain.filters import SHARES
from imagemill.domain.inputs import (
    AUTO,
    KOHYA,
    OFF,
    ColorSetting,
    Format,
    InputSettings,
    Lines,
    Repeats,
    Sidecars,
)
from imagemill.domain.layout import DataRoot, shares_history
from imagemill.domain.shares import parse_share
from imagemill.errors import ImagemillError, MissingInput, UnknownKind, WrongUsage
from imagemill.fs.blobs import StorageSettings
from imagemill.fs.fingerprints import FileSignature, file_signature
from imagemill.kinds import KindEntry, chosen_specs
from imagemill.text.safe_yaml import YamlDocument, read_yaml
from imagemill.text.settings import convert_settings

TRANSFORMERS = "transformers"
CONFIG_VARIABLE = "IMAGEMILL_CONFIG"

# Enough for two photos of 24 megapixels and one of 16, or for a batch of 64 images of one megapixel.
DECODE_AHEAD_PIXELS = 64 * 1024 * 1024

# Default of `repack_share`.
REPACK_SHARE = 0.2


class VlmSettings(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a vision-language model and of its text generation.

    Attributes:
        max_new_tokens: maximum length of the answer in tokens; if unset, the model's own limit, else 512.
        temperature: 0 always selects the likeliest token; above 0 tokens are sampled, and answers differ between runs.
        top_p: when sampling, only the likeliest tokens whose probabilities add up to this value are candidates.
        repetition_penalty: above 1, tokens that already occur become less likely; if unset, the model's own value.
        max_pixels: larger images are scaled down to about this many pixels before they are given to the model.
    """

    max_new_tokens: Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_pixels: Positive = 1024 * 1024


class SummarizerSettings(VlmSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the summarizer of Stage-A images.

    Attributes:
        kind: `transformers` for the model named here, or `MODULE:CLASS` for a user's class, which gets no model settings.
        batch_size: maximum number of images in one model call.
        prompts: mission → text file with its prompt, relative to the configuration file; `default` serves missions without one.
    """

    kind: str = TRANSFORMERS
    batch_size: Positive = 8
    prompts: dict[str, str] = msgspec.field(default_factory=dict)


class CaptionerSettings(VlmSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the captioner of Stage 2 images that have no caption.

    If `max_new_tokens` is unset, it is twice the `tokens` of `t5_hidden`.

    Attributes:
        enabled: whether such images are captioned.
        batch_size: maximum number of images in one model call.
        prompt: text file with its prompt, relative to the configuration file; if unset, the built-in prompt, which asks for as
            many words as the text encoder reads.
    """

    enabled: bool = False
    batch_size: Positive = 8
    prompt: str | None = None


class NearDuplicateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the search for near duplicates, and of the use of its result.

    Attributes:
        threshold: minimum cosine of two DINOv3 vectors at which their images count as near duplicates.
        exclude: whether shards leave out images that are near duplicates of their group's representative.
        probes: above 50,000 images, number of index cells that each search visits: more finds more, and is slower.
    """

    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.97
    exclude: bool = False
    probes: Positive = 16


class PixelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the pixels that models get.

    Attributes:
        color: `srgb` converts pictures whose colours are described otherwise to sRGB, `ignore` uses the stored values; if unset,
            what the data root records: `srgb` for a new one, `ignore` for one of an earlier release.
    """

    color: ColorSetting | None = None


class InputFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the files of `approved/`.

    Attributes:
        formats: extensions that make a file an image; if unset, what the data root records: all for a new one, jpg, jpeg, png
            and webp for one of an earlier release.
        recursive: whether sub-folders are read; if unset, what the data root records: true for a new one, false for one of an
            earlier release.
        companions: whether `x-masklabel.*` and `x-condlabel.*` beside an image `x` are left out; if unset, what the data root
            records: true for a new one, false for one of an earlier release.
        exclude: patterns of paths below `approved/` that are ignored, such as `*.HEIC` or `drafts/*`; case matters, and `*`
            matches any text, `/` included.
        repeats: `kohya` takes how often training draws a sample in an epoch from folders such as `10_dog` directly below
            `approved/`; `off`, the default, draws each sample once.
    """

    formats: Annotated[tuple[Format, ...], msgspec.Meta(min_length=1)] | None = None
    recursive: bool | None = None
    companions: bool | None = None
    exclude: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] | None = None
    repeats: Repeats | bool | None = None


class CaptionTexts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the captions in text files beside the images.

    Attributes:
        sidecars: extensions of these files in order of preference: `{image_id}.txt`, `{image_id}.caption`, then
            `{file name}.txt`; if unset, what the data root records: txt and caption for a new one; for one of an earlier release,
            files named exactly `{image_id}.txt`.
        lines: `join` makes one line of a text of several lines, `first` uses the first line, `each` makes a caption of each line.
        encoding: encoding of texts that are neither UTF-8 nor UTF-16, such as cp1252; if unset, such texts are refused.
        metadata: `auto` reads captions from metadata.jsonl, metadata.csv, metadata.parquet or captions.json in the nearest folder
            that has one, for images without a caption file; a path, absolute or below `approved/`, names one file that precedes
            caption files; `off` reads none; if unset, what the data root records: auto for a new one, off for one of an earlier
            release.
        file_column: column with the path of the image; if unset, the first of file_name, image_path, image, filename, file, path
            and key.
        text_column: column with the caption; if unset, the first of text, caption, captions, prompt and description.
        strip_prefix: what paths in metadata files begin with, in front of the path below `approved/`.
        folder: whether the name of the folder, without a number such as `10_`, is the caption of images without another one.
    """

    sidecars: tuple[Annotated[str, msgspec.Meta(pattern="^[a-z0-9_-]+$")], ...] | None = None
    lines: Lines | None = None
    encoding: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    metadata: Annotated[str, msgspec.Meta(min_length=1)] | bool | None = None
    file_column: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    text_column: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    strip_prefix: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    folder: bool | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the processes that run the models. All but `kind` belong to `ray`.

    Attributes:
        kind: `local`: this process, or one process per device of `devices`. `ray`: the nodes of a Ray cluster, of which this
            computer is one; they need the package and the weights, and share no folder with it.
        address: `HOST:PORT` of the cluster, or `auto` for the one that runs on this computer.
        workers: most workers; if unset, as many as the nodes have room for.
        cpus: processors of a node that each worker asks for.
        gpus: GPUs that each worker asks for, by name of the pass, `captioner` or `summarizer`; 0.5 lets two share one. A pass
            without an entry uses none.
        resources: other resources that each worker asks for, by their names in the cluster.
        in_flight_mb: most megabytes of images and arrays in the process of the run; if unset, 256, or 32 per worker if that is
            more.
        ready_timeout: seconds within which the first worker has to be ready.
        insecure: whether a cluster without a token may be joined over the network; its nodes can run code in the process of the
            run.
    """

    kind: Literal["local", "ray"] = "local"
    address: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    workers: Positive | None = None
    cpus: Annotated[float, msgspec.Meta(ge=0)] = 1
    gpus: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    resources: dict[str, Annotated[float, msgspec.Meta(ge=0)]] = {}
    in_flight_mb: Positive | None = None
    ready_timeout: Positive = 300
    insecure: bool = False


def _word(value: str | bool | None, on: str) -> str | None:
    """Return a setting that YAML may have read as a Boolean, because `off` and `on` are Booleans there."""
    return value if value is None or isinstance(value, str) else on if value else OFF


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of `imagemill.yaml`.

    Attributes:
        name: of the data root in a Dagster history that several roots share (`DAGSTER_HOME`): its asset keys, partition sets and
            groups begin with it. At most one root of a history has none.
        kinds: embedding kinds of the data root, shipped or from installed packages, in the order of members in a shard; if unset,
            `dinov3_npy`, `vae_latents` and `t5_hidden`.
        encoders: settings per embedding kind, in the form of its settings class; a kind left out uses its preview model.
        threads: CPU threads of a model's own arithmetic; 0 for the number of processors.
        devices: `all` for every GPU of this machine, or a list of GPU numbers and device names; each has a worker process with
            its own copy of the models whose `device` is `auto`. Ranks of Stage-A use them in turn: rank 2 of two devices the
            first. If unset, one device is used, by the process of the run.
        decode_threads: threads that open and prepare images ahead of the model; 0 for the number of processors.
        write_threads: most threads that write files behind the model.
        decode_ahead_pixels: maximum number of pixels of images opened ahead of the model, at up to 20 bytes each; one image is
            always allowed.
        shard_size: maximum number of samples in one tar.
        repack_share: a set of at least five tars is packed from scratch if an update would leave more than this share of them
            less than half full; the last one is not counted.
        pack_threads: tars written at a time.
        rescale_workers: processes that rescale images of a preset; 0 for the number of processors.
        stage_a_ranks: number of ranks that share a Stage-A mission, each a process with its own model.
        pixels: colours of the pixels that models get.
        inputs: files of `approved/` that are images.
        captions: files beside the images that are captions.
        near_duplicates: search for near duplicates, and whether shards leave them out.
        summarizer: summarizer of Stage-A images.
        captioner: captioner of images that have no caption; off by default.
        limits: largest share of the images of `approved/`, from 0 to 1, by filter of the viewer, such as `refused: 0.01`. The
            check `within_limits` warns of each that is exceeded.
        object_storage: address, credentials and habits of object storage.
        push: URL, `s3://bucket/prefix`, to which the asset `published_shards` publishes the shards after packing; if unset, there
            is no such asset.
        licence: licence of the images, as the hub names it (`cc-by-4.0`), for the card beside the shards.
        engine: processes that run the models.
        share: `I/N`, from `0/N` to `N-1/N`: take only the images of `approved/` with this share's ids, so that N data roots
            divide the images of one folder. A data root keeps the share of its first run.
    """

    name: Annotated[str, msgspec.Meta(pattern="^[a-z][a-z0-9_]*$", max_length=40)] | None = None
    encoders: dict[str, dict[str, Any]] = {}
    kinds: list[KindEntry] | None = None
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    devices: (
        Literal["all"] | Annotated[list[Annotated[int, msgspec.Meta(ge=0)] | str], msgspec.Meta(min_length=1)] | None
    ) = None
    decode_threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    write_threads: Positive = 8
    decode_ahead_pixels: Positive = DECODE_AHEAD_PIXELS
    shard_size: Positive = 1000
    repack_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = REPACK_SHARE
    pack_threads: Positive = 2
    rescale_workers: Annotated[int, msgspec.Meta(ge=0)] = 0
    stage_a_ranks: Positive = 1
    pixels: PixelSettings = PixelSettings()
    inputs: InputFiles = InputFiles()
    captions: CaptionTexts = CaptionTexts()
    near_duplicates: NearDuplicateSettings = NearDuplicateSettings()
    summarizer: SummarizerSettings = SummarizerSettings()
    captioner: CaptionerSettings = CaptionerSettings()
    limits: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1)]] = {}
    object_storage: StorageSettings = StorageSettings()
    push: str | None = None
    licence: str | None = None
    engine: EngineSettings = EngineSettings()
    share: str | None = None

    def encoder(self, spec: EmbeddingSpec) -> EncoderSettings:
        """Return the settings of an embedding kind, with the subfolder of its default model filled in."""
        settings = msgspec.convert(self.encoders.get(spec.kind, {}), spec.settings_class)
        if settings.model == spec.default_model and settings.subfolder is None:
            return msgspec.structs.replace(settings, subfolder=spec.default_subfolder)
        return settings

    @property
    def chosen_inputs(self) -> dict[str, Any]:
        """The input settings that the configuration contains, by field of InputSettings."""
        inputs, captions = self.inputs, self.captions
        given = {
            "color": self.pixels.color,
            "formats": inputs.formats,
            "recursive": inputs.recursive,
            "companions": inputs.companions,
            "exclude": inputs.exclude,
            "sidecars": None if captions.sidecars is None else Sidecars(captions.sidecars),
            "lines": captions.lines,
            "encoding": captions.encoding,
            "metadata": _word(captions.metadata, AUTO),
            "file_column": captions.file_column,
            "text_column": captions.text_column,
            "strip_prefix": captions.strip_prefix,
            "folder": captions.folder,
            "repeats": _word(inputs.repeats, KOHYA),
            "share": self.share and str(parse_share(self.share)),
        }
        return {name: value for name, value in given.items() if value is not None}

    def inputs_in_force(self, recorded: InputSettings) -> InputSettings:
        """Return how inputs are read: as configured; where the configuration says nothing, as recorded."""
        return msgspec.structs.replace(recorded, **self.chosen_inputs)

    @property
    def model_threads(self) -> int:
        """CPU threads of a model, at least 1."""
        return self.threads or os.cpu_count() or 1

    @property
    def decoders(self) -> int:
        """Threads that open images, at least 1."""
        return self.decode_threads or os.cpu_count() or 1


def read_config(path: Path, *, required: bool = False) -> Config:
    """Read and check a configuration file; return the defaults if it does not exist.

    Raises:
        MissingInput: if `required` and the file does not exist.
        WrongUsage: if the file is not YAML or is refused by `read_yaml`, for an unknown field, and for a value of the wrong type.
        UnknownKind: as `chosen_specs`.
    """
    if not path.exists():
        if required:
            raise MissingInput("configuration file not found", where=path, do="check --config")
        return Config()
    return _read(path, file_signature(path))


@functools.lru_cache(maxsize=4)
def _read(path: Path, _: FileSignature) -> Config:
    document = read_yaml(path)
    config = convert_settings(document.value or {}, Config, where=path, line=document.line)
    specs = {
        spec.kind: spec for spec in (*chosen_specs(config.kinds, where=path), T5)
    }  # T5's tokenizer makes every mask
    known = specs.keys()
    if config.near_duplicates.exclude and DINOV3.kind not in known:
        raise WrongUsage(
            f"near_duplicates.exclude compares {DINOV3.kind}, which kinds does not list",
            where=path,
            do=f"add {DINOV3.kind} to kinds, or remove near_duplicates.exclude",
        )
    if (encoding := config.captions.encoding) and not _is_encoding(encoding):
        raise WrongUsage(
            f"{path.name} line {document.line(['captions', 'encoding'])}: unknown encoding {encoding!r}",
            where=path,
            do="name an encoding of text that Python knows, such as cp1252, shift_jis or gb18030",
        )
    if unknown := sorted(set(config.encoders) - known):
        raise WrongUsage(
            f"{path.name} line {document.line(['encoders', unknown[0]])}: unknown embedding kind {unknown[0]!r}",
            where=path,
            do=f"choose from {', '.join(sorted(known))}",
        )
    if unlimited := sorted(set(config.limits).difference(SHARES)):
        raise WrongUsage(
            f"{path.name} line {document.line(['limits', unlimited[0]])}: unknown filter {unlimited[0]!r}",
            where=path,
            do=f"choose from {', '.join(SHARES)}",
        )
    if config.share is not None:
        read_share(config.share, f"{path.name} line {document.line(['share'])}: share {config.share!r}", path)
    _check_engine(config, path, document)
    for kind, spec in specs.items():
        given, place = config.encoders.get(kind, {}), ("encoders", kind)
        convert_settings(given, spec.settings_class, where=path, line=document.line, place=place)
    check_kind(config.summarizer.kind, where=f"{path}, summarizer.kind")
    return _with_prompts_from(path.parent, config)


def _check_engine(config: Config, path: Path, document: YamlDocument) -> None:
    """Raise WrongUsage for a setting that the chosen kind of engine does not have, or that contradicts it."""
    engine = config.engine
    if engine.kind == "local":
        given = [name for name in engine.__struct_fields__ if getattr(engine, name) != getattr(EngineSettings(), name)]
        if given:
            raise WrongUsage(
                f"{path.name} line {document.line(['engine', given[0]])}: engine.{given[0]} belongs to engine.kind: ray",
                where=path,
                do=f"add `kind: ray`, or remove engine.{given[0]}; `devices` sets the workers of this machine",
            )
        return
    devices: dict[tuple[str, ...], object] = {
        ("encoders", kind, "device"): given.get("device") for kind, given in config.encoders.items()
    }
    devices["captioner", "device"] = config.captioner.device
    devices["summarizer", "device"] = config.summarizer.device
    named = [("devices",)] if config.devices is not None else []
    named += [place for place, device in devices.items() if str(device).startswith("cuda:")]
    if named:
        setting, line = ".".join(named[0]), document.line(named[0])
        raise WrongUsage(
            f"{path.name} line {line}: {setting} names GPUs of this machine, and engine.kind is ray",
            where=path,
            do=f"remove {setting}; engine.gpus says how many GPUs a worker of each pass asks for",
        )


def _is_encoding(name: str) -> bool:
    try:
        b"".decode(name)
        return isinstance("".encode(name), bytes)
    except (LookupError, UnicodeError):  # also raised for codecs that are not encodings of text
        return False


def read_share(share: str, name: str, where: object = None) -> str:
    """Return a share as it is recorded. Raises WrongUsage, with the name of the setting or option, for another text."""
    try:
        return str(parse_share(share))
    except ValueError as error:
        raise WrongUsage(f"{name} is no share", where=where, do=str(error)) from None


def config_in_force(root: DataRoot, given: str | None = None) -> Config:
    """Return the configuration of a data root: from the given file, else $IMAGEMILL_CONFIG, else imagemill.yaml in the root.

    Raises the errors of `read_config`; a file that is named explicitly must exist.
    """
    return read_config(file_in_force(root, given), required=bool(named_config(given)))


def file_in_force(root: DataRoot, given: str | None = None) -> Path:
    """Return the file of `config_in_force`, which may not exist if none is named."""
    return Path(named_config(given) or root.config_file)


def name_in_history(root: DataRoot) -> str | None:
    """Return the name that a data root has in a shared history; None in its own history, and for a root without a name.

    Raises the errors of `read_config`.
    """
    return config_in_force(root).name if shares_history(root) else None


def use_configured_kinds(root: DataRoot) -> None:
    """Put the embedding kinds that a data root's configuration lists into use in this process.

    Without a readable configuration the default kinds are used; its error is reported when it is needed.

    Raises:
        UnknownKind: as `chosen_specs`.
    """
    try:
        config = config_in_force(root)
    except UnknownKind:
        raise
    except ImagemillError:
        config = Config()
    use_kinds(() if config.kinds is None else chosen_specs(config.kinds, where=file_in_force(root)))


def named_config(given: str | None = None) -> str | None:
    """Return the configuration file that a run or the environment names, or None if the data root's own applies."""
    return given or os.environ.get(CONFIG_VARIABLE)


def check_kind(kind: str, *, where: object) -> None:
    """Raise WrongUsage for a summarizer that is neither `transformers` nor of the form `MODULE:CLASS`."""
    module, _, name = kind.partition(":")
    if kind != TRANSFORMERS and not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise WrongUsage(
            f"unknown summarizer {kind!r}",
            where=where,
            do=f"write {TRANSFORMERS} for a vision-language model, or MODULE:CLASS for a class with "
            "summarize(images, mission) -> list[str]",
        )


def _with_prompts_from(folder: Path, config: Config) -> Config:
    """Return the configuration with absolute prompt paths. In the file they are relative to its folder."""
    prompts = {mission: str(folder / os.path.expanduser(file)) for mission, file in config.summarizer.prompts.items()}
    prompt = config.captioner.prompt and str(folder / os.path.expanduser(config.captioner.prompt))
    return msgspec.structs.replace(
        config,
        summarizer=msgspec.structs.replace(config.summarizer, prompts=prompts),
        captioner=msgspec.structs.replace(config.captioner, prompt=prompt),
    )
