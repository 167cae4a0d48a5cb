"""Counts, sizes, durations and rates as text for people.

The figures that a command prints are chosen in dagster_project/summary.py.
"""

import math


def counted(count: int, noun: str) -> str:
    """Return the count with its noun in the singular or plural: `1 image`, `1,200 images`."""
    return f"{count:,} {plural(count, noun)}"


def plural(count: int, noun: str) -> str:
    """Return the noun in the singular or plural, without the count; of a phrase, the last word changes."""
    if count == 1:
        return noun
    *rest, last = noun.split(" ")
    if last.endswith("y") and last[-2:-1] not in "aeiou":
        last = f"{last[:-1]}ies"
    elif last.endswith(("s", "x", "ch", "sh")):
        last = f"{last}es"
    else:
        last = f"{last}s"
    return " ".join([*rest, last])


def as_size(size: int) -> str:
    """Return a size in bytes with a decimal unit (powers of 1,000) and one digit after the point."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def as_duration(seconds: float) -> str:
    """Return seconds in the two largest units that apply: `8 s`, `2 min 05 s`, `3 h 20 min`, `2 d 04 h`."""
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, whole = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {whole:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02} h"


def as_rate(amount: float, seconds: float, unit: str) -> str:
    """Return a rate that never rounds to zero: `12.3 images/s`, or `4.1 s per image` if slower than one per second."""
    if seconds <= 0 or amount <= 0:
        return f"0 {plural(0, unit)}/s"
    per_second = amount / seconds
    if per_second >= 1:
        return (
            f"{per_second:,.0f} {plural(2, unit)}/s" if per_second >= 100 else f"{per_second:.1f} {plural(2, unit)}/s"
        )
    return f"{as_duration(1 / per_second)} per {unit}" if per_second < 0.1 else f"{1 / per_second:.1f} s per {unit}"
