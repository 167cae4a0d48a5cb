"""Options that commands and the launchpad of Dagster's UI share: each is declared here once, as a pydantic field.

Click options (dagster_project/cli/options.py) and the `Config` classes beside the assets are derived from these models.

Dagster's launchpad lists an option with its default only if that is not null. An option that may be left unset therefore has a
default that means "unset", such as 0 or an empty text, and reads as None.
"""

# pyright: reportInvalidTypeForm=false

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from imagemill.adapters.convert import adapter_names
from imagemill.adapters.source import Geometry
from imagemill.config import Config
from imagemill.domain.geometry import IMAGE_FACTOR, MAX_PIXELS, MIN_PIXELS
from imagemill.domain.layout import DataRoot
from imagemill.domain.preset_records import ORDERS, ResizeLibrary
from imagemill.domain.ranks import DEFAULT_MODE, ShardingMode
from imagemill.pipeline.shards.packing import PackRequest
from imagemill.pipeline.shards.shard_plan import WriteMode, check_buckets
from imagemill.pipeline.shards.shard_sets import ShardParameters
from imagemill.pipeline.stage_a.missions import DEFAULT_SEED, Discovery
from imagemill.pipeline.stage_a.plan import StageAPlan, plan_stage_a
from imagemill.store.locations import Place, at
from imagemill.store.public_data import SPLITS

# Name and value of the choice that means "unset".
UNSET = "unset"

_CONFIGURED = Config()


def option(
    default: Any,
    description: str,
    *,
    unset: str | None = None,
    flag: str | None = "",
    metavar: str | None = None,
    **constraints: Any,
) -> Any:
    """Return the field of an option.

    Args:
        default: default value, shown in the launchpad.
        description: one sentence without the final period.
        unset: text that describes what applies if the option is unset. The field is then None while it has its default.
        flag: name on the command line if it differs from the field's; None if commands do not offer the option.
        metavar: name of the value in the help of a command.
        constraints: arguments of `pydantic.Field`.
    """
    shown = f"`{default}`" if isinstance(default, str | int | float) and default != "" else "empty"
    applies = unset if unset or default is False else default
    extra = {
        UNSET: unset is not None,
        "flag": flag,
        "metavar": metavar,
        "help": description + (f" (default: {applies})." if applies else "."),
    }
    in_launchpad = description + (f"; {shown}: {unset}." if unset else ".")
    return Field(default, description=in_launchpad, json_schema_extra=extra, validate_default=True, **constraints)


def choice(name: str, values: Sequence[str]) -> Any:
    """Return an enumeration of text values, with a member that means "unset"."""
    return StrEnum(name, {UNSET: UNSET, **{value: value for value in values}})


class OptionSet(BaseModel):
    """A model whose fields are created by `option`."""

    @field_validator("*", mode="before")
    @classmethod
    def _none_if_unset(cls, value: Any, info: ValidationInfo) -> Any:
        field: Any = cls.model_fields[info.field_name or ""]
        is_unset = field.json_schema_extra[UNSET] and type(value) is type(field.default) and value == field.default
        return None if is_unset else value

    def given(self, of: "type[OptionSet] | None" = None) -> dict[str, Any]:
        """Return the options that were given, as the plain values of run configuration and configuration files.

        Args:
            of: only the options of this model.
        """
        values = self.model_dump(mode="json", exclude_unset=True, include={*(of or type(self)).model_fields})
        return {name: value for name, value in values.items() if value not in (None, [], {})}


class EmbeddingOptions(OptionSet):
    """Options of an embedding run: files to make besides those that are missing, invalid or stale."""

    regenerate: bool = option(
        False,
        "Replace every file of this kind by the model configured now; no shard takes them until all are replaced",
        flag=None,
    )


class CaptionedOptions(EmbeddingOptions):
    """Options of an embedding run of a kind that is made from captions."""

    recaption: bool = option(
        False, "Also caption again the images that another captioner, or another prompt, has captioned", flag=None
    )


