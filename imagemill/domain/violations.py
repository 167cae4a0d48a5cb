"""Violations of rules for records, and the warnings about texts that apply to all records.

Rules for Stage 2 records are in stage2_records.py, for a preset's records in preset_records.py.
"""

import re

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """A field that violates a rule: the rule's name, the problem, the remedy."""

    field: str
    rule: str
    message: str
    remedy: str


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# `<|coord_1|>`, `<|box_start|>`: a tokenizer may read such text as one of its own tokens.
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]+\|>")
# Rule → requirement and remedy. The text is kept as it is, because these are only warnings.
TEXT_WARNINGS = {
    "control_character": ("text has no control characters", "remove them, if a model reads this text"),
    "special_token": ("text has nothing in the form <|…|>", "write it differently, if a model reads this text"),
}


def is_plain_text(text: str) -> bool:
    """Return True if `text_warnings` certainly has nothing to report; takes a tenth of its time, once per object of a preset."""
    # One character is found faster than two.
    return text.isprintable() and ("<" not in text or "<|" not in text) and bool(text)


def text_warnings(field: str, text: str) -> list[Violation]:
    """Return warnings about a caption or name: control characters, and text that a tokenizer reads as its own tokens."""
    found = []
    if control := _CONTROL.search(text):
        found.append(("control_character", f"contains {control[0]!r}"))
    if token := _SPECIAL_TOKEN.search(text):
        found.append(("special_token", f"contains {token[0][:40]!r}"))
    return [Violation(field, rule, message, TEXT_WARNINGS[rule][1]) for rule, message in found]
