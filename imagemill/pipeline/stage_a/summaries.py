"""Summaries: normalisation of a model's answer to one line of text, and reuse of finished summaries in later runs.

    header lines       <DOMAIN=BBU><TASK=SUMMARY>              dropped
    JSON with 统计     … {"统计": [...]} …                      the last such object, on one line
    assignment         统计=[...]                              {"统计": [...]}, the last one, on one line
    JSON               {"品牌": "华为", "状态": "合格"}          华为，合格
      in a fence       以下是结果：```json {…} ```               as without the fence; likewise after a colon
      saying nothing   {"摘要": ""}, {}, ""                    blank
    no matter          无关图片，画面为办公室                    无关图片
    text               any line breaks and runs of spaces      one space

Finished summaries are rows of the ledger, which ranks do not open:

    rank files ──import_summaries──▶ ledger ──▶ .imagemill/stage_a/<mission>/summaries.jsonl ──KnownSummaries──▶ ranks

The file is also the table's second copy: a new ledger takes over its lines. Rank files are in rank_files.py.
Spec: docs/spec/stage-a.md#failed-groups, docs/spec/stage-a.md#reuse-of-summaries, docs/spec/stage-a.md#summaries
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import msgspec

from imagemill.errors import disk_full_reported
from imagemill.formats.jsonl import write_jsonl
from imagemill.fs.fingerprints import FileSignature, fingerprint
from imagemill.models import NamedImage, Summarizer
from imagemill.pipeline.batch_inference import Answer, answer_batch
from imagemill.pipeline.stage_a.rank_files import rank_files
from imagemill.store.ledger import FinishedSummary, Ledger
from imagemill.text.strict_json import NOT_JSON

IRRELEVANT = "无关图片"
STATISTICS = "统计"

_HEADER = re.compile(r"^[^\S\n]*<DOMAIN=[^<>\n]*>[^\S\n]*<TASK=[^<>\n]*>", re.MULTILINE)
_ASSIGNMENT = re.compile(rf"{STATISTICS}\s*[=＝]\s*(?=[\[{{])")
_FENCE = re.compile(r"^\s*```\w*\s*$", re.MULTILINE)
_FENCED = re.compile(r"```\w*\s(.*?)```", re.DOTALL)


def clean_answer(answer: str) -> str | None:
    r"""Return the answer's summary, None if it is blank.

    >>> clean_answer("标签清晰\n\n 安装牢固 ")
    '标签清晰 安装牢固'
    """
    # JSON escapes may contain half of a surrogate pair, which is not a character and cannot be written to a file.
    text = _HEADER.sub("", _whole_characters("\n".join(answer.splitlines())))
    summary = " ".join(_content(text).split())
    if summary.startswith(IRRELEVANT):
        return IRRELEVANT
    return summary if is_summary(summary) else None


def is_summary(text: object) -> bool:
    """Return True if this is one line with at least one visible character."""
    return isinstance(text, str) and text.splitlines() == [text] and any(map(_is_visible, text))


def _content(text: str) -> str:
    try:
        objects = list(_objects(text))
        has = lambda inner: isinstance(inner, dict) and STATISTICS in inner  # noqa: E731
        # In order; objects nested in a match belong to it.
        statistics = [inner for value, _ in objects for inner in _walk(value, stop=has) if has(inner)]
        if statistics:
            return _whole_characters(json.dumps(statistics[-1], ensure_ascii=False))
        assigned = _assigned_statistics(text)
        if assigned is not None:
            return _whole_characters(json.dumps({STATISTICS: assigned}, ensure_ascii=False))
        value = _json_answer(text, objects)
        return text if value is _NO_JSON else _text_of(value, text)
    except RecursionError:  # nested almost as deep as the parser allows
        return text


def _assigned_statistics(text: str) -> Any:
    """Return the JSON array or object of the last `统计=…`, None without one."""
    for match in reversed(list(_ASSIGNMENT.finditer(text))):
        try:
            return _DECODER.raw_decode(text, match.end())[0]
        except ValueError:
            continue
    return None


def _json_answer(text: str, objects: Sequence[tuple[dict[str, Any], tuple[int, int]]]) -> Any:
    """Return the JSON that an answer consists of or ends with; else `_NO_JSON`."""
    alone = _FENCE.sub("", text).strip()
    whole = _parsed(alone) if alone else None
    if whole is None or isinstance(whole, dict | list | str):
        return whole
    if objects and _nothing_besides(text, [span for _, span in objects]):
        return objects[-1][0]
    fenced = [value for block in _FENCED.findall(text) if isinstance(value := _parsed(block), dict | list)]
    if fenced:
        return fenced[-1]
    if objects:
        value, (begin, end) = objects[-1]
        if text[:begin].rstrip().endswith((":", "：")) and not text[end:].strip():
            return value
    return _NO_JSON


def _text_of(value: Any, text: str) -> str:
    """Join the strings of a JSON answer; without any, return the whole text if it contains numbers, else an empty string."""
    inner = list(_walk(value))
    strings = [" ".join(each.split()) for each in inner if isinstance(each, str) and any(map(_is_visible, each))]
    if strings:
        return _whole_characters("，".join(strings))
    return text if any(isinstance(each, int | float) for each in inner) else ""


def _walk(value: Any, stop: Callable[[Any], bool] = lambda inner: False) -> Iterator[Any]:
    """Yield a JSON value and its nested values in order, except inside those `stop` selects. Not recursive: it may be deep."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        yield inner
        if not stop(inner):
            within = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
            waiting.extend(reversed(list(within)))


