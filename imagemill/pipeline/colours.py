"""Colours of many pictures: counts by profile, for status, shards and `imagemill scan`.

One picture is judged in formats/colour.py.

Spec: docs/spec/stage2.md#colour
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from imagemill.domain.inputs import BAD_PROFILE, HDR_TRANSFER, SRGB, ColorSetting, converts
from imagemill.store.ledger import Ledger
from imagemill.text.units import counted

# Profiles that one line names; the others are counted.
_SHOWN = 5


class ColourCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Colours of a set of pictures.

    Attributes:
        color: how pixels are read.
        profiles: number of pictures by name of their colour description, most frequent first.
        converts: pictures whose pixels conversion to sRGB changes, whether or not `color` asks for it.
        bad_profile: pictures whose description cannot be used.
        hdr: pictures of high dynamic range.
        unknown: pictures whose colours are not known.
    """

    color: ColorSetting = SRGB
    profiles: dict[str, int] = {}
    converts: int = 0
    bad_profile: int = 0
    hdr: int = 0
    unknown: int = 0

    @property
    def line(self) -> str | None:
        """The counts for people; None if no picture has a colour description."""
        ordered = _by_count(self.profiles)
        parts = [f"{count:,} {name}" for name, count in list(ordered.items())[:_SHOWN]]
        if more := sum(list(ordered.values())[_SHOWN:]):
            parts.append(f"{more:,} with other profiles")
        if not parts and not self.unknown:
            return None
        done = "converted to sRGB" if self.color == SRGB else "would be converted by pixels.color: srgb"
        words = ((self.converts, done), (self.bad_profile, "with an unusable profile"), (self.unknown, "not examined"))
        facts = [f"{count:,} {text}" for count, text in words if count]
        return "; ".join(part for part in (", ".join(parts), ", ".join(facts)) if part)


def count_colours(pictures: Iterable[tuple[str | None, str]], color: ColorSetting) -> ColourCounts:
    """Count pictures, given (state, name of the description) of each."""
    return sum_colours(((*colours, number) for colours, number in Counter(pictures).items()), color)


def sum_colours(counts: Iterable[tuple[str | None, str, int]], color: ColorSetting) -> ColourCounts:
    """Add up (state, name of the description, pictures)."""
    profiles: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for state, profile, number in counts:
        if profile:
            profiles[profile] += number
        name = "unknown" if state is None else "converts" if converts(state) else state
        states[name] += number
    return ColourCounts(
        color, _by_count(profiles), states["converts"], states[BAD_PROFILE], states[HDR_TRANSFER], states["unknown"]
    )


def _by_count(profiles: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(profiles.items(), key=lambda item: (-item[1], item[0])))


def colours_of(ledger: Ledger, present: Mapping[str, object], color: ColorSetting) -> tuple[ColourCounts, int]:
    """Return the colours of the present images, and the number of files of which only one of several pictures is used."""
    frames = sum(image_id in present for image_id in ledger.first_frames())
    return sum_colours(ledger.colour_counts(present), color), frames


# Texts about the values of a new data root, by setting.
_ADDED = {
    "formats": ("inputs.formats of a new data root would add", "file"),
    "recursive": ("inputs.recursive: true would read", "sub-folder"),
    "companions": ("inputs.companions: true would leave out masks and control images:", "image"),
    "sidecars": ("captions.sidecars: [txt, caption] would add", "caption file"),
    "metadata": ("captions.metadata: auto would read", "metadata file"),
}


def old_inputs_line(color: ColorSetting, colours: ColourCounts, unread: Mapping[str, int]) -> str | None:
    """Return what the values of a new data root would add to one with those of an earlier release; None for nothing known.

    Args:
        color: recorded setting; `srgb` also if the user has chosen another one.
        colours: of the present images.
        unread: number of inputs that each other setting would add.
    """
    parts = []
    if color != SRGB and (colours.converts or colours.unknown):
        unknown = f" ({counted(colours.unknown, 'image')} not examined)" if colours.unknown else ""
        parts.append(f"pixels.color: srgb would convert {counted(colours.converts, 'image')}{unknown}")
    parts += [f"{_ADDED[name][0]} {counted(count, _ADDED[name][1])}" for name, count in unread.items() if count]
    return "; ".join(parts) or None


def colour_lines(counts: ColourCounts, first_frames: int) -> Iterator[str]:
    """Yield the counts for people, without labels."""
    if line := counts.line:
        yield line
    if first_frames:
        yield f"{counted(first_frames, 'file')} with several pictures: the first, or the primary one, is used"
