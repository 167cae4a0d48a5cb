"""Problems that still hold, by what they keep incomplete: the files of one embedding kind, or the records.

Belongs here: selecting the ledger's problems for one output.
Belongs elsewhere: recording them (the passes and assets), the state of a whole data root (story.py).
Source: CONTRACTS section 0, "No input is dropped silently".
"""

from collections.abc import Callable, Iterable

from imagemill.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.files import FileSignature
from imagemill.formats.npy import NpyStore
from imagemill.layout import DataRoot
from imagemill.pipeline.stage2.merge import ASSET
from imagemill.pipeline.stage2.plan import IMAGE_REASONS, plan_for
from imagemill.pipeline.stage2.scan import SOURCE_ASSET, Scan, is_image, scan_approved
from imagemill.pipeline.story import current_problems
from imagemill.store.ledger import Ledger, Problem
from imagemill.summarizer import CAPTIONER

_CAPTIONS = {"captions", CAPTIONER}


def problems_of_kind(root: DataRoot, ledger: Ledger, spec: EmbeddingSpec) -> list[Problem]:
    """Return why images have no file of this kind: one problem per image and reason, by name.

    An image that is refused for its own bytes is refused for every kind, although one asset recorded it.
    """
    assets = {spec.kind} | (_CAPTIONS if spec.source == "caption" else set())

    def concerns(problem: Problem) -> bool:
        is_source = problem.asset == SOURCE_ASSET and is_image(problem.item)
        return problem.asset in assets or is_source or _is_of_image(problem)

    scan, held = _held(root, ledger, concerns)
    ids = sorted({problem.item for problem in held if problem.item in scan.sources})
    done = {row.image_id for row in plan_for(spec, ids, scan, ledger, _listing(root, spec, ids)).done} if ids else set()
    return _once(problem for problem in held if problem.item not in done)


def problems_of_records(root: DataRoot, ledger: Ledger) -> list[Problem]:
    """Return why inputs have no record, or not the one they ask for: one problem per input and reason, by name."""
    assets = {SOURCE_ASSET, ASSET} | _CAPTIONS
    return _once(_held(root, ledger, lambda problem: problem.asset in assets or _is_of_image(problem))[1])


def _is_of_image(problem: Problem) -> bool:
    assets = {ASSET, CAPTIONER, *(spec.kind for spec in embedding_specs())}
    return problem.asset in assets and problem.reason in IMAGE_REASONS


def _held(root: DataRoot, ledger: Ledger, concerns: Callable[[Problem], bool]) -> tuple[Scan, list[Problem]]:
    """The problems of concern that hold now. The folder is only listed if there are any."""
    rows = [problem for problem in ledger.problems() if concerns(problem)]
    scan = scan_approved(root.approved) if rows and root.approved.is_dir() else Scan({}, [])
    return scan, current_problems(scan, ledger, rows)


def _listing(root: DataRoot, spec: EmbeddingSpec, ids: Iterable[str]) -> dict[str, FileSignature]:
    store, found = NpyStore(root.derived / spec.folder, spec), {}
    for image_id in ids:
        try:
            found[image_id] = store.stat(image_id)
        except (OSError, ValueError):  # no file, or an id that no file can have
            continue
    return found


def _once(problems: Iterable[Problem]) -> list[Problem]:
    """Keep the earliest of several assets' problems with one input for one reason."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in sorted(problems, key=lambda problem: problem.at):
        first.setdefault((problem.item, problem.reason), problem)
    return [first[key] for key in sorted(first)]
