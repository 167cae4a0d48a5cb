"""The embedding kinds of the code location: those that imagemill.yaml lists when the location is loaded.

Importing this module puts them into use, so it is imported before the assets. An unknown kind leaves the location loadable
with the default kinds, and adds a failing check that names it.
"""

from collections.abc import Iterable
from typing import Any

import dagster as dg

from imagemill.config import use_configured_kinds
from imagemill.domain.embedding_specs import default_specs, embedding_specs, use_kinds
from imagemill.domain.layout import DataRoot
from imagemill.errors import UnknownKind
from resources.keys import APPROVED_IMAGES, asset_key


def _failing_check(problem: UnknownKind) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=APPROVED_IMAGES, name="kinds_known", description="Every embedding kind of imagemill.yaml is installed."
    )
    def check() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, description=str(problem))

    return check


def _use_kinds() -> list[dg.AssetChecksDefinition]:
    try:
        use_configured_kinds(DataRoot.resolve())
    except UnknownKind as problem:
        use_kinds(())
        return [_failing_check(problem)]
    return []


KIND_CHECKS = _use_kinds()


def without_kinds(assets: Iterable[Any], checks: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Leave out the assets that depend on a default kind which is not in use, and their checks."""
    in_use = {spec.kind for spec in embedding_specs()}
    absent = {asset_key(spec.kind) for spec in default_specs() if spec.kind not in in_use}
    made = [one for one in assets if isinstance(one, dg.AssetsDefinition)]
    dropped = {key for one in made if absent.intersection(one.dependency_keys) for key in one.keys}
    return (
        [one for one in assets if one not in made or not dropped & one.keys],
        [one for one in checks if not dropped & {key.asset_key for key in one.check_keys}],
    )
