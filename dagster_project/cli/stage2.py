"""`imagemill stage2`: embeddings and records without shards; also verification, and rollback to Stage 1."""

import sys
from collections.abc import Sequence

import click

from dagster_project.cli.exit_codes import leave_if_ended
from dagster_project.cli.options import OneOf, accept_node, fail_on_skip, options, root_options
from dagster_project.cli.run import split_names
from imagemill.domain.embedding_specs import T5, embedding_specs
from imagemill.errors import WrongUsage
from imagemill.options import RollbackOptions
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.passes import Passes, pass_names
from imagemill.store.locations import refuse_no_images, refuse_no_root

CAPTIONS, ALL = "captions", "all"


def _regenerable() -> dict[str, str]:
    """Return the names of what can be regenerated: an embedding kind, by its own name or that of its pass, or `captions`."""
    kinds = {name: spec.kind for spec in embedding_specs() for name in (spec.kind, spec.pass_name)}
    return kinds | {CAPTIONS: CAPTIONS}


def _regenerated(context: click.Context, option: click.Parameter, given: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds to regenerate, each once."""
    every = [spec.kind for spec in embedding_specs()]
    return tuple(dict.fromkeys(kind for name in given for kind in (every if name == ALL else [_regenerable()[name]])))


@click.command("stage2")
@click.option("--pass", "single", multiple=True, type=OneOf(pass_names), help="One pass; may repeat (default: all).")
@click.option("--passes", callback=split_names, default="", metavar="A,B", help="The same as several --pass.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="At most this many images that still have work, in name order."
)
@click.option(
    "--regenerate", multiple=True, type=OneOf(lambda: [*_regenerable(), ALL]), metavar="KIND", callback=_regenerated,
    help="Replace every file of this kind by the configured model; may repeat. Run again to continue. `all`: every kind. "
    "`captions`: those of another captioner or prompt.",
)  # fmt: skip
@click.option(
    "--cancel", is_flag=True, help="With --regenerate: take the mark off again, until the first file has been replaced."
)
@click.option(
    "--output-base-dir", metavar="DIR", help="Folder for records and embeddings instead of derived/; remembered."
)
@click.option(
    "--verify",
    is_flag=True,
    help="Only read back every record and npy file, and note damaged files for the next run; exit 1 on any finding.",
)
@click.option("--rollback", is_flag=True, help="Only put the Stage 1 file back; the version 2 file is kept beside it.")
@options(RollbackOptions)
@accept_node
@fail_on_skip
@root_options
def command(
    session: Session,
    single: tuple[str, ...],
    passes: tuple[str, ...],
    limit: int | None,
    regenerate: tuple[str, ...],
    cancel: bool,
    output_base_dir: str | None,
    verify: bool,
    rollback: bool,
    options: RollbackOptions,
    accept_node: str | None,
    fail_on_skip: bool,
) -> None:
    """Make the missing embeddings and write the records, from Stage 1 ones too. Resume = run again."""
    names = (*single, *passes)
    _refuse_contradictions(verify, rollback, options.delete_embeddings, makes=bool(names or limit or regenerate))
    if not (verify or rollback):
        refuse_no_images(session.root)
    if output_base_dir:
        refuse_no_root(session.root)
        session.put("derived", output_base_dir)
    if verify:
        sys.exit(_verify(session))
    if rollback:
        sys.exit(_roll_back(session, options))
    if cancel:
        sys.exit(_cancel(session, regenerate))
    from dagster_project.summary import report
    from dagster_project.work import open_command

    chosen = Passes.named(names)
    kinds, recaption = [kind for kind in regenerate if kind != CAPTIONS], CAPTIONS in regenerate
    possible = {spec.kind for spec in chosen.specs} | ({CAPTIONS} if T5 in chosen.specs else set())
    if missing := set(regenerate) - possible:
        raise WrongUsage(f"--regenerate {missing.pop()} needs its pass", do="leave --pass out, or name that pass too")
    with open_command(session) as work:
        work.embed(chosen, limit=limit, regenerate=kinds, recaption=recaption, accept_node=accept_node)
        work.write_records(chosen)
        sys.exit(report(work, fail_on_skip=fail_on_skip))


def _refuse_contradictions(verify: bool, rollback: bool, delete_embeddings: bool, *, makes: bool) -> None:
    if delete_embeddings and not rollback:
        raise WrongUsage("--delete-embeddings goes with --rollback", do="add --rollback, or leave it out")
    if (verify or rollback) and (makes or (verify and rollback)):
        raise WrongUsage(f"{'--verify' if verify else '--rollback'} makes no embeddings", do="give it alone")


def _cancel(session: Session, kinds: tuple[str, ...]) -> int:
    if not kinds or CAPTIONS in kinds:
        raise WrongUsage("--cancel needs the kind", do="imagemill stage2 --regenerate KIND --cancel")
    from dagster_project.work import open_command

    with open_command(session) as work:
        for kind in kinds:
            click.echo(f"{kind}: regeneration cancelled, {work.cancel_regeneration(kind)} files are valid again")
    return 0


def _verify(session: Session) -> int:
    from dagster_project.cli.validate import show
    from imagemill.pipeline.stage2.damage import note_damage
    from imagemill.validation.contents import RecordedContents
    from imagemill.validation.validator import verify_stage2

    root, contents = session.root, RecordedContents(session.reading, session.in_force)
    code = show([verify_stage2(root.stage2_jsonl, root.derived, contents)])
    if contents.damaged:
        click.echo(note_damage(session.ledger, contents.damaged))
    return code


def _roll_back(session: Session, options: RollbackOptions) -> int:
    from dagster_project.work import open_command

    with open_command(session) as work:
        work.roll_back(options)
        leave_if_ended(work)
        jsonl, counts = session.root.stage2_jsonl, work.counts()["stage2_jsonl"]
        source = "the backup" if counts["from_backup"] else "the npy files"
        click.echo(f"rolled back: {counts['records']} records of Stage 1 from {source} in {jsonl}")
        if "deleted_files" in counts:
            click.echo(f"deleted {counts['deleted_files']} npy files")
        click.echo(f"the version 2 file, if there was one, is now {jsonl.name}.stage2.backup")
    return 0
