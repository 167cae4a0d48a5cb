"""One batch through a summarizer. Spec: docs/spec/stage-a.md#summarizers"""

import subprocess
import sys

import pytest
from PIL import Image

from imagemill.errors import ModelUnusable
from imagemill.models import NamedImage
from imagemill.pipeline.batch_inference import Answered, Unanswered, is_out_of_memory
from imagemill.pipeline.stage_a.summaries import summarize_batch

IMAGES = [NamedImage(name, Image.new("RGB", (8, 8))) for name in "abcdefgh"]


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


class Scripted:
    """`fails`: of a batch's names, the exception it raises or None."""

    def __init__(self, fails=lambda names: None, answers=lambda names: [f"答 {name}" for name in names]):
        self.fails, self.answers, self.calls = fails, answers, []

    def summarize(self, images, mission):
        names = "".join(image.name for image in images)
        self.calls.append(names)
        if error := self.fails(names):
            raise error
        return self.answers(names)


def asked(summarizer, images=IMAGES):
    return summarize_batch(summarizer, images, "m")


def reasons(answers):
    return [answer.reason if isinstance(answer, Unanswered) else "ok" for answer in answers]


def test_answers_are_cleaned_in_order():
    assert [Answered(f"答 {name}") for name in "abcdefgh"] == asked(
        Scripted(answers=lambda ns: [f" 答\n{n}" for n in ns])
    )


def test_exception_costs_only_the_image_at_fault():
    summarizer = Scripted(lambda names: ValueError("bad\npixel") if "c" in names else None)

    answers = asked(summarizer)

    assert ["abcdefgh", *"abcdefgh"] == summarizer.calls
    assert Unanswered("model_error", "ValueError: bad pixel") == answers[2]
    assert ["ok", "ok", "model_error", *["ok"] * 5] == reasons(answers)


@pytest.mark.parametrize("error", [ValueError("bad"), MemoryError()])
def test_summarizer_that_changes_its_list_changes_no_one_else_s(error):
    """It has no more than its arguments to work with, and may empty them on the way."""

    class Eater(Scripted):
        def summarize(self, images, mission):
            names = [images.pop(0).name for _ in range(len(images))]
            if "c" in names:
                raise error
            return [f"答 {name}" for name in names]

    answers = asked(Eater())

    assert [n for n, answer in enumerate(answers) if isinstance(answer, Unanswered)] == [2]
    assert answers[3] == Answered("答 d")


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("HIP out of memory.")]
)
def test_out_of_memory_halves_the_batch(error):
    summarizer = Scripted(lambda names: error if len(names) > 2 else None)

    assert reasons(asked(summarizer)) == ["ok"] * 8
    assert summarizer.calls == ["abcdefgh", "abcd", "ab", "cd", "efgh", "ef", "gh"]


def test_out_of_memory_on_one_image_fails_it_alone():
    answers = asked(Scripted(lambda names: MemoryError() if "e" in names else None))

    assert [*["ok"] * 4, "out_of_memory", *["ok"] * 3] == reasons(answers)


@pytest.mark.parametrize("answers", [["x"] * 7, ["x"] * 9, [], "abcdefgh", None, {"a": 1}])
def test_wrong_number_of_answers_fails_the_batch(answers):
    summarizer = Scripted(answers=lambda names: answers)

    assert reasons(asked(summarizer)) == ["wrong_answers"] * 8
    assert summarizer.calls == ["abcdefgh"]


def test_blank_answer_and_one_that_is_no_text_fail_alone():
    """Scenario: Empty summary validation."""
    answers = asked(Scripted(answers=lambda names: ["答", " \u2028", None]), IMAGES[:3])

    assert reasons(answers) == ["ok", "blank_answer", "wrong_answers"]


@pytest.mark.parametrize("error", [ModelUnusable("no model"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_not_about_images_ends_the_rank(error):
    with pytest.raises(type(error)):
        asked(Scripted(lambda names: error))


def test_torch_s_own_error_is_known_without_torch():
    """Reference: torch.OutOfMemoryError is a RuntimeError of that name; nothing here imports torch."""
    from torch import OutOfMemoryError as TorchError

    assert is_out_of_memory(TorchError("x"))
    assert not is_out_of_memory(RuntimeError("x"))
    rooms = "imagemill.pipeline.stage_a.worker, imagemill.pipeline.stage_a.merge"
    program = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
