"""From what a model answers to a summary: one line of text.

    header lines       <DOMAIN=BBU><TASK=SUMMARY>              dropped
    JSON with 统计     … {"统计": [...]} …                      the last such object, on one line
    assignment         统计=[...]                              {"统计": [...]}, the last one, on one line
    JSON               {"品牌": "华为", "状态": "合格"}          华为，合格
      in a fence       以下是结果：```json {…} ```               as if it stood alone; so it does behind a colon
      saying nothing   {"摘要": ""}, {}, ""                    blank
    no matter          无关图片，画面为办公室                    无关图片
    text               any line breaks and runs of spaces      one space

Source: CONTRACTS section 5, "Summaries"; seed 003 "non-empty cleaned summary".
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from imagemill.pipeline.batch_inference import Answer, answer_batch
from imagemill.summarizer import NamedImage, Summarizer

IRRELEVANT = "无关图片"
STATISTICS = "统计"

_HEADER = re.compile(r"^[^\S\n]*<DOMAIN=[^<>\n]*>[^\S\n]*<TASK=[^<>\n]*>", re.MULTILINE)
_ASSIGNMENT = re.compile(rf"{STATISTICS}\s*[=＝]\s*(?=[\[{{])")
_FENCE = re.compile(r"^\s*```\w*\s*$", re.MULTILINE)
_FENCED = re.compile(r"```\w*\s(.*?)```", re.DOTALL)


def clean_answer(answer: str) -> str | None:
    """The answer's summary, None where it is blank.

    >>> clean_answer("标签清晰\\n\\n 安装牢固 ")
    '标签清晰 安装牢固'
    """
    # Half of a surrogate pair, which JSON escapes can hold, is no character: no file can be written with it.
    text = _HEADER.sub("", _whole_characters("\n".join(answer.splitlines())))
    summary = " ".join(_content(text).split())
    if summary.startswith(IRRELEVANT):
        return IRRELEVANT
    return summary if is_summary(summary) else None


def is_summary(text: object) -> bool:
    """Whether this is one line with something to be seen on it."""
    return isinstance(text, str) and text.splitlines() == [text] and any(map(_is_visible, text))


def _content(text: str) -> str:
    try:
        objects = list(_objects(text))
        statistics = [found for value, _ in objects for found in _with_statistics(value)]
        if statistics:
            return _whole_characters(json.dumps(statistics[-1], ensure_ascii=False))
        assigned = _assigned_statistics(text)
        if assigned is not None:
            return _whole_characters(json.dumps({STATISTICS: assigned}, ensure_ascii=False))
        value = _json_answer(text, objects)
        return text if value is _NO_JSON else _said(value, text)
    except RecursionError:  # nested nearly as deep as can be read
        return text


def _with_statistics(value: Any) -> list[dict[str, Any]]:
    """The objects with that key, in order; what lies within one is part of it."""
    has = lambda inner: isinstance(inner, dict) and STATISTICS in inner  # noqa: E731
    return [inner for inner in _walk(value, stop=has) if has(inner)]


def _assigned_statistics(text: str) -> Any:
    """Return the JSON array or object of the last `统计=…`, None without one."""
    for match in reversed(list(_ASSIGNMENT.finditer(text))):
        try:
            return _DECODER.raw_decode(text, match.end())[0]
        except ValueError:
            continue
    return None


def _json_answer(text: str, objects: Sequence[tuple[dict[str, Any], tuple[int, int]]]) -> Any:
    """The JSON that an answer consists of, or that it leads up to; else `_NO_JSON`."""
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


def _said(value: Any, text: str) -> str:
    """The strings of a JSON answer; the whole text where it holds numbers alone, nothing where it holds not even those."""
    inner = list(_walk(value))
    strings = [_one_line(each) for each in inner if isinstance(each, str) and any(map(_is_visible, each))]
    if strings:
        return _whole_characters("，".join(strings))
    return text if any(isinstance(each, int | float) for each in inner) else ""


def _walk(value: Any, stop: Callable[[Any], bool] = lambda inner: False) -> Iterator[Any]:
    """A JSON value and all within it, in order; nothing within what `stop` holds for. Not by recursion: it may be deep."""
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        yield inner
        if not stop(inner):
            within = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
            waiting.extend(reversed(list(within)))


def _objects(text: str) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """Every JSON object that is in no other, with where it stands."""
    begin = text.find("{")
    while begin >= 0:
        try:
            value, end = _DECODER.raw_decode(text, begin)
            yield value, (begin, end)
        except ValueError:
            end = begin + 1
        except RecursionError:  # a model that goes on for ever; each brace would be tried as deep again
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


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _whole_characters(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_visible(character: str) -> bool:
    # Zero-width, control and separating characters.
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}


def summarize_batch(summarizer: Summarizer, images: Sequence[NamedImage], mission: str) -> list[Answer]:
    """One summary per image, in order. Raises ModelUnusable: the summarizer cannot work at all."""
    return answer_batch(lambda part: summarizer.summarize(part, mission), images, clean_answer)
