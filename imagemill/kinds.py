"""Embedding kinds of a data root: those that `kinds` in imagemill.yaml lists, shipped or from an installed package.

    kinds: [vae_latents, t5_hidden, patch_tokens]

A package offers a kind by an entry point whose object is an `EmbeddingSpec`:

    [project.entry-points."imagemill.kinds"]
    patch_tokens = "my_package.kinds:PATCH_TOKENS"

The declaration must not import torch: only its encoder does, which is imported when a file has to be made.
Spec: docs/spec/stage2.md#kinds
"""

import functools
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from imagemill.domain.embedding_specs import EmbeddingSpec, check_specs, default_specs
from imagemill.errors import UnknownKind

GROUP = "imagemill.kinds"


def chosen_specs(names: Iterable[str] | None, *, where: Path) -> tuple[EmbeddingSpec, ...]:
    """Return the kinds of a configuration; without a list, the default ones.

    Args:
        names: as configured, in the order of members in a shard.
        where: the configuration file, for messages.

    Raises:
        UnknownKind: if no installed package has a kind of this name, its package cannot be imported, or two kinds use one name.
    """
    if names is None:
        return default_specs()
    specs = [_spec(name, where) for name in dict.fromkeys(names)]
    if not specs:
        raise UnknownKind("kinds is empty", where=where, do="list at least one kind, or remove the setting")
    try:
        check_specs(specs)
    except ValueError as error:
        raise UnknownKind(
            str(error), where=where, do="remove one of the two kinds, or rename it in its package"
        ) from error
    return tuple(specs)


def _spec(name: str, where: Path) -> EmbeddingSpec:
    shipped = {spec.kind: spec for spec in default_specs()}
    if name in shipped:
        return shipped[name]
    offered = _offered()
    if name not in offered:
        raise UnknownKind(
            f"unknown embedding kind {name!r} in kinds",
            where=where,
            why=f"no installed package has an entry point of this name in the group {GROUP}",
            do=f"install its package, or choose from {', '.join(sorted({*shipped, *offered}))}",
        )
    point = offered[name]
    package = point.dist.name if point.dist else point.value
    try:
        spec = point.load()
    except Exception as error:  # any error of the other package
        raise UnknownKind(
            f"embedding kind {name!r} cannot be imported from {package}: {type(error).__name__}: {error}",
            where=where,
            do=f"repair or reinstall {package}, or remove the kind from kinds",
        ) from error
    if not isinstance(spec, EmbeddingSpec) or spec.kind != name:
        found = f"a kind named {spec.kind!r}" if isinstance(spec, EmbeddingSpec) else f"a {type(spec).__name__}"
        raise UnknownKind(
            f"embedding kind {name!r}: its entry point is {found}, expected an EmbeddingSpec of this name",
            where=where,
            do=f"correct the entry point in {package}",
        )
    return spec


@functools.cache
def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
