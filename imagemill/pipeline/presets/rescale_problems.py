"""Why lines and images are not in a preset: all of them are counted, the first thousand listed.

Belongs here: problems as values. Belongs elsewhere: who finds them (rescale_plan.py, rescale_worker.py).
Source: CONTRACTS section 3, "Presets are strict".
"""

from collections import Counter
from typing import Literal, NamedTuple

LISTED = 1000

# Reason code of what the disk did not let us do: ours to answer for, not the input's.
OS_ERROR = "os_error"


class RescaleProblem(NamedTuple):
    """Why a line or an image is not in the preset. `line` is 0 where it concerns the image alone, of whichever lines."""

    split: str
    line: int
    reason: str
    message: str
    remedy: str

    @property
    def outcome(self) -> Literal["refused", "failed"]:
        """Whose fault it is: the input's, or the disk's."""
        return "failed" if self.reason == OS_ERROR else "refused"

    def __str__(self) -> str:
        where = f"{self.split}.jsonl:{self.line}" if self.line else f"{self.split}.jsonl"
        return f"{where} {self.reason}: {self.message}"


class RescaleProblems:
    """Problems in the order they were met, the first thousand of them; counts of all."""

    def __init__(self) -> None:
        self.listed: list[RescaleProblem] = []
        self.by_reason: Counter[str] = Counter()
        self.by_split: Counter[str] = Counter()
        self._remedies: dict[str, str] = {}

    def add(self, problem: RescaleProblem) -> None:
        self.by_reason[problem.reason] += 1
        self.by_split[problem.split] += 1
        self._remedies.setdefault(problem.remedy, problem.reason)
        if len(self.listed) < LISTED:
            self.listed.append(problem)

    def __len__(self) -> int:
        return self.by_reason.total()

    def remedies(self) -> list[str]:
        return [f"{reason}: {remedy}" for remedy, reason in self._remedies.items() if remedy]
