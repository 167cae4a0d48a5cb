"""From answers to summaries. Spec: docs/spec/stage-a.md#failed-groups, docs/spec/stage-a.md#summaries"""

import json
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagemill.pipeline.stage_a.summaries import clean_answer, is_summary

LINE_BREAKS = [c for c in map(chr, range(sys.maxunicode + 1)) if len(f"a{c}b".splitlines()) == 2]


@pytest.mark.parametrize("line_break", [*LINE_BREAKS, "\r\n"])
def test_every_line_break_becomes_a_space(line_break):
    assert len(LINE_BREAKS) >= 10
    assert clean_answer(f"甲{line_break}乙") == "甲 乙"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" 甲 \t\u3000 乙\u00a0", "甲 乙"),
        ("无关图片", "无关图片"), ("无关图片，画面为办公室", "无关图片"), (" 无关图片\n说明", "无关图片"),
        ("不是无关图片", "不是无关图片"),
        ("", None), (" \n\u3000", None), ("\u200b\u2060", None), ("\x00", None),
        ("<DOMAIN=BBU><TASK=SUMMARY>\n甲", "甲"), ("<DOMAIN=BBU><TASK=SUMMARY>", None),
        ("<DOMAIN=BBU><TASK=SUMMARY>甲", "甲"), ("甲<DOMAIN=B><TASK=S>", "甲<DOMAIN=B><TASK=S>"),
        ('<DOMAIN=BBU><TASK=SUMMARY>\r\n{"品牌": "华为", "数量": 2, "状态": "合\\n格"}', "华为，合 格"),
        ('```json\n{"a": "甲", "b": " "}\n```', "甲"),
        ('{"a": "甲"}\n{"a": "乙"}', "乙"),
        ('{"a": "无关图片，办公室"}', "无关图片"),
        ('标签{型号}不清 {"a": "甲"}', '标签{型号}不清 {"a": "甲"}'),
        ('{"a": 1}', '{"a": 1}'), ('{"a": [], "b": false}', '{"a": [], "b": false}'),
        ("{}", None), ('{"a": ""}', None), ('{"a": " ", "b": {"c": "\\u200b"}}', None), ('{"a": null}', None),
        ('""', None), ('" "', None), ("[]", None), ("null", None), ("[{}]", None), ("```json\n{}\n```", None), ("```\n```", None),
        ('"甲\\n乙"', "甲 乙"), ('["甲", "乙"]', "甲，乙"),
        ('[{"a": "甲", "b": "乙"}]', "甲，乙"), ('```json\n[{"a": "甲"}, {"a": "乙"}]\n```', "甲，乙"),
        ('{"a": {"b": "甲"}, "c": ["乙", {"d": "丙"}]}', "甲，乙，丙"),
        ('以下是结果：\n```json\n{"a": "甲", "b": "乙"}\n```\n完', "甲，乙"), ('结果如下: {"a": "甲"}', "甲"),
        ('例如 ```json\n{"a": "甲"}\n``` 和\n```\n{"a": "乙"}\n```', "乙"),
        ('{"a": {"统计": [1]}}', '{"统计": [1]}'), ('[{"统计": [1]}]', '{"统计": [1]}'),
        ('{"统计": {"统计": 1}}', '{"统计": {"统计": 1}}'), ('{"a": [{"统计": 1}, {"统计": 2}]}', '{"统计": 2}'),
        ('统计=[{"类别": "BBU设备", "数量": 1}]', '{"统计": [{"类别": "BBU设备", "数量": 1}]}'), ("统计=[]", '{"统计": []}'),
        ('<DOMAIN=BBU><TASK=SUMMARY>\n统计 ＝ [\n  1,\n  {"a": "甲\n乙"}\n]', '{"统计": [1, {"a": "甲\\n乙"}]}'),
        ('统计=[1] 更正：统计={"a": 2} 完', '{"统计": {"a": 2}}'), ('统计=[1], {"统计": [2]}', '{"统计": [2]}'),
        ("统计=[1,", "统计=[1,"), ("统计=三项", "统计=三项"), ("统计=[1] 统计=[", '{"统计": [1]}'),
        ('{"统计": 1e999}', '{"统计": 1e999}'), ('{"统计": -1e999, "a": "甲"}', '{"统计": -1e999, "a": "甲"}'),
        ('{"a": NaN}', '{"a": NaN}'), ('{"a": "甲"', '{"a": "甲"'),
        ('{"a": "\\ud83d\\ude00"}', "😀"), ('{"a": "x\\ud800y"}', "x\ufffdy"),
    ],
)  # fmt: skip
def test_answer_becomes_one_line(answer, expected):
    assert clean_answer(answer) == expected


def test_last_object_with_statistics_is_kept_unchanged():
    first, last = {"统计": [1]}, {"统计": [{"类别": "BBU设备", "品牌": {"华为": 1}}], "备注": "甲\n乙"}
    answer = f'<DOMAIN=BBU><TASK=SUMMARY>\n{json.dumps(first)}\n{json.dumps(last, indent=2)}\n完 {{"a": "b"}}'

    cleaned = clean_answer(answer)

    assert json.loads(cleaned) == last
    assert "统计" in cleaned


def test_line_break_inside_the_text_of_an_object_is_accepted():
    assert json.loads(clean_answer('{"统计": "甲\u2028乙"}')) == {"统计": "甲\n乙"}


@pytest.mark.parametrize("answer", ['{"a":' * 5000, "[" * 5000 + '{"统计":', '{"统计":' + "[" * 100_000, "{" * 20_000])
def test_unclosed_nested_json_is_treated_as_text(answer):
    assert clean_answer(answer) == answer


@pytest.mark.parametrize("text", ["", " ", "a\n", "a\u2028b", None, 3, "\u200b"])
def test_text_other_than_one_visible_line_is_not_a_summary(text):
    assert not is_summary(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.text(st.characters()) | st.text('{}":, \n甲统计', max_size=30) | json_values.map(json.dumps))
def test_summary_is_one_visible_line_of_real_characters(answer):
    summary = clean_answer(answer)

    if summary is None:
        hidden = {"Cc", "Cf", "Zl", "Zp", "Zs"}
        said = answer.replace("null", "")
        assert "{" in answer or "\\" in answer or all(unicodedata.category(c) in hidden or c in '[]",' for c in said)
    else:
        assert is_summary(summary)
        assert summary == " ".join(summary.split())
        summary.encode()


plain = st.text('甲a1"\\{}', max_size=6)


@given(st.dictionaries(plain, plain | st.integers() | st.lists(plain)), st.text("甲乙\n ", max_size=5))
def test_statistics_are_found_inside_any_text(value, around):
    value = {**value, "统计": value}

    assert json.loads(clean_answer(around + json.dumps(value) + around)) == value
