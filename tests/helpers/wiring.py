"""Assets, IO managers and checks run by Dagster in this process: an ephemeral history, stub encoders, a data root."""

from contextlib import contextmanager

import dagster as dg
from dagster._core.storage.tags import ASSET_PARTITION_RANGE_END_TAG, ASSET_PARTITION_RANGE_START_TAG

from assets.command_options import split_options
from assets.partitions import images
from dagster_project.deployments import test_resources
from imagemill.domain.embedding_specs import EmbeddingSpec
from resources.dagster_internals.events import DEFER
from tests.helpers.stubs import StubEncoder

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@contextmanager
def history(*keys):
    """An empty Dagster instance with these images registered."""
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(images.name, list(keys))
        yield instance


def stub_every_kind(monkeypatch, encoder=StubEncoder):
    monkeypatch.setattr(EmbeddingSpec, "encoder_class", lambda self: encoder)


def materialize(root, instance, *assets, keys=None, deferred=False, resources=None, selection=None, **config):
    """Run assets and checks on a data root; a failing step is in the result.

    Args:
        keys: first and last partition.
        deferred: whether assets report their own events.
        config: per asset, its configuration and the options that only a command gives.
    """
    tags = dict(DEFER) if deferred else {}
    if keys:
        tags |= {ASSET_PARTITION_RANGE_START_TAG: keys[0], ASSET_PARTITION_RANGE_END_TAG: keys[-1]}
    configs, options = {}, {}
    for name, given in config.items():
        config_of_asset, tags_of_asset = split_options(given)
        configs[name] = {"config": config_of_asset}
        options |= tags_of_asset
    return dg.materialize(
        assets, instance=instance, resources={**test_resources(str(root.path)), **(resources or {})}, tags=tags | options,
        run_config={**QUIET, "ops": configs}, raise_on_error=False,
        selection=selection,
    )  # fmt: skip


def check(root, instance, *assets):
    """Run only the checks among these assets and checks; return evaluations by `asset:check`."""
    result = materialize(root, instance, *assets, selection=dg.AssetSelection.all_asset_checks())
    assert result.success
    return checks_of(result)


def failure_of(result, step):
    """Return the message of a failed step: the failure's description, or its exception's message."""
    (event,) = [e for e in result.all_events if e.is_step_failure and e.step_key == step]
    data = event.step_failure_data
    if data.user_failure_data:
        return data.user_failure_data.description
    error = data.error
    while error.cause and error.cls_name.startswith("Dagster"):
        error = error.cause
    return f"{error.cls_name}: {error.message}"


def materialized(instance, asset):
    """Return the partition keys of an asset's materialisations, oldest first."""
    records = instance.fetch_materializations(dg.AssetKey(asset), limit=1000).records
    return [record.partition_key for record in reversed(records)]


def checks_of(result):
    return {f"{e.asset_key.to_user_string()}:{e.check_name}": e for e in result.get_asset_check_evaluations()}


def claims(ledger):
    return ledger.cells("leases", ["asset", "item"])
