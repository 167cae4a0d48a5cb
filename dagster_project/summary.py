"""Summary and exit code of a command: images seen, files made, problems, checks, rate, address of the UI.

The figures come from imagemill/pipeline/accounting.py and imagemill/pipeline/status.py, units from imagemill/text/units.py.
"""

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from dagster_project.snapshot import Ended, Unchanged, write_snapshot
from imagemill.domain.embedding_specs import T5, embedding_specs, mask_length
from imagemill.domain.layout import DataRoot
from imagemill.models import CAPTIONER
from imagemill.pipeline.accounting import progress_line
from imagemill.pipeline.problem_list import RENAMED, InputProblem, renames_line
from imagemill.pipeline.shards.packing import change_lines
from imagemill.pipeline.stage2.models_in_use import model_lines, preview_kinds, preview_notice
from imagemill.pipeline.status import Status, input_lines, read_state
from imagemill.store.ledger import DECISIONS
from imagemill.store.provenance import read_identity
from imagemill.text.units import as_duration, as_rate, counted

MADE = ("computed", "linked", "extracted", "restored", "adopted")

# Counters of records that are printed, with their words: only those that a user may want to act on.
_OF_RECORDS = {
    "added": "added",
    "migrated": "migrated from Stage 1",
    "changed": "changed",
    "renamed": "under a new id",
    "height_corrected": "with a corrected height",
    "width_corrected": "with a corrected width",
    "mask_corrected": "with a corrected mask",
    "caption_replaced": "with a replaced caption",
    "crop_box_replaced": "whose extra field crop_box was replaced",
    "captions_replaced": "whose extra field captions was replaced",
    "repeats_replaced": "whose extra field repeats was replaced",
    "unusual_ratio": "of unusual aspect ratio",
    "stage1": "still of Stage 1",
}

# Inputs that are not images, by reason: a noun, and what follows it.
OTHER_INPUTS = {
    "unsupported_type": ("unsupported file", ""),
    "archive": ("archive", ""),
    "sub_folder": ("folder", ""),
    "orphan_caption": ("caption file", " without an image"),
    "not_a_file": ("entry", " that is not a file"),
}

# Number of problems printed per reason.
SHOWN_PROBLEMS = 3


def summary_lines(work: Ended, status: Status) -> Iterator[str]:
    """Yield the summary of `imagemill run` and `imagemill stage2`.

    Args:
        work: the finished work.
        status: state of the data root after the command.
    """
    counts = work.counts()
    yield ""
    yield f"imagemill: {work.session.root.path}"
    yield f"  images     {status.images}"
    yield from _other_inputs(status)
    yield from (f"  {label:<10} {line}" for label, line in input_lines(status))
    yield from (f"  inputs     {line}" for line in work.session.input_changes)
    yield from _problems(status)
    yield from _renames(work, status)
    for spec in embedding_specs():
        yield f"  {spec.kind:<10} {_embedding_counts(counts.get(spec.kind, {}))}"
    yield from model_lines(work.session.reading)
    yield from _captions(work, counts.get(CAPTIONER, {}))
    yield from _records(work, status, counts.get("stage2_jsonl", {}))
    yield from _buckets(status)
    for line in change_lines(counts.get("written", {})):
        yield f"  shards     {line}"
    yield f"  checks     {_checks(work)}"
    findings = [text for text in work.findings() if text not in (work.error or "")]
    yield from (f"    {line}" for text in findings for line in text.splitlines())
    if "total" in counts.get("stage2_jsonl", {}):
        yield f"  {progress_line(counts['stage2_jsonl'], work.seconds())}"
    embedded = f", {as_rate(len(work.embedded), work.seconds(), 'image')}" if work.embedded else ""
    yield f"  time       {as_duration(work.seconds())}{embedded}"
    if nothing := _nothing_new(work, status, counts):
        yield f"  {nothing}"
    if isinstance(work, Unchanged):
        yield f"  unchanged  since the run that ended at {work.snapshot.time}, whose checks these are; no Dagster run was started"
    if work.interrupted:
        yield f"  stopped    by {signal.Signals(work.interrupted).name}; finished work is kept, run the same command to resume"
    elif work.error:
        yield from (f"  {'failed' if n == 0 else '':<10} {line}" for n, line in enumerate(work.error.splitlines()))
    yield _look(work.session.root)
    yield from preview_notice(preview_kinds(work.session.reading))


