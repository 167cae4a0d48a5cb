"""Requested work of a command, by pass name: dinov3, vae, t5, migrate, all.

Spec: docs/spec/stage2.md#pass-names
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imagemill.domain.embedding_specs import EmbeddingSpec, embedding_specs
from imagemill.pipeline.stage2.plan import Job


def pass_names() -> list[str]:
    """Return all pass names."""
    return [*(spec.pass_name for spec in embedding_specs()), "migrate", "all"]


@dataclass(frozen=True, slots=True)
class Passes:
    """Requested work of a command: kinds to embed, and whether Stage 1 records become version 2."""

    specs: tuple[EmbeddingSpec, ...]
    migrate: bool

    @classmethod
    def named(cls, names: Sequence[str]) -> "Passes":
        """Return the passes of these names; all of them if the list is empty or contains `all`."""
        if not names or "all" in names:
            return cls(embedding_specs(), migrate=True)
        chosen = tuple(spec for spec in embedding_specs() if spec.pass_name in names)
        return cls(chosen, migrate="migrate" in names)

    def kinds_to_run(self) -> tuple[EmbeddingSpec, ...]:
        """Return the kinds to run; migration alone extracts vectors from records: DINOv3's asset without its model."""
        return self.specs or tuple(spec for spec in embedding_specs() if spec.inline_field)

    def select(self, jobs: Mapping[EmbeddingSpec, Sequence[Job]]) -> dict[EmbeddingSpec, Sequence[Job]]:
        """Return the jobs that belong to these passes."""
        if self.specs:
            return dict(jobs)
        return {spec: [job for job in of_kind if job.inline] for spec, of_kind in jobs.items()}
