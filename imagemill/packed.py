"""Mappings of millions of small values, packed in little memory.

The ids of images are keys of several of them. They are interned (`sys.intern`), so that each id is in memory once.
"""

from abc import abstractmethod
from collections.abc import Iterator, KeysView, Mapping
from typing import Any, Generic, TypeVar

P = TypeVar("P")
V = TypeVar("V")


class PackedMapping(Mapping[str, V], Generic[P, V]):
    """A mapping whose values are made at each access, from a dict of smaller ones."""

    _packed: dict[str, P]

    @abstractmethod
    def _unpacked(self, key: str, packed: P) -> V:
        """Return the value of a key."""

    def __getitem__(self, key: str) -> V:
        return self._unpacked(key, self._packed[key])

    def get(self, key: str, default: Any = None, /) -> Any:
        """Return the value of a key, or the default."""
        # That of Mapping takes several times as long for a key that is missing.
        packed = self._packed.get(key)
        return default if packed is None else self._unpacked(key, packed)

    def keys(self) -> KeysView[str]:
        """Return a view of the keys."""
        return self._packed.keys()

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)