class ResumeOptions(OptionSet):
    """Options of the job that makes what is missing."""

    only: list[str] | None = option([], "Only these images, by id", unset="all", flag=None)
    limit: int | None = option(
        0, "At most this many images that have work, in name order", unset="all", flag=None, ge=1
    )


class NearDuplicateOptions(OptionSet):
    """Options of a search for near duplicates."""

    threshold: float | None = option(
        0.0,
        "Cosine from which two images are near duplicates",
        unset=f"near_duplicates.threshold of imagemill.yaml ({_CONFIGURED.near_duplicates.threshold})",
        flag=None,
        gt=0,
        le=1,
    )


YesNo = choice("YesNo", ("yes", "no"))


class ShardOptions(OptionSet):
    """Parameters of one packing run."""

    only: list[str] | None = option([], "Only these buckets; may repeat", unset="all", flag="--bucket", metavar="WxH")
    shard_size: int | None = option(
        0, "Samples per tar", unset=f"shard_size of imagemill.yaml, {_CONFIGURED.shard_size}", ge=1
    )
    shuffle: YesNo | None = option(
        YesNo.unset, "Reorder the ready samples before limit and grouping", unset="as the set was packed, else no"
    )
    seed: int | None = option(-1, "Seed of the shuffle", unset="as the set was packed, else 1337", ge=0)
    limit: int | None = option(0, "Samples over all buckets of the run, after the shuffle", unset="all", ge=1)
    existing: WriteMode = option(
        "update",
        "Shards already there: `update` (or `append`) writes the tars whose samples changed, `replace` packs all sets from "
        "scratch, `repack` those that were updated; `refuse` touches none, `withdraw` applies withdrawals alone",
        flag=None,
    )
    dry_run: bool = option(False, "Count and report conflicts; write nothing, materialize nothing")
    output_dir: str | None = option(
        "", "Folder for the shards", unset="the remembered one, else shards/ in the data root", metavar="DIR"
    )
    workers: int | None = option(
        0, "Tars written at a time", unset=f"pack_threads of imagemill.yaml, {_CONFIGURED.pack_threads}", ge=1
    )
    allow_preview: bool = option(False, "Pack samples with captions of a preview model too")
    progress_every: int = option(500, "Ready records between two progress lines", ge=1)

    def packing(self, chosen: Sequence[str], output: Path) -> PackRequest:
        """Return the request to pack the selected buckets of a run. Raises WrongUsage for an unknown bucket."""
        given = {
            name: value for name in ShardParameters.__struct_fields__ if (value := getattr(self, name)) is not None
        }
        if "shuffle" in given:
            given["shuffle"] = given["shuffle"] == "yes"
        buckets = check_buckets(self.only or chosen)
        return PackRequest(buckets, output, self.existing, given, self.progress_every, self.allow_preview)


Adapter = choice("Adapter", adapter_names())
GeometryChoice = choice("GeometryChoice", get_args(Geometry))
OrderChoice = choice("OrderChoice", ORDERS)
Library = choice("Library", get_args(ResizeLibrary))
Split = StrEnum("Split", SPLITS)


class RawOptions(OptionSet):
    """Sources of a dataset's raw records."""

    adapter: Adapter | None = option(Adapter.unset, "Form of the annotations", unset="presets.yaml")
    annotations: dict[str, str] | None = option({}, "File of annotations by split", unset="presets.yaml", flag=None)
    images: str | None = option("", "Folder of the dataset's images", unset="presets.yaml", metavar="DIR")
    geometry: GeometryChoice | None = option(
        GeometryChoice.unset, "`boxes`, or `polygons` where an instance has one", unset="presets.yaml, else boxes"
    )
    split_rule: str | None = option(
        "",
        "Rule such as `id % 20 == 0`, which divides one file: these images are val, all others train",
        unset="presets.yaml",
        metavar="RULE",
    )


class CoordOptions(OptionSet):
    """Part of a preset that gets coordinates, and its order."""

    splits: list[Split] | None = option([], "Splits of the dataset", unset="all there are", flag="--split")
    object_order: OrderChoice | None = option(
        OrderChoice.unset,
        "Order of a record's objects: `annotation`, or `top_left`, by (min y, min x)",
        unset="presets.yaml, else as the preset was made, else annotation",
    )


