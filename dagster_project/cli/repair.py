"""`imagemill repair`: rebuild a damaged or lost ledger."""

import secrets
from contextlib import suppress
from functools import partial

import click

from dagster_project.cli.options import root_options
from imagemill.domain.layout import DataRoot
from imagemill.pipeline.repair import Repair, apply_repair, plan_repair
from imagemill.pipeline.session import open_session
from imagemill.store.ledger import ROOT_ID, LedgerDamaged
from imagemill.store.locations import nothing_has_run
from imagemill.store.second_copy import refresh

_SHOWN = 20


@click.command("repair")
@click.option("--apply", is_flag=True, help="Write the new ledger; the damaged one goes to .imagemill/quarantine/.")
@click.option("--new-id", is_flag=True, help="Give a copied data root an id of its own; with --apply.")
@partial(root_options, opens=False)
def command(root: DataRoot, apply: bool, new_id: bool) -> None:
    """Report what of a damaged or lost ledger can be rebuilt from files, records, shards and second copies."""
    if new_id:
        click.echo(_give_new_id(apply=apply))
        return
    with suppress(LedgerDamaged), open_session() as session:
        root = session.root  # with its folders, which a damaged ledger cannot provide
    repair = plan_repair(root)
    for line in report(root, repair):
        click.echo(line)
    if repair.damage is None:
        return
    if not apply:
        click.echo("nothing was changed; `imagemill repair --apply` writes this ledger")
        return
    kept = apply_repair(root, repair)
    click.echo(f"rebuilt {root.ledger}" + (f"; the damaged files are in {kept}" if kept else ""))
    click.echo("now run `imagemill run`: it reads captions again, and makes what is missing or invalid")


def _give_new_id(*, apply: bool) -> str:
    """Give the data root a new id if `apply`; return what was done."""
    with open_session() as session:
        if not session.root.ledger.exists():
            raise nothing_has_run(session.root)
        if not apply:
            return "nothing was changed; `imagemill repair --new-id --apply` gives this data root a new id"
        session.ledger.record_setting(ROOT_ID, secrets.token_hex(16))
        refresh(session.root, session.ledger, required=True)
        return f"{session.root.path} has a new id; in a history that it shares, it also needs a name of its own"


def report(root: DataRoot, repair: Repair) -> list[str]:
    """Return the lines that describe a repair."""
    if repair.damage is None:
        return [f"the ledger is whole: {root.ledger}; nothing to repair"]
    copied = (
        f"second copy of {repair.copied_at}" if repair.copied_at else "no second copy: models by the shard manifests"
    )
    lines = [f"damaged     {repair.damage}", f"from        {copied}"]
    lines += [f"model       {kind}: {model}" for kind, model in sorted(repair.models().items())]
    lines += [f"withdrawn   {len(repair.withdrawn)}", f"images      {len(repair.sources)}"]
    lines += [
        f"files       {kind}: {count} by {model_key}"
        for (kind, model_key), count in sorted(repair.model_key_counts().items())
    ]
    lines += [f"shards      {name}: cannot be read; `imagemill verify` reports why" for name in repair.unreadable_sets]
    lines += [f"not taken   {name}: {why}" for name, why in list(repair.invalid.items())[:_SHOWN]]
    if len(repair.invalid) > _SHOWN:
        lines.append(f"not taken   {len(repair.invalid) - _SHOWN} more")
    return lines
