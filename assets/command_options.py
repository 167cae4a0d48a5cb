"""Options that a command gives its runs and the launchpad does not offer: stored in one run tag, as JSON.

Options that the UI offers belong in the configuration (the `Config` class beside each asset).
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import dagster as dg
import msgspec

OPTIONS_TAG = "imagemill/options"

Options = TypeVar("Options", bound=msgspec.Struct)


class ImageOptions(msgspec.Struct, frozen=True):
    """Options of a run of embedding assets.

    Attributes:
        up_to: only images whose id sorts at or before this one.
        ids: only these images, if there are any.
        extract_only: extract vectors from Stage 1 records; load no model.
    """

    up_to: str | None = None
    ids: frozenset[str] = frozenset()
    extract_only: bool = False

    def includes(self, image_id: str) -> bool:
        """Return whether an image of the run's range is one of its images."""
        return (self.up_to is None or image_id <= self.up_to) and (not self.ids or image_id in self.ids)


class RecordOptions(msgspec.Struct, frozen=True):
    """Options of a run of `stage2_jsonl`.

    Attributes:
        complete: open images that no pass has opened yet, and tokenise captions without a mask.
        migrate: convert Stage 1 records to version 2.
        up_to: open images and migrate records only up to this id.
        kinds: embedding kinds whose refusals the counters count as failed; None for all.
    """

    complete: bool = True
    migrate: bool = True
    up_to: str | None = None
    kinds: tuple[str, ...] | None = None


class RankOptions(msgspec.Struct, frozen=True):
    """Options of a run of `stage_a_ranks` or `stage_a_groups`.

    Attributes:
        launch: name of the torchrun start; the merge counts only its ranks as ended.
        claim_stays: whether this process keeps its claim on the mission after the ranks.
        wait_seconds: how long the merge waits while no rank writes anything.
    """

    launch: str | None = None
    claim_stays: bool = False
    wait_seconds: float = 0


_NAMES = {name for options in (ImageOptions, RecordOptions, RankOptions) for name in options.__struct_fields__}


def read_options(context: dg.AssetExecutionContext, options: type[Options]) -> Options:
    """Return the options of the run's command, or their defaults."""
    return msgspec.json.decode(context.run.tags.get(OPTIONS_TAG, "{}"), type=options)


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Split the options of a command into configuration and run tags; values that are None are left out."""
    set_values = {name: value for name, value in given.items() if value is not None}
    options = {name: value for name, value in set_values.items() if name in _NAMES}
    tags = {OPTIONS_TAG: msgspec.json.encode(options).decode()} if options else {}
    return {name: value for name, value in set_values.items() if name not in _NAMES}, tags
