"""Embedding kinds of a data root: those that `kinds` in imagemill.yaml lists, shipped or from an installed package.

    kinds: [vae_latents, t5_hidden, patch_tokens, {clip_l: clip_text}, {clip_g: clip_text}]

An entry `{name: kind}` lists a kind under another name, which is also that of its pass, folder and members.

A package offers a kind by an entry point whose object is an `EmbeddingSpec`:

    [project.entry-points."imagemill.kinds"]
    patch_tokens = "my_package.kinds:PATCH_TOKENS"

The declaration must not import torch: only its encoder does, which is imported when a file has to be made.
Spec: docs/spec/stage2.md#kinds
"""

import functools
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from imagemill.domain.embedding_specs import EmbeddingSpec, check_specs, default_specs, shipped_specs
from imagemill.errors import UnknownKind

GROUP = "imagemill.kinds"


KindEntry = str | dict[str, str]
"""A kind, or a kind under another name."""


def chosen_specs(entries: Iterable[KindEntry] | None, *, where: Path) -> tuple[EmbeddingSpec, ...]:
    """Return the kinds of a configuration; without a list, the default ones.

    Args:
        entries: as configured, in the order of members in a shard.
        where: the configuration file, for messages.

    Raises:
        UnknownKind: if no installed package has a kind of this name, its package cannot be imported, or two kinds use one name.
    """
    if entries is None:
        return default_specs()
    named = [_named(entry, where) for entry in entries]
    if twice := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise UnknownKind(
            f"kinds lists {twice[0]!r} twice",
            where=where,
            do="remove one of the two, or list it under another name: {clip_g: clip_text}",
        )
    specs = [_spec(kind, where) if name == kind else _spec(kind, where).named(name) for name, kind in named]
    if not specs:
        raise UnknownKind("kinds is empty", where=where, do="list at least one kind, or remove the setting")
    try:
        check_specs(specs)
    except ValueError as error:
        raise UnknownKind(
            str(error), where=where, do="remove one of the two kinds, or rename it in its package"
        ) from error
    return tuple(specs)


def spec_named(kind: str, declared_as: str | None = None) -> EmbeddingSpec:
    """Return a kind of this name; `declared_as`: its name in its package, if a data root gives it another. Raises UnknownKind."""
    spec = _spec(declared_as or kind, Path("kinds"))
    return spec.named(kind) if declared_as else spec


def _named(entry: KindEntry, where: Path) -> tuple[str, str]:
    """Return the name of a kind in this data root, and the kind."""
    if isinstance(entry, str):
        return entry, entry
    if len(entry) != 1:
        raise UnknownKind(
            f"kinds has an entry of {len(entry)} names", where=where, do="write one per entry: {clip_l: clip_text}"
        )
    return next(iter(entry.items()))


def _spec(name: str, where: Path) -> EmbeddingSpec:
    shipped = {spec.kind: spec for spec in shipped_specs()}
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
