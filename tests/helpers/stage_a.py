"""Missions with small images, and summarizers that record their calls."""

from pathlib import Path

from imagemill.pipeline.stage_a.merge import finish_stage_a
from imagemill.pipeline.stage_a.missions import LABEL_FOLDERS, ImageGroup, discover
from imagemill.pipeline.stage_a.plan import plan_stage_a
from imagemill.pipeline.stage_a.rank_files import output_file
from imagemill.pipeline.stage_a.summaries import import_summaries, summaries_folder
from imagemill.pipeline.stage_a.worker import RankWorker
from imagemill.store.ledger import Ledger
from tests.helpers.stage2 import picture

MISSION = "挡风板安装检查"
TICKET = "QC-TEMP-20250118-0015956"


def ticket(root: Path, label: str, folder: str, *names: str, mission: str = MISSION) -> Path:
    """Write a group's folder with a different image under each name."""
    path = root / mission / LABEL_FOLDERS[label] / folder
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        picture(path / name, size=(16, 16))
    return path


def touch(path: Path) -> Path:
    """Write a file with an image's name only, for code that does not open images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


def group(name: str, size: int, label: str = "pass") -> ImageGroup:
    return ImageGroup(label, name, name, tuple(f"{name}-{index}.jpg" for index in range(1, size + 1)))


class Recorder:
    """Answers with the image's name; `batches` records the names of each call. `answers` replaces answers by name."""

    def __init__(self, answers=None):
        self.batches: list[list[str]] = []
        self.answers = answers or {}

    def summarize(self, images, mission):
        self.batches.append([image.name for image in images])
        assert all(image.image.mode == "RGB" for image in images)
        return [self.answers.get(image.name, f"{mission} {image.name}") for image in images]

    @property
    def asked(self) -> list[str]:
        return [name for batch in self.batches for name in batch]


class Bench:
    """A mission's folders, and runs over it."""

    def __init__(self, tmp: Path) -> None:
        self.input, self.output, self.state = tmp / "input", tmp / "output", tmp / "state"
        self.store = summaries_folder(self.state, MISSION)

    def plan(self, *, identity="stub", **options):
        return plan_stage_a(discover(self.input, MISSION), identity, **options)

    def rank(self, plan, rank, summarizer, **options):
        self.import_summaries()
        worker = RankWorker(
            plan=plan, summarizer=lambda rank: summarizer, output=self.output, store=self.store, **options
        )
        return worker.stream([rank])

    def infer(self, plan, summarizer=None, **options):
        """Run all ranks, one after another; return their summarizers."""
        made = [summarizer or Recorder() for _ in range(plan.ranks.world_size)]
        for rank, each in enumerate(made):
            for _ in self.rank(plan, rank, each, **options):
                pass
        self.import_summaries()
        return made

    def import_summaries(self):
        """Import summaries as the process that runs the ranks does before and after them."""
        with Ledger(self.state / "ledger.sqlite") as ledger:
            import_summaries(ledger, MISSION, self.output, self.store)

    def finish(self, plan, **options):
        """Merge the output of this plan's ranks as the asset does."""
        with Ledger(self.state / "ledger.sqlite") as ledger:
            return finish_stage_a(plan, self.output, self.store, ledger, **options)

    def run(self, summarizer=None, *, identity="stub", batch_size=8, fresh=False, keep=False, **options):
        """Run all ranks and the merge; return the summarizers and the result of the merge."""
        plan = self.plan(identity=identity, **options)
        made = self.infer(plan, summarizer, batch_size=batch_size, fresh=fresh)
        return made, self.finish(plan, keep=keep)

    def merge(self, **options):
        """Return the merged output of this plan's ranks."""
        return self.finish(self.plan(**options))

    @property
    def result(self) -> Path:
        return output_file(self.output, MISSION)
