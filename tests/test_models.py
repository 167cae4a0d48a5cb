"""Identity of summarizer classes. Spec: docs/spec/stage-a.md#reuse-of-summaries"""

from imagemill.models import class_identity


class Plain:
    pass


class Stating:
    identity = "2026-01"


def test_class_is_known_by_its_place_and_what_it_states():
    assert f"{__name__}:Plain" == class_identity(Plain)
    assert f"{__name__}:Stating:2026-01" == class_identity(Stating)
