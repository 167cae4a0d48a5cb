"""`imagemill bench`: speed of the embedding kinds on this machine or on a cluster, and a forecast for the data root."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click
import msgspec

from dagster_project.cli.options import OneOf, root_options
from imagemill.config import file_in_force
from imagemill.domain.embedding_specs import embedding_specs
from imagemill.errors import WrongUsage
from imagemill.pipeline.session import Session
from imagemill.pipeline.stage2.passes import pass_names
from imagemill.store.locations import refuse_no_images, refuse_no_root
from imagemill.text.units import as_duration, as_rate, as_size, counted

if TYPE_CHECKING:  # loads numpy and the encoders
    from imagemill.pipeline.bench import ClusterSpeed, KindSpeed
    from resources.data_root import DataRootResource


@click.command("bench")
@click.option("--images", type=click.IntRange(min=1), default=64, show_default=True, help="Images to measure, at most.")
@click.option("--pass", "passes", multiple=True, type=OneOf(pass_names), help="One pass; may repeat (default: all).")
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="This process, or the cluster in imagemill.yaml.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@root_options
def command(session: Session, images: int, passes: tuple[str, ...], engine: str, as_json: bool) -> None:
    """Measure the configured models with images of this data root: images per second, the limiting stage, and a forecast."""
    if engine == "ray" and session.config.engine.kind != "ray":
        raise WrongUsage(
            "--engine ray needs the settings of a cluster",
            where=file_in_force(session.root),
            do="write `engine: {kind: ray}` there",
        )
    refuse_no_root(session.root, may_begin=True)
    refuse_no_images(session.root)
    from imagemill.pipeline.bench import measure, sample_jobs
    from resources.data_root import DataRootResource
    from resources.encoders import Encoders

    data_root = DataRootResource(path=str(session.root.path), config_file="", output_base_dir="")
    encoders = Encoders(data_root=data_root, overrides={})
    inventory, known = session.overview(), session.reading.captions()
    measured = measure if engine == "local" else _on_cluster(data_root)
    speeds: list[KindSpeed | ClusterSpeed] = []
    for spec in embedding_specs():
        if passes and spec.pass_name not in passes:
            continue
        remaining = len(inventory.scan.sources.keys() - inventory.files(spec).keys())
        jobs = sample_jobs(spec, inventory, known, images)
        speeds.append(measured(spec, encoders.worker_options(spec), jobs, session.root, remaining))
        if not as_json:
            for line in speed_lines(speeds[-1]):
                click.echo(line)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(speeds)).decode())
        return
    for line in total_lines(speeds):
        click.echo(line)


def _on_cluster(data_root: "DataRootResource") -> "Callable[..., ClusterSpeed]":
    """Join the cluster; return what measures a kind there."""
    from imagemill.pipeline.bench import measure_cluster
    from imagemill.pipeline.stage2.embed import EmbedWorker
    from resources.engine import ConfiguredEngine

    cluster = ConfiguredEngine(data_root=data_root, accept_node="")
    cluster.check()
    from resources.ray_pool import measure_links

    link = max(measure_links().values(), default=0.0)
    return partial(measure_cluster, pool_of=partial(cluster.pool_of, EmbedWorker), link=link)


def speed_lines(speed: "KindSpeed | ClusterSpeed") -> Iterator[str]:
    """Yield the report on one kind for people."""
    from imagemill.pipeline.bench import KindSpeed

    yield f"{speed.kind}: {speed.model} on {speed.device}, {counted(speed.images, 'image')} measured"
    yield from _stages(speed) if isinstance(speed, KindSpeed) else _of_cluster(speed)
    need = f"{as_duration(3600 * speed.hours)}, {as_size(round(1e9 * speed.gigabytes))}"
    yield f"  forecast   {counted(speed.remaining, 'image')} without a file: {need if speed.remaining else 'nothing to do'}"


def _of_cluster(speed: "ClusterSpeed") -> Iterator[str]:
    each = ", ".join(f"{name} {as_rate(rate, 1, 'image')}" for name, rate in speed.nodes.items())
    yield f"  nodes      {each}; together {as_rate(speed.stream, 1, 'image')} here"
    travels = f"{as_size(round(speed.sent))} sent and {as_size(round(speed.returned))} back per image"
    yield f"  driver     {1000 * speed.driver_cpu:.2f} ms of CPU time per image; {travels}"
    ceilings = ", ".join(f"{name} {as_rate(rate, 1, 'image')}" for name, rate in speed.ceilings.items())
    yield f"  limits     {ceilings}; link {as_size(round(speed.link))} per second"
    remedies = {
        "nodes": "the nodes limit it: more nodes make it faster",
        "driver": "this process limits it: shares would be faster, each with a process of its own",
        "link": "the link limits it: shares would be faster, which read their photographs themselves",
    }
    yield f"             {remedies[speed.limit]}"


def _stages(speed: "KindSpeed") -> Iterator[str]:
    alone = (("prepare", speed.prepare), ("model", speed.model_alone), ("write", speed.write))
    yield "  alone      " + ", ".join(f"{name} {as_rate(rate, 1, 'image')}" for name, rate in alone)
    together = f"{as_rate(speed.stream, 1, 'image')}; the device is busy {speed.busy:.0%} of the time"
    yield f"  together   {together}; {_limit(speed.limit)}"


def _limit(stage: str) -> str:
    remedies = {
        "prepare": "decoding limits it: raise decode_threads, or use more cores",
        "model": "the model limits it: this is as fast as the device allows",
        "write": "writing limits it: use a faster disk, or raise write_threads",
    }
    return remedies[stage]


def total_lines(speeds: "Sequence[KindSpeed | ClusterSpeed]") -> Iterator[str]:
    """Yield the forecast for all kinds, which are made one after another."""
    hours, size = sum(speed.hours for speed in speeds), sum(speed.gigabytes for speed in speeds)
    yield f"all kinds: {as_duration(3600 * hours)}, {as_size(round(1e9 * size))}"
