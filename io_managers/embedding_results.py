"""Results of the checks of one embedding kind: its files, and the inputs without one.

checks/embeddings.py turns them into asset checks. The npy IO manager evaluates them if its step fails for single images,
because Dagster skips the checks of a failed step and would show valid files as failed.
"""

from collections.abc import Iterator

import dagster as dg

from imagemill.domain.embedding_specs import EmbeddingSpec
from imagemill.pipeline.problem_list import problems_of_kind
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.models_in_use import model_in_use
from imagemill.validation.files import embedding_files
from imagemill.validation.findings import collect
from io_managers.check_results import as_result
from io_managers.refusals import CHECK as INPUTS
from io_managers.refusals import inputs_accepted
from io_managers.viewer import page_shown

FILES = "files_valid"


def files_result(session: Session, spec: EmbeddingSpec) -> dg.AssetCheckResult:
    """Check every file, and name the model. Valid files of an unfinished regeneration give a warning."""
    inventory, ledger = session.overview(), session.ledger
    store, used = inventory.store(spec), model_in_use(ledger, spec.kind)
    listing, unchanged = inventory.current_files(store.spec), inventory.unchanged(store.spec)
    result = as_result(collect(spec.folder, spec.kind, embedding_files(store, ledger, listing, unchanged)))
    warns = result.passed and used.regeneration is not None
    return dg.AssetCheckResult(
        passed=result.passed and not warns,
        severity=dg.AssetCheckSeverity.WARN if warns else dg.AssetCheckSeverity.ERROR,
        description="; ".join([result.description or "", *used.notes]),
        metadata={
            **result.metadata,
            "model": used.model,
            **(page_shown("images that wait", "images", show="waiting") if warns else {}),
        },
    )


def inputs_result(session: Session, spec: EmbeddingSpec) -> dg.AssetCheckResult:
    """List the images without a file of this kind."""
    return inputs_accepted(problems_of_kind(session.overview(), session.ledger, spec))


RESULTS = {FILES: files_result, INPUTS: inputs_result}


def evaluations(asset_key: dg.AssetKey, session: Session, spec: EmbeddingSpec) -> Iterator[dg.AssetCheckEvaluation]:
    """Yield the results as events."""
    for name, evaluate in RESULTS.items():
        result = evaluate(session, spec)
        yield dg.AssetCheckEvaluation(
            asset_key=asset_key,
            check_name=name,
            passed=result.passed,
            metadata=result.metadata,
            severity=result.severity,
            description=result.description,
        )
