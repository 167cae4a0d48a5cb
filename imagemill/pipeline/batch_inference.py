"""Batched inference in which a failing item does not fail the rest of its batch.

Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage-a.md#summarizers
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from imagemill.errors import ModelUnusable
from imagemill.models import CutShort

T = TypeVar("T")
R = TypeVar("R")


def infer_in_parts(
    infer: Callable[[Sequence[T]], R],
    batch: Sequence[T],
    part_size: Callable[[Exception, int], int] = lambda error, size: (size + 1) // 2,
) -> Iterator[tuple[Sequence[T], R | Exception]]:
    """Yield each part of a batch with the model's result, in order; a part that failed is paired with its exception.

    Args:
        infer: calls the model with a part.
        batch: the items.
        part_size: maps the exception and the size of the failed batch to the size of the next parts; the same size gives up.

    Raises:
        ModelUnusable: if the model cannot work at all.
    """
    try:
        made = infer(batch)
    except ModelUnusable:
        raise
    except Exception as error:
        failure = error.with_traceback(None)  # frames of the traceback would keep the batch in memory
    else:
        yield batch, made
        return
    size = part_size(failure, len(batch))
    if size >= len(batch):
        yield batch, failure
        return
    for begin in range(0, len(batch), size):
        yield from infer_in_parts(infer, batch[begin : begin + size], part_size)


class Answered(NamedTuple):
    """The text that a model returned for an image. `cut_off`: whether it ended at the most tokens that the model may write."""

    text: str
    cut_off: bool = False


class Unanswered(NamedTuple):
    """Why an image has no text. `reason`: out_of_memory, model_error, wrong_answers or blank_answer."""

    reason: str
    detail: str


Answer = Answered | Unanswered


class _WrongAnswers(Exception):
    pass


def answer_batch(
    ask: Callable[[Sequence[T]], Sequence[str]], images: Sequence[T], clean: Callable[[str], str | None]
) -> list[Answer]:
    """Return one answer per image, in order.

    A batch that runs out of memory is halved; after another exception its images are passed one by one; a batch with a wrong
    number of answers fails as a whole.

    Args:
        ask: calls the model with some images.
        images: the images.
        clean: returns the normalised answer, None if it is blank.

    Raises:
        ModelUnusable: if the model cannot work at all.
    """

    def answers_of(part: Sequence[T]) -> list[Answer]:
        answers = ask(list(part))  # a copy: the model may change the list
        if not isinstance(answers, list | tuple) or len(answers) != len(part):
            count = len(answers) if isinstance(answers, list | tuple) else type(answers).__name__
            raise _WrongAnswers(f"{count} for a batch of {len(part)} images")
        return [_cleaned(answer, clean) for answer in answers]

    def part_size(error: Exception, size: int) -> int:
        return size if isinstance(error, _WrongAnswers) else (size + 1) // 2 if is_out_of_memory(error) else 1

    answers: list[Answer] = []
    for part, made in infer_in_parts(answers_of, images, part_size):
        answers += [_unanswered(made)] * len(part) if isinstance(made, Exception) else made
    return answers


def _unanswered(error: Exception) -> Unanswered:
    if isinstance(error, _WrongAnswers):
        return Unanswered("wrong_answers", str(error))
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return Unanswered("out_of_memory" if is_out_of_memory(error) else "model_error", message)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error, recognised by class names so that torch need not be installed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def free_device_memory() -> None:
    """Return the memory that torch keeps for later to the GPU, if torch is loaded and uses one."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def use_intraop_threads(count: int) -> None:
    """Set the number of threads with which torch computes for this thread, if torch is loaded."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _cleaned(answer: object, clean: Callable[[str], str | None]) -> Answer:
    if not isinstance(answer, str):
        return Unanswered("wrong_answers", f"the answer is not text: {type(answer).__name__}")
    text = clean(answer)
    return (
        Unanswered("blank_answer", "the answer is blank")
        if text is None
        else Answered(text, isinstance(answer, CutShort))
    )
