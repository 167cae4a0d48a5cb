"""What a command says at its end: what was seen, made and left out, the checks, the rate, where to look."""

import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from dagster_project.work import Work
from imagemill.embedding_specs import T5_TOKENS, embedding_specs
from imagemill.pipeline.counters import progress_line
from imagemill.pipeline.story import Status
from imagemill.provenance import read_identity
from imagemill.store.ledger import Ledger
from imagemill.summarizer import CAPTIONER

MADE = ("computed", "extracted", "restored", "adopted")
_TOLD_OF_RECORDS = (
    "added", "migrated", "changed", "height_corrected", "width_corrected", "mask_corrected", "caption_replaced",
    "unusual_ratio", "quarantined", "stage1",
)  # fmt: skip
SHOWN_PROBLEMS = 10


def summary_lines(work: Work, status: Status) -> Iterator[str]:
    """The summary of `imagemill run`; `status`: as the data root stands now."""
    counts = work.counts()
    made = sum(counts.get(spec.kind, {}).get(name, 0) for spec in embedding_specs() for name in MADE)
    yield ""
    yield f"imagemill: {work.root.path}"
    yield f"  images     {status.images} seen, {_embedded(status)} embedded, {_not_arrived(status)} skipped"
    yield from _problems(status)
    for spec in embedding_specs():
        yield f"  {spec.kind:<10} {_made(counts.get(spec.kind, {}))}"
    yield from _captions(work, counts.get(CAPTIONER, {}))
    yield from _records(status, counts.get("stage2_jsonl", {}))
    for bucket, (samples, shards) in status.buckets.items():
        yield f"  bucket     {bucket:<10} {samples} {_plural(samples, 'sample')} in {shards} {_plural(shards, 'shard')}"
    yield f"  checks     {_checks(work)}"
    said = [text for text in work.findings() if text not in (work.error or "")]
    yield from (f"    {line}" for text in said for line in text.splitlines())
    if "total" in counts.get("stage2_jsonl", {}):
        yield f"  {progress_line(counts['stage2_jsonl'], work.seconds())}"
    yield f"  time       {work.seconds():.1f} s{_rate(work, made)}"
    written = counts.get("written", {}).get("written_buckets") or counts.get("stage2_jsonl", {}).get("rewritten")
    if not made and not written and not work.error:
        images = "every image that is not skipped" if _not_arrived(status) else "every image"
        yield f"  nothing to do: {images} is embedded, every record and shard is up to date"
    yield from _how_it_ended(work)
    yield f"  look       {_program()} ui --data-root {shlex.quote(str(_shown(work.root.path)))}"


def _records(status: Status, counts: dict[str, int]) -> Iterator[str]:
    told = [f"{counts[name]} {name.replace('_', ' ')}" for name in _TOLD_OF_RECORDS if counts.get(name)]
    yield f"  records    {', '.join([str(status.records), *told])}"
    if cut := counts.get("truncated_captions"):
        yield f"  captions   {cut} longer than the text encoder's {T5_TOKENS} tokens: it sees their beginning"


def _captions(work: Work, counts: dict[str, int]) -> Iterator[str]:
    if not counts:
        return
    with Ledger(work.root.ledger, read_only=True) as ledger:
        maker = read_identity(ledger, CAPTIONER)
    if maker is None:
        return
    told = [f"{counts[name]} {name}" for name in ("captioned", "kept", "refused", "failed") if counts.get(name)]
    yield f"  captions   {', '.join(told)} by {maker.model}"
    if maker.preview and counts.get("captioned"):
        yield "             a preview model: they describe nothing, and shards take them only with --allow-preview"


def _embedded(status: Status) -> int:
    return min((counts["done"] for counts in status.kinds.values()), default=0)


def _not_arrived(status: Status) -> int:
    return len({problem.item for problem in status.problems if problem.asset != "bucket_shards"})


def _problems(status: Status) -> Iterator[str]:
    shown = {}
    for problem in status.problems:
        shown.setdefault((problem.item, problem.reason), problem)
    for (item, reason), problem in list(shown.items())[:SHOWN_PROBLEMS]:
        yield f"    {reason:<16} {item}: {problem.detail}; {problem.remedy}"
    if len(shown) > SHOWN_PROBLEMS:
        yield f"    and {len(shown) - SHOWN_PROBLEMS} more: imagemill status"


def _made(counts: dict[str, int]) -> str:
    parts = [f"{counts.get('computed', 0)} made in {counts.get('calls', 0)} model calls"]
    parts += [
        f"{counts[name]} {name}"
        for name in ("extracted", "restored", "adopted", "kept", "refused", "failed", "replaced")
        if counts.get(name)
    ]
    return ", ".join(parts)


def _checks(work: Work) -> str:
    checks = work.checks()
    failed = sorted(name for name, passed in checks.items() if not passed)
    return f"{len(checks) - len(failed)} of {len(checks)} passed" + (f"; failed: {', '.join(failed)}" if failed else "")


def _rate(work: Work, made: int) -> str:
    images = made / max(len(embedding_specs()), 1)
    return f", {images / work.seconds():.1f} images/s" if made else ""


def _how_it_ended(work: Work) -> Iterator[str]:
    if work.interrupted:
        yield f"  stopped    by {signal.Signals(work.interrupted).name}; finished work is kept, run the same command to resume"
    elif work.error:
        yield from (f"  {'failed' if n == 0 else '':<10} {line}" for n, line in enumerate(work.error.splitlines()))


def exit_code(work: Work, status: Status, *, fail_on_skip: bool = False) -> int:
    """0 done; 1 something failed, a check too, or every input was refused; 128 + signal where one stopped us."""
    if work.interrupted:
        return 128 + work.interrupted
    failed = any(problem.outcome == "failed" for problem in status.problems)
    refused = _not_arrived(status)
    all_refused = bool(status.images) and not status.records and bool(refused)
    if work.error or failed or all_refused or not all(work.checks().values()) or (fail_on_skip and refused):
        return 1
    return 0


def _program() -> str:
    """How this command was called, so that the line can be pasted."""
    called = Path(sys.argv[0])
    return str(_shown(called.absolute())) if called.name == "imagemill" else "imagemill"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
