"""One batch of images through a summarizer; one image at fault costs only itself.

    exception            the batch's images one by one
    wrong number         the whole batch fails
    out of memory        in halves, down to one image, which fails alone

Source: CONTRACTS section 5, "The summarizer is replaceable"; issue "Stage-A": "An out-of-memory batch is halved".
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from imagemill.errors import ModelUnusable
from imagemill.pipeline.summaries import clean_answer
from imagemill.summarizer import NamedImage, Summarizer

T = TypeVar("T")


class Summary(NamedTuple):
    """One image's summary."""

    text: str


class NoSummary(NamedTuple):
    """Why an image has none. `reason`: out_of_memory, summarizer_error, wrong_answers or blank_summary."""

    reason: str
    detail: str


Answer = Summary | NoSummary


def summarize_batch(summarizer: Summarizer, images: Sequence[NamedImage], mission: str) -> list[Answer]:
    """One answer per image, in order.

    Raises:
        ModelUnusable: the summarizer cannot work at all.
    """
    return answer_batch(lambda part: summarizer.summarize(part, mission), images, clean_answer)


def answer_batch(
    ask: Callable[[Sequence[T]], Sequence[str]], images: Sequence[T], clean: Callable[[str], str | None]
) -> list[Answer]:
    """One answer per image, in order, of whatever is asked.

    Args:
        clean: an answer as it is kept, None where it says nothing.

    Raises:
        ModelUnusable: the model cannot work at all.
    """
    answers = _asked(ask, images, clean)
    if isinstance(answers, list):
        return answers
    if len(images) == 1 or answers.reason == "wrong_answers":
        return [answers] * len(images)
    size = (len(images) + 1) // 2 if answers.reason == "out_of_memory" else 1
    parts = (images[begin : begin + size] for begin in range(0, len(images), size))
    return [answer for part in parts for answer in answer_batch(ask, part, clean)]


def _asked(
    ask: Callable[[Sequence[T]], Sequence[str]], images: Sequence[T], clean: Callable[[str], str | None]
) -> list[Answer] | NoSummary:
    """The answers of one call, or what went wrong with it. The exception ends here: its frames hold the batch's memory."""
    try:
        answers = ask(images)
    except ModelUnusable:
        raise
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return NoSummary("out_of_memory" if is_out_of_memory(error) else "summarizer_error", told)
    if not isinstance(answers, list | tuple) or len(answers) != len(images):
        count = len(answers) if isinstance(answers, list | tuple) else type(answers).__name__
        return NoSummary("wrong_answers", f"{count} for a batch of {len(images)} images")
    return [_cleaned(answer, clean) for answer in answers]


def is_out_of_memory(error: BaseException) -> bool:
    """By the names of its classes: torch need not be there to tell its error."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def _cleaned(answer: object, clean: Callable[[str], str | None]) -> Answer:
    if not isinstance(answer, str):
        return NoSummary("wrong_answers", f"the answer is no text: {type(answer).__name__}")
    text = clean(answer)
    return NoSummary("blank_summary", "the answer is blank") if text is None else Summary(text)
