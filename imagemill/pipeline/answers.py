"""One batch of images through whatever answers; one image at fault costs only itself.

    exception            the batch's images one by one
    wrong number         the whole batch fails
    out of memory        in halves, down to one image, which fails alone

Source: CONTRACTS section 5, "The summarizer is replaceable"; issue "Stage-A": "An out-of-memory batch is halved".
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from imagemill.errors import ModelUnusable

T = TypeVar("T")


class Answered(NamedTuple):
    """What was said of one image."""

    text: str


class Unanswered(NamedTuple):
    """Why nothing was. `reason`: out_of_memory, model_error, wrong_answers or blank_answer."""

    reason: str
    detail: str


Answer = Answered | Unanswered


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
) -> list[Answer] | Unanswered:
    """The answers of one call, or what went wrong with it. The exception ends here: its frames hold the batch's memory."""
    try:
        answers = ask(list(images))  # its own: what it does to the list is nobody else's business
    except ModelUnusable:
        raise
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return Unanswered("out_of_memory" if is_out_of_memory(error) else "model_error", told)
    if not isinstance(answers, list | tuple) or len(answers) != len(images):
        count = len(answers) if isinstance(answers, list | tuple) else type(answers).__name__
        return Unanswered("wrong_answers", f"{count} for a batch of {len(images)} images")
    return [_cleaned(answer, clean) for answer in answers]


def is_out_of_memory(error: BaseException) -> bool:
    """By the names of its classes: torch need not be there to tell its error."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def _cleaned(answer: object, clean: Callable[[str], str | None]) -> Answer:
    if not isinstance(answer, str):
        return Unanswered("wrong_answers", f"the answer is no text: {type(answer).__name__}")
    text = clean(answer)
    return Unanswered("blank_answer", "the answer is blank") if text is None else Answered(text)