class RescaleOptions(CoordOptions):
    """Parameters of a preset; unset ones are those of presets.yaml, else of the preset as it was made, else the defaults."""

    image_factor: int | None = option(
        0, "Both sides are multiples of this", unset=f"as configured, {IMAGE_FACTOR}", ge=1
    )
    max_pixels: int | None = option(0, "Largest width times height", unset=f"as configured, {MAX_PIXELS}", ge=1)
    min_pixels: int | None = option(0, "Smallest width times height", unset=f"as configured, {MIN_PIXELS}", ge=1)
    library: Library | None = option(
        Library.unset, "What resizes; a preset never mixes two", unset=f"as configured, {get_args(ResizeLibrary)[0]}"
    )
    workers: int | None = option(0, "Processes", unset="rescale_workers of imagemill.yaml, else all processors", ge=1)


class PlanOptions(OptionSet):
    """Parameters of a Stage-A plan, and its folders. Ranks and merge need equal values."""

    mode: ShardingMode = option(
        DEFAULT_MODE,
        "`per_group`: a group's images stay on one rank; `per_image`: they may be on several",
        flag="--sharding-mode",
    )
    passes: int | None = option(
        -1, "At most so many groups labelled pass", unset="all", flag="--pass-group-number", ge=0
    )
    fails: int | None = option(
        -1, "At most so many groups labelled fail", unset="all", flag="--fail-group-number", ge=0
    )
    seed: int = option(DEFAULT_SEED, "Seed of the sampling", flag="--sample-seed")
    input_dir: str | None = option(
        "", "Folder of missions", unset="the remembered one, else stage_a/input in the data root", metavar="DIR"
    )
    output_dir: str | None = option(
        "", "Where records go", unset="the remembered one, else stage_a/output in the data root", metavar="DIR"
    )

    @property
    def folders(self) -> dict[Place, str]:
        """Folders that were given."""
        folders: dict[Place, str | None] = {"stage_a_input": self.input_dir, "stage_a_output": self.output_dir}
        return {name: folder for name, folder in folders.items() if folder}

    def located(self, root: DataRoot) -> DataRoot:
        """Return the data root with these folders. Another command may change the remembered ones between ranks and merge."""
        for name, folder in self.folders.items():
            root = at(root, name, folder)
        return root

    def plan(self, found: Discovery, identity: str, world_size: int, former: str | None = None) -> StageAPlan:
        """Return the plan of a mission. Raises WrongUsage for a value out of range."""
        how: Any = {name: getattr(self, name) for name in ("mode", "passes", "fails", "seed")}
        return plan_stage_a(found, identity, world_size=world_size, former=former, **how)


class RanksOptions(PlanOptions):
    """Options of the ranks of a mission."""

    batch_size: int | None = option(
        0,
        "Most images in one model call of a rank",
        unset=f"summarizer.batch_size of imagemill.yaml, {_CONFIGURED.summarizer.batch_size}",
        ge=1,
    )
    workers: int = option(1, "Processes, where a run has several ranks", flag=None, ge=1)
    fresh: bool = option(False, "Infer every image, also where its summary is known")


class GroupsOptions(PlanOptions):
    """Options of the merge of a mission."""

    world_size: int | None = option(
        0,
        "Number of ranks, each a process of its own",
        unset=f"stage_a_ranks of imagemill.yaml, {_CONFIGURED.stage_a_ranks}",
        ge=1,
    )
    keep: bool = option(False, "Rank files stay after a merge without a failure", flag="--keep-intermediate-outputs")


class StageAOptions(RanksOptions, GroupsOptions):
    """Options of a command that runs the ranks of a mission and merges them."""


class RollbackOptions(OptionSet):
    """Options of a rollback to Stage 1."""

    delete_embeddings: bool = option(False, "With a rollback: delete every npy file too")