def _buckets(status: Status) -> Iterator[str]:
    for bucket, (samples, shards) in status.buckets.items():
        yield f"  bucket     {bucket:<10} {counted(samples, 'sample')} in {counted(shards, 'shard')}"


def _look(root: DataRoot) -> str:
    return f"  look       {_program()} ui --data-root {shlex.quote(str(_shown(root.path)))}"


def _nothing_new(work: Ended, status: Status, counts: Mapping[str, Mapping[str, int]]) -> str | None:
    """Return the line of a command that changed nothing, else None. Its statement holds for the whole data root."""
    made = sum(counts.get(spec.kind, {}).get(name, 0) for spec in embedding_specs() for name in MADE)
    packed = counts.get("written")
    rewritten = counts.get("stage2_jsonl", {}).get("rewritten")
    if made or rewritten or (packed and packed["written_buckets"]) or work.error or work.interrupted:
        return None
    if not status.complete or not all(work.checks().values()):
        return "nothing new: the rest needs what is listed above; `imagemill problems` lists every input"
    if not status.images.seen:
        return "nothing to do: there are no images in approved/"
    shards = " and every shard" if packed else ""
    return f"nothing to do: every image is embedded, and every record{shards} is up to date"


def _other_inputs(status: Status) -> Iterator[str]:
    reasons = {p.item: p.reason for p in status.stage2_problems if p.reason in OTHER_INPUTS}
    counts = {reason: list(reasons.values()).count(reason) for reason in OTHER_INPUTS}
    nouns = ((count, *OTHER_INPUTS[reason]) for reason, count in counts.items() if count)
    if parts := [counted(count, noun) + rest for count, noun, rest in nouns]:
        yield f"  other      {', '.join(parts)}"


def _records(work: Ended, status: Status, counts: Mapping[str, int]) -> Iterator[str]:
    parts = [f"{counts[name]:,} {words}" for name, words in _OF_RECORDS.items() if counts.get(name)]
    if taken_out := counts.get("quarantined"):
        parts.append(f"{counted(taken_out, 'line')} put into quarantine")
    yield f"  records    {', '.join([f'{status.records:,}', *parts])}"
    if cut := counts.get("truncated_captions"):
        verb = "is" if cut == 1 else "are"
        tokens = mask_length([work.session.in_force(T5)])
        yield f"  captions   {cut:,} {verb} longer than the text encoder's {tokens} tokens; only the beginning is used"


def _captions(work: Ended, counts: Mapping[str, int]) -> Iterator[str]:
    if not counts:
        return
    identity = read_identity(work.session.reading, CAPTIONER)
    if identity is None:
        return
    parts = [f"{counts[name]:,} {name}" for name in ("captioned", "kept", "refused", "failed") if counts.get(name)]
    yield f"  captions   {', '.join(parts)} by {identity.model}"
    if cut := counts.get("cut_off"):
        yield f"             {counted(cut, 'caption')} not finished: raise captioner.max_new_tokens, or ask for a shorter one"
    if identity.preview and counts.get("captioned"):
        yield "             made by a preview model: they do not describe the images, and are packed only with --allow-preview"


