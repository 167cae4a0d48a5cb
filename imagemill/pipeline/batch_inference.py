"""A batch through a model: an item at fault costs only itself.

Spec: docs/spec/conventions.md#refused-and-failed, docs/spec/stage-a.md#summarizers
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from imagemill.errors import ModelUnusable

T = TypeVar("T")
R = TypeVar("R")


def infer_in_parts(
    infer: Callable[[Sequence[T]], R],
    batch: Sequence[T],
    part_size: Callable[[Exception, int], int] = lambda error, size: (size + 1) // 2,
) -> Iterator[tuple[Sequence[T], R | Exception]]:
    """Yield each part of a batch with what the model returned for it, in order; a part that failed comes with its exception.

    Args:
        part_size: exception and size of the failed batch → size of the parts to try next; the same size gives up.

    Raises:
        ModelUnusable: if the model cannot work at all.
    """
    try:
        made = infer(batch)
    except ModelUnusable:
        raise
    except Exception as error:
        failure = error.with_traceback(None)  # its frames keep the memory of the batch
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
    """The text that a model returned for an image."""

    text: str


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

    A batch that runs out of memory is halved, after another exception its images are asked about one by one, and a batch with a
    wrong number of answers fails as a whole.

    Args:
        clean: returns an answer as it is kept, None if it is blank.

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
