"""From what a model answers to a summary: one line of text.

    header lines       <DOMAIN=BBU><TASK=SUMMARY>              dropped
    JSON with 统计     … {"统计": [...]} …                      the last such object, on one line
    JSON alone         {"品牌": "华为", "状态": "合格"}          华为，合格
    no matter          无关图片，画面为办公室                    无关图片
    text               any line breaks and runs of spaces      one space

Source: CONTRACTS section 5, "Summaries"; seed 003 "non-empty cleaned summary".
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from imagemill.pipeline.answers import Answer, answer_batch
from imagemill.summarizer import NamedImage, Summarizer

IRRELEVANT = "无关图片"
STATISTICS = "统计"

_HEADER = re.compile(r"^[^\S\n]*<DOMAIN=[^<>\n]*>[^\S\n]*<TASK=[^<>\n]*>", re.MULTILINE)
_FENCE = re.compile(r"^\s*```\w*\s*$", re.MULTILINE)


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
    objects = list(_objects(text))
    with_statistics = [value for value, _ in objects if STATISTICS in value]
    if with_statistics:
        return _whole_characters(json.dumps(with_statistics[-1], ensure_ascii=False))
    if objects and _nothing_besides(text, [span for _, span in objects]):
        strings = (_one_line(value) for value in objects[-1][0].values() if isinstance(value, str))
        return _whole_characters("，".join(filter(None, strings))) or text
    return text


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


def _nothing_besides(text: str, spans: list[tuple[int, int]]) -> bool:
    for begin, end in reversed(spans):
        text = text[:begin] + text[end:]
    return not _FENCE.sub("", text).strip()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant, strict=False)


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
