"""Each option is declared once; click options and launchpad fields are derived from it."""

import click
import pytest

from dagster_project.cli.main import cli
from dagster_project.cli.options import options
from dagster_project.definitions import build_definitions
from dagster_project.deployments import test_resources as resources_of
from imagemill import options as declared
from imagemill.options import CoordOptions, OptionSet, ShardOptions, StageAOptions

# Options of commands that share their name with another option but have another meaning.
OTHERS = {
    ("bench", "--images"): "a number; presets take a folder",
    ("stage2", "--limit"): "images that have work",
    ("status", "--fresh"): "the report; ranks make summaries afresh",
    ("stage2", "--regenerate"): "kinds; each asset has its own switch",
    ("stage2", "--rollback"): "the job itself",
    ("preset convert", "--annotations"): "one file; the launchpad takes one of each split",
    ("preset convert", "--split"): "the split of --annotations",
    ("preset coord", "--workers"): "accepted without effect",
    ("push", "--allow-preview"): "publishes what is packed; packing has its own",
    ("push", "--bucket"): "the sets to publish",
    ("push", "--dry-run"): "what would be sent",
    ("validate", "--max-pixels"): "a limit that records must keep",
}  # fmt: skip


def commands(group, name=""):
    for child in group.list_commands(None):
        found = group.get_command(None, child)
        path = f"{name} {child}".strip()
        yield from commands(found, path) if isinstance(found, click.Group) else [(path, found)]


def models(model=OptionSet):
    for child in model.__subclasses__():
        if child.__module__ == declared.__name__:
            yield child
            yield from models(child)


def flag_of(name, field):
    return field.json_schema_extra["flag"] or f"--{name.replace('_', '-')}"


def declarations():
    """Return the models that declare each option themselves, by flag."""
    found = {}
    for model in dict.fromkeys(models()):
        for name in model.__annotations__:
            found.setdefault(flag_of(name, model.model_fields[name]), []).append(model)
    return found


COMMANDS = dict(commands(cli))


@pytest.mark.parametrize("name", COMMANDS)
def test_option_shared_with_the_launchpad_is_derived(name):
    """Each flag exists once per command: a second click.option beside the derived one is refused."""
    command = COMMANDS[name]
    model = getattr(command.callback, "options_model", OptionSet)
    flags = [flag for param in command.params if isinstance(param, click.Option) for flag in param.opts]
    fields = {flag_of(name, f) for name, f in model.model_fields.items() if f.json_schema_extra["flag"] is not None}

    assert len(flags) == len(set(flags))
    twice = [flag for flag in flags if flag in declarations() and flag not in fields and (name, flag) not in OTHERS]
    assert twice == [], "declare it in imagemill/options.py and derive it, or list it in OTHERS"
    assert fields <= set(flags)


def test_every_exception_in_the_list_exists():
    flags = {(name, flag) for name, command in COMMANDS.items() for param in command.params for flag in param.opts}
    assert OTHERS.keys() <= flags


def test_launchpad_declares_no_options_itself(tmp_path):
    """Configuration classes of assets and jobs only combine dg.Config with a model, without additional fields."""
    definitions = build_definitions(resources_of(str(tmp_path)))
    nodes = [asset.op for asset in definitions.assets if hasattr(asset, "op")]
    nodes += [node.definition for job in definitions.jobs if hasattr(job, "nodes") for node in job.nodes]
    classes = {
        kind
        for node in nodes
        for kind in node.compute_fn.decorated_fn.__annotations__.values()
        if isinstance(kind, type) and issubclass(kind, OptionSet)
    }

    assert len(classes) >= 8
    assert {kind: kind.__annotations__ for kind in classes if kind.__annotations__} == {}
    for node in nodes:
        config = node.config_schema.config_type
        if fields := getattr(config, "fields", None):
            assert any(fields.keys() == kind.model_fields.keys() for kind in classes), node.name


def test_no_two_models_declare_the_same_option():
    """Options with one name in two models would have different meanings, for example two kinds of workers or seeds."""
    for flag, owners in declarations().items():
        texts = [f.description for m in owners for n, f in m.model_fields.items() if flag_of(n, f) == flag]
        assert len(texts) == len(set(texts)), flag


def parse(model, *arguments):
    found = []

    @click.command(context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
    @options(model)
    def command(options):
        found.append(options)

    command.main(arguments, standalone_mode=False)
    return found[0]


def test_given_options_become_plain_run_configuration():
    given = parse(
        ShardOptions, "--shuffle", "--seed", "0", "--bucket", "512x512", "--bucket", "256x256", "--dry_run"
    ).given()

    assert given == {"shuffle": "yes", "seed": 0, "only": ["512x512", "256x256"], "dry_run": True}
    assert parse(ShardOptions).given() == {}


def test_values_keep_their_underscore():
    assert parse(CoordOptions, "--object_order", "top_left", "--split", "val").given() == {
        "object_order": "top_left", "splits": ["val"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "arguments", "says"),
    [
        (ShardOptions, ["--shard-size", "0"], "0 is not in the range x>=1"),
        (StageAOptions, ["--sharding-mode", "per-group"], "'per-group' is not one of per_group, per_image"),
        (StageAOptions, ["--fail-group-number", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_constraints_equal_those_of_the_field(model, arguments, says):
    with pytest.raises(click.BadParameter, match=says):
        parse(model, *arguments)


def test_run_receives_only_the_options_of_its_model():
    ranks = parse(StageAOptions, "--batch-size", "2", "--world-size", "3", "--sample-seed", "7").given(
        declared.RanksOptions
    )
    assert ranks == {"batch_size": 2, "seed": 7}