def _objects(text: str) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """Yield every outermost JSON object with its position in the text."""
    begin = text.find("{")
    while begin >= 0:
        try:
            value, end = _DECODER.raw_decode(text, begin)
            yield value, (begin, end)
        except ValueError:
            end = begin + 1
        except RecursionError:  # endless output of a model; each further brace would be parsed as deeply again
            return
        begin = text.find("{", end)


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _nothing_besides(text: str, spans: list[tuple[int, int]]) -> bool:
    for begin, end in reversed(spans):
        text = text[:begin] + text[end:]
    return not _FENCE.sub("", text).strip()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{digits} would come out as Infinity")
    return number


_NO_JSON = object()
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, strict=False)


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_visible(character: str) -> bool:
    # Zero-width, control and separating characters.
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}


def summarize_batch(summarizer: Summarizer, images: Sequence[NamedImage], mission: str) -> list[Answer]:
    """Return one summary per image, in order. Raises ModelUnusable if the summarizer cannot work at all."""
    return answer_batch(lambda part: summarizer.summarize(part, mission), images, clean_answer)


# ---- finished summaries

SNAPSHOT = "summaries.jsonl"

# Most summaries kept per image: by several summarizers, or of several states of its file.
KEPT_PER_IMAGE = 4

# `at` of lines without a time: rank files of earlier releases have none.
ADOPTED = 1


def summary_fingerprint(image_name: str, content: str, identity: str) -> str:
    """Return the key of a summary: a fingerprint of file name, fingerprint of the file's bytes, and summarizer."""
    return fingerprint("\0".join((image_name, content, identity)).encode())


def summaries_folder(state: Path, mission: str) -> Path:
    """Return the folder of a mission's snapshot and in-flight files. `state`: the data root's `.imagemill/`."""
    return state / "stage_a" / mission


def import_summaries(ledger: Ledger, mission: str, output: Path, store: Path) -> None:
    """Record the summaries in rank files in the ledger, and bring the snapshot up to date.

    Files that earlier releases kept in `store` instead of the table are recorded too, then removed. After a kill at any moment, a
    summary is still in one of its files.

    Args:
        ledger: receives the summaries.
        mission: the mission.
        output: folder of the rank files.
        store: the mission's `summaries_folder`.
    """
    snapshot, earlier = store / SNAPSHOT, sorted(store.glob("rank*.jsonl"))
    with disk_full_reported(store), ledger.transaction():
        changed = ledger.record_summaries(_rows([*rank_files(output, mission).values(), *earlier], mission))
        if changed or not ledger.has_summaries(mission) or not snapshot.exists():
            ledger.record_summaries(_rows([snapshot], mission))
            ledger.thin_summaries(mission, KEPT_PER_IMAGE)
            # Before the commit: if it came after, a kill in between would leave a snapshot without these rows.
            if ledger.has_summaries(mission):
                store.mkdir(parents=True, exist_ok=True)
                write_jsonl(snapshot, ledger.summaries(mission))
    for path in earlier:
        path.unlink()


class KnownSummaries(ExitStack):
    """Lookup of finished summaries in files of lines. Use as a context manager.

    Several threads may use it. It holds offsets, about 260 bytes of memory per line. The files stay open: one that is replaced is
    still read as it was.

    Args:
        paths: of several lines with one key the last counts; files that do not exist are skipped.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        super().__init__()
        self._places: dict[int, tuple[BinaryIO, int]] = {}
        self._lock = Lock()
        for path in paths:
            if path.exists():
                file = self.enter_context(open(path, "rb"))  # noqa: SIM115
                for offset, line in _read_lines(file):
                    self._places[hash(line.fingerprint)] = self._places[hash((line.image, line.stat))] = (file, offset)

    def content(self, image: str, stat: FileSignature) -> str | None:
        """Return the fingerprint of a file's bytes if the file was read in this state, else None."""
        line = self._line(hash((image, stat)))
        return line.content if line and (line.image, line.stat) == (image, stat) else None

    def find(self, wanted: str) -> FinishedSummary | None:
        """Return the newest summary with this fingerprint."""
        line = self._line(hash(wanted))
        return line if line and line.fingerprint == wanted else None

    def _line(self, key: int) -> FinishedSummary | None:
        if key not in self._places:
            return None
        file, offset = self._places[key]
        with self._lock:
            file.seek(offset)
            raw = file.readline()
        return _parse_finished(raw)


class _AnyLine(FinishedSummary, frozen=True, kw_only=True, gc=False):
    """A line of the snapshot or of a rank file; lines of failed images have `ok` false."""

    ok: bool = True
    summary: str = ""


_LINES = msgspec.json.Decoder(_AnyLine)


def _parse_finished(raw: bytes) -> FinishedSummary | None:
    """Return the summary on a line, None for every other line."""
    try:
        line = _LINES.decode(raw)
    except NOT_JSON:
        return None
    return line if line.ok and line.fingerprint and is_summary(line.summary) else None


def _read_lines(file: BinaryIO) -> Iterator[tuple[int, FinishedSummary]]:
    """Yield each summary with its line's offset in bytes."""
    offset = 0
    for raw in file:
        if line := _parse_finished(raw):
            yield offset, line
        offset += len(raw)


def _rows(paths: Iterable[Path], mission: str) -> Iterator[FinishedSummary]:
    """Yield the rows of all files that exist."""
    for path in paths:
        if path.exists():
            with open(path, "rb") as file:
                for _, line in _read_lines(file):
                    yield FinishedSummary(
                        fingerprint=line.fingerprint, summary=line.summary, mission=mission,
                        image=line.image or line.fingerprint, stat=line.stat, content=line.content, at=line.at or ADOPTED,
                    )  # fmt: skip
