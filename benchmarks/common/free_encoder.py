"""The encoder without cost of encoders.py."""

from imagemill.models import Prepared
from tests.helpers.stubs import StubEncoder


class FreeEncoder(StubEncoder):
    """A stub that ignores the pixels: every array of a kind holds the same value."""

    def prepare(self, item):
        if isinstance(item, str):
            return super().prepare(item)
        shape = self.spec.shape(*item.shape[:2])
        return Prepared((1, shape), shape, pixels=item.shape[0] * item.shape[1])