def _problems(status: Status) -> Iterator[str]:
    by_reason: dict[str, list[InputProblem]] = {}
    for problem in status.stage2_problems:
        if problem.reason == RENAMED:  # named by `_renames`; such an image may have another problem, too
            continue
        by_reason.setdefault(problem.reason, []).append(problem)
    for reason, problems in sorted(by_reason.items()):
        for problem in problems[:SHOWN_PROBLEMS]:
            yield f"    {reason:<16} {problem.item}: {problem.detail}; {problem.remedy}"
        if len(problems) > SHOWN_PROBLEMS:
            rest = len(problems) - SHOWN_PROBLEMS
            yield f"    {'':<16} and {rest:,} more: `imagemill problems --reason {reason}` lists them all"


def _renames(work: Ended, status: Status) -> Iterator[str]:
    if accepted := getattr(work, "accepted", ()):
        names = ", ".join(f"{former.file_name} → {image.file_name}" for former, image in accepted[:SHOWN_PROBLEMS])
        rest = f" and {len(accepted) - SHOWN_PROBLEMS:,} more" if len(accepted) > SHOWN_PROBLEMS else ""
        had = (
            "caption and record of its earlier name"
            if len(accepted) == 1
            else "captions and records of their earlier names"
        )
        yield f"  renamed    {counted(len(accepted), 'image')} took over the {had}: {names}{rest}"
    if waiting := renames_line(status.stage2_problems):
        yield f"  renamed    {waiting}"


def _embedding_counts(counts: Mapping[str, int]) -> str:
    parts = [f"{counts.get('computed', 0):,} made in {counted(counts.get('calls', 0), 'model call')}"]
    parts += [
        f"{counts[name]:,} {words}"
        for name, words in (
            ("linked", "linked from files of equal inputs"), ("extracted", "extracted"), ("restored", "restored"),
            ("adopted", "adopted"), ("kept", "up to date"),
            ("refused", "refused"), ("failed", "failed"), ("replaced", "replaced"),
            ("divided", "too large for memory: lower batch_size"),
        )
        if counts.get(name)
    ]  # fmt: skip
    return ", ".join(parts)


def _checks(work: Ended) -> str:
    checks = work.checks()
    failed = sorted(name for name, passed in checks.items() if not passed)
    warned = f", {len(work.warnings())} with warnings" if work.warnings() else ""
    passed = f"{len(checks) - len(failed)} of {len(checks)} passed{warned}"
    return passed + (f"; failed: {', '.join(failed)}" if failed else "")


def report(work: Ended, *, fail_on_skip: bool, everything: bool = False) -> int:
    """Print the summary of a command that embedded images, record its end, and return its exit code.

    `everything`: whether the command brings the whole data root up to date.
    """
    state = read_state(work.session, work.embedded)
    for line in summary_lines(work, state.status):
        click.echo(line)
    write_snapshot(work, state, everything=everything)
    return exit_code(work, state.status, fail_on_skip=fail_on_skip)


def report_unchanged(work: Unchanged, *, fail_on_skip: bool) -> int:
    """Print the summary of a run that had nothing to do; return its exit code."""
    status = work.snapshot.status
    for line in (*preview_notice(status.previews), *summary_lines(work, status)):
        click.echo(line)
    return exit_code(work, status, fail_on_skip=fail_on_skip)


def exit_code(work: Ended, status: Status, *, fail_on_skip: bool = False) -> int:
    """Return 0 on success; 1 if work or a check failed, or if every image was refused; 128 + the number of the signal."""
    if work.interrupted:
        return 128 + work.interrupted
    outcomes = {p.outcome for p in status.stage2_problems if p.reason not in DECISIONS}
    all_refused = status.images.seen == status.images.refused > 0
    refused = "refused" in outcomes or status.images.refused > 0
    failed = work.error or "failed" in outcomes or all_refused or not all(work.checks().values())
    return int(bool(failed) or (fail_on_skip and refused))


def _program() -> str:
    """Return the name or path by which this command was called, so that the line can be pasted."""
    called = Path(sys.argv[0])
    return str(_shown(called.absolute())) if called.name == "imagemill" else "imagemill"


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
