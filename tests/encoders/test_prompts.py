"""Prompts of the model: from the package or from files named in the configuration."""

import pytest

from imagemill.encoders.prompts import Prompts, caption_prompt
from imagemill.errors import MissingInput, WrongUsage

MISSION = "挡风板安装检查"


def test_known_mission_has_its_own_prompt_and_others_the_default():
    prompts = Prompts({})

    assert MISSION in prompts.of(MISSION)
    assert prompts.of("unknown") == prompts.of("default") != prompts.of(MISSION)


@pytest.mark.parametrize("mission", [MISSION, "BBU安装方式检查", "BBU接地线检查", "BBU线缆布放要求", "other"])
def test_every_prompt_requires_one_line_and_defines_the_answer_for_irrelevant_images(mission):
    """The answer is a single-line summary in Chinese, or 无关图片 for irrelevant images."""
    prompt = Prompts({}).of(mission)

    assert "一行" in prompt
    assert prompt.endswith("无关图片")


def test_configured_files_take_precedence_over_the_package(tmp_path):
    (tmp_path / "mine.txt").write_text("\ufeff 问 \n", "utf-8")
    (tmp_path / "rest.txt").write_text("其他", "utf-8")

    one = Prompts.read({MISSION: str(tmp_path / "mine.txt")})
    both = Prompts.read({MISSION: str(tmp_path / "mine.txt"), "default": str(tmp_path / "rest.txt")})

    assert ("问", Prompts({}).of("other")) == (one.of(MISSION), one.of("other"))
    assert (both.of(MISSION), both.of("other"), both.of("BBU接地线检查")) == ("问", "其他", "其他")


def test_mission_that_looks_like_a_path_reads_no_other_file():
    assert Prompts({}).of("default") == Prompts({}).of("../caption")


def test_caption_prompt_is_the_default_or_the_configured_one(tmp_path):
    (tmp_path / "ask.txt").write_text("describe")

    assert "one dense paragraph" in caption_prompt(None, 77)
    assert caption_prompt(str(tmp_path / "ask.txt"), 77) == "describe"


@pytest.mark.parametrize(("tokens", "words"), [(8, 5), (77, 51), (256, 170), (512, 200)])
def test_default_caption_prompt_asks_for_as_many_words_as_the_text_encoder_reads(tokens, words):
    assert f"of at most {words} words." in caption_prompt(None, tokens)


def test_error_of_a_missing_prompt_file_names_its_setting(tmp_path):
    with pytest.raises(MissingInput, match="prompt file cannot be read: No such file") as caught:
        Prompts.read({MISSION: str(tmp_path / "absent.txt")})

    assert f"summarizer.prompts, {MISSION}" in caught.value.do


@pytest.mark.parametrize(("content", "reason"), [(b" \n", "blank"), (b"\xff\xfe", "not UTF-8 text")])
def test_unusable_prompt_file_is_refused(tmp_path, content, reason):
    (tmp_path / "bad.txt").write_bytes(content)

    with pytest.raises(WrongUsage, match=reason) as caught:
        caption_prompt(str(tmp_path / "bad.txt"), 77)

    assert "captioner.prompt" in caught.value.do
