"""Ranks: which of several processes works on which images, and which of them this one is.

    per_image    rank r of W takes jobs[r::W]: a group's images may be on several ranks
    per_group    rank r of W takes groups[r::W]: a group's images are on one rank, and no batch mixes groups

Both modes are one path: a plan says which images a rank works on, in which order.

Belongs here: the plan, and RANK and WORLD_SIZE as torchrun sets them.
Belongs elsewhere: what a rank does with an image (pipeline/stage_a/worker.py).
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
    """One image: `group_seq` from 0 in the plan's groups, `image_index` from 1 in its group."""

    group_seq: int
    image_index: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """`sizes`: how many images each group has."""

    sizes: tuple[int, ...]
    mode: ShardingMode
    world_size: int

    def jobs(self, rank: int) -> Iterator[ImageJob]:
        """What this rank works on, in order."""
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
    """Cut groups of these sizes over ranks. Raises WrongUsage."""
    if mode not in get_args(ShardingMode):
        raise WrongUsage(f"unknown sharding mode {mode!r}", do=f"choose from {', '.join(get_args(ShardingMode))}")
    return RankPlan(tuple(sizes), mode, _checked_world(world_size, "--world-size"))


class Ranks(NamedTuple):
    """`rank`: which one this process is, None where it is none of them but has them run."""

    rank: int | None
    world_size: int


def ranks_of(environment: Mapping[str, str], world_size: int | None = None) -> Ranks:
    """Which rank this process is, and how many there are; WORLD_SIZE without RANK means `--world-size`.

    Args:
        world_size: what `--world-size` says.

    Raises:
        WrongUsage: a value that is no number or out of range, RANK without WORLD_SIZE, two world sizes.
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
    """How many ranks torchrun has started on this machine; 1 where it did not."""
    return max(_number(environment, "LOCAL_WORLD_SIZE") or 1, 1)


def launch_of(environment: Mapping[str, str]) -> str:
    """What all ranks of one start by torchrun have in common, and no other start has.

    The rendezvous' id and port are the same from start to start where nobody chose them; on one machine the process
    that started the ranks tells starts apart.
    """
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    told = [environment.get(name, "") for name in names]
    if environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE"):
        parent = os.getppid()
        told.append(f"{parent}-{process_birth(parent)}")
    return "/".join(told)


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
