"""Stage-A: balance of the ranks' load, and cost of the merge of their lines.

    balance   20 images and 1 on two ranks, a summarizer of fixed latency: the slowest rank of per_image against that of per_group
    merge     lines of two ranks into groups of ten: ours against json and a dict that holds every line

Goals: per_image's slowest rank takes at most 0.6 of per_group's; the merge is no slower than the plain one (medians over
interleaved rounds) and takes at most 64 bytes of memory per line beyond the plan.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from PIL import Image

from benchmarks.common.inputs import scratch
from imagemill.domain.ranks import ShardingMode
from imagemill.formats.jsonl import encode_line
from imagemill.pipeline.stage_a.merge import merge_ranks
from imagemill.pipeline.stage_a.missions import LABEL_FOLDERS, ImageGroup, discover
from imagemill.pipeline.stage_a.plan import plan_stage_a
from imagemill.pipeline.stage_a.rank_files import RankLine, output_file, rank_file
from imagemill.pipeline.stage_a.worker import RankWorker

BALANCE_GOAL, MERGE_GOAL, BYTES_GOAL = 0.6, 1.0, 64
MISSION, LATENCY, RANKS = "mission", 0.05, 2
GROUP_SIZE = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with scratch() as folder:
        balanced = balance(folder / "balance", arguments.rounds)
        merged = merge(folder / "merge", arguments.lines, arguments.rounds)
    return 0 if balanced and merged else 1


# ---- balance


class Slow:
    """A summarizer with a fixed time per image."""

    def summarize(self, images, mission):
        time.sleep(LATENCY * len(images))
        return [image.name for image in images]


def balance(folder: Path, rounds: int) -> bool:
    for name, size in (("a", 20), ("b", 1)):
        group = folder / "input" / MISSION / LABEL_FOLDERS["pass"] / name
        group.mkdir(parents=True)
        for number in range(size):
            Image.new("RGB", (64, 64)).save(group / f"{number}.png")
    modes: tuple[ShardingMode, ...] = ("per_group", "per_image")
    times = [[_slowest(folder, mode) for mode in modes] for _ in range(rounds)]
    ratio = median(per_image / per_group for per_group, per_image in times)
    for mode, seconds in zip(modes, zip(*times, strict=True), strict=True):
        print(f"{mode:<12}{median(seconds):>8.2f} s on the slowest of {RANKS} ranks")
    print(f"per_image takes {ratio:.2f} of per_group (goal: at most {BALANCE_GOAL:g})")
    return ratio <= BALANCE_GOAL


def _slowest(folder: Path, mode: ShardingMode) -> float:
    """Return the seconds of the slowest rank. Ranks are independent, so they run one after another."""
    plan = plan_stage_a(discover(folder / "input", MISSION), "slow", mode=mode, world_size=RANKS)
    output, store = folder / "output", folder / "store"
    worker = RankWorker(plan=plan, summarizer=lambda rank: Slow(), output=output, store=store, batch_size=4, fresh=True)
    seconds = []
    for rank in range(RANKS):
        began = time.perf_counter()
        rows = sum(1 for _ in worker.stream([rank]))
        assert rows
        seconds.append(time.perf_counter() - began)
    return max(seconds)


# ---- merge


def merge(folder: Path, lines: int, rounds: int) -> bool:
    folder.mkdir()
    groups = [
        ImageGroup("pass", f"g{seq}", f"g{seq}", tuple(f"g{seq}-{n}.jpg" for n in range(GROUP_SIZE)))
        for seq in range(lines // GROUP_SIZE)
    ]
    files = _write_lines(folder, groups)
    before = _peak()
    ours(folder, groups, files)
    grown = max(_peak() - before, 0) / lines
    expected = output_file(folder, MISSION).read_bytes()
    plain(folder, groups, files)
    assert output_file(folder, MISSION).read_bytes() == expected
    ways: list[Callable[..., None]] = [plain, ours]
    times = [[_timed(way, folder, groups, files) for way in ways] for _ in range(rounds)]
    ratio = median(mine / theirs for theirs, mine in times)
    for way, seconds in zip(ways, zip(*times, strict=True), strict=True):
        print(f"{way.__name__:<12}{median(seconds):>8.2f} s for {lines} lines")
    print(f"the merge takes {ratio:.2f} of the plain one (goal: at most {MERGE_GOAL:g}),", end=" ")
    print(f"{grown:.0f} bytes of memory per line (goal: at most {BYTES_GOAL})")
    return ratio <= MERGE_GOAL and grown <= BYTES_GOAL


def _write_lines(folder: Path, groups: list[ImageGroup]) -> dict[int, Path]:
    files = {rank: rank_file(folder, MISSION, rank) for rank in range(RANKS)}
    handles = [path.open("wb") for path in files.values()]
    for seq, group in enumerate(groups):
        for number, name in enumerate(group.images, start=1):
            line = RankLine(
                group_seq=seq, group_id=group.group_id, label=group.label, image_index=number, image_name=name, ok=True,
                summary=f"标签清晰，安装牢固，第 {number} 张", fingerprint=f"{seq:016x}{number:016x}",
            )  # fmt: skip
            handles[(seq * GROUP_SIZE + number - 1) % RANKS].write(encode_line(line))
    for handle in handles:
        handle.close()
    return files


def _timed(way: Callable[..., None], folder: Path, groups: list[ImageGroup], files: dict[int, Path]) -> float:
    output_file(folder, MISSION).unlink()  # otherwise nothing would be left to write
    began = time.perf_counter()
    way(folder, groups, files)
    return time.perf_counter() - began


def ours(folder: Path, groups: list[ImageGroup], files: dict[int, Path]) -> None:
    assert merge_ranks(MISSION, groups, files, output_file(folder, MISSION)).written == len(groups)


def plain(folder: Path, groups: list[ImageGroup], files: dict[int, Path]) -> None:
    found: defaultdict[int, dict[int, str]] = defaultdict(dict)
    for path in files.values():
        for raw in path.open(encoding="utf-8"):
            line = json.loads(raw)
            assert line["group_id"] == groups[line["group_seq"]].group_id
            found[line["group_seq"]][line["image_index"]] = line["summary"]
    with output_file(folder, MISSION).open("w", encoding="utf-8") as out:
        for seq, group in enumerate(groups):
            summaries = {f"image_{n}": found[seq][n] for n in range(1, len(group.images) + 1)}
            head = {"group_id": group.group_id, "mission": MISSION, "label": group.label, "images": group.images}
            out.write(json.dumps({**head, "per_image": summaries}, ensure_ascii=False, separators=(",", ":")) + "\n")


def _peak() -> int:
    """Return the peak memory of this process in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
