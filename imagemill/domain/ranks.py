"""Ranks: the division of images among several processes, and the rank of the present process.

    per_image    rank r of W takes jobs[r::W]: a group's images may be on several ranks
    per_group    rank r of W takes groups[r::W]: a group's images are on one rank, and no batch mixes groups

Both modes use the same code: a plan lists the images of a rank in order.

This module contains the plan, and reads RANK and WORLD_SIZE as torchrun sets them. Images are processed in
pipeline/stage_a/worker.py.

Spec: docs/spec/stage-a.md#sharding-modes
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, get_args

from imagemill.errors import WrongUsage
from imagemill.fs.atomic import process_birth

ShardingMode = Literal["per_group", "per_image"]
DEFAULT_MODE: ShardingMode = "per_group"

_NUMBER = re.compile(r"[0-9]{1,6}")


class ImageJob(NamedTuple):
    """One image: `group_seq` counts the plan's groups from 0, `image_index` the images of a group from 1."""

    group_seq: int
    image_index: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The division of groups among ranks. `sizes`: number of images of each group."""

    sizes: tuple[int, ...]
    mode: ShardingMode
    world_size: int

    def jobs(self, rank: int) -> Iterator[ImageJob]:
        """Return the jobs of a rank, in order."""
        if not 0 <= rank < self.world_size:
            raise WrongUsage(f"rank {rank} of {self.world_size}", do=f"give 0 to {self.world_size - 1}")
        if self.mode == "per_image":
            return islice(self._of_groups(range(len(self.sizes))), rank, None, self.world_size)
        return self._of_groups(range(rank, len(self.sizes), self.world_size))

    @property
    def mixes_groups(self) -> bool:
        """Whether images of several groups may share a batch."""
        return self.mode == "per_image"

    def _of_groups(self, groups: range) -> Iterator[ImageJob]:
        return (ImageJob(seq, index) for seq in groups for index in range(1, self.sizes[seq] + 1))


def plan_ranks(sizes: Sequence[int], mode: ShardingMode = DEFAULT_MODE, world_size: int = 1) -> RankPlan:
    """Divide groups of these sizes among ranks; raise WrongUsage."""
    if mode not in get_args(ShardingMode):
        raise WrongUsage(f"unknown sharding mode {mode!r}", do=f"choose from {', '.join(get_args(ShardingMode))}")
    return RankPlan(tuple(sizes), mode, _checked_world(world_size, "--world-size"))


class Ranks(NamedTuple):
    """The rank of this process and the number of ranks. `rank` is None for the process that starts the ranks."""

    rank: int | None
    world_size: int


def ranks_of(environment: Mapping[str, str], world_size: int | None = None) -> Ranks:
    """Return the rank of this process and the number of ranks; WORLD_SIZE without RANK means `--world-size`.

    Args:
        environment: the environment variables.
        world_size: the value of `--world-size`.

    Raises:
        WrongUsage: if a value is not a number or out of range, RANK is set without WORLD_SIZE, or two world sizes are
            given.
    """
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if world is not None and world_size is not None and world != world_size:
        raise WrongUsage(
            f"two world sizes: {world} by WORLD_SIZE, {world_size} by --world-size",
            do="leave --world-size out under torchrun, or unset WORLD_SIZE",
        )
    if rank is not None and world is None:
        raise WrongUsage("RANK is set and WORLD_SIZE is not", do="set both, as torchrun does, or unset RANK")
    source, given = ("--world-size", world_size) if world is None else ("WORLD_SIZE", world)
    count = _checked_world(1 if given is None else given, source)
    if rank is not None and rank >= count:
        raise WrongUsage(f"RANK is {rank}, and WORLD_SIZE {count}", do="ranks count from 0")
    return Ranks(rank, count)


def processes_here(environment: Mapping[str, str]) -> int:
    """Return the number of ranks that torchrun started on this machine; 1 without torchrun."""
    return max(_number(environment, "LOCAL_WORLD_SIZE") or 1, 1)


def launch_of(environment: Mapping[str, str]) -> str:
    """Return an id shared by all ranks of one start by torchrun and by no other start.

    Unless the user chose them, the rendezvous' id and port are the same for every start. On one machine the process
    that started the ranks distinguishes the starts.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    parts = [environment.get(name, "") for name in names]
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        parent = os.getppid()
        parts.append(f"{parent}-{process_birth(parent)}")
    return "/".join(parts)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    given = environment.get(name, "").strip()
    if not given:
        return None
    if not _NUMBER.fullmatch(given):
        raise WrongUsage(f"{name} is {given!r}: not a whole number", do=f"unset {name}, or let torchrun set it")
    return int(given)


def _checked_world(world_size: int, source: str) -> int:
    if world_size < 1:
        raise WrongUsage(f"{source} is {world_size}: there is at least one rank", do="give 1 or more")
    return world_size
