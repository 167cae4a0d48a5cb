"""Words and phrases that documentation, messages, and names in this repository do not use: `make lint` runs this check.

    python -m tests.plain_english [PATH…]

Reads docstrings, comments, string literals, and Markdown. Prints `path:line: phrase: text`. Exits with 1 if it found anything.
A phrase is allowed in a line that ends with `# quoted`, and in the files of `QUOTES`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The list itself, and titles of the original specification.
QUOTES = {"tests/plain_english.py", "tests/spec/table.py"}
_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".jinja", ".sh"}
_WORDS = (
    r"told|whoever|whatever|nobody|somebody|anew|aside|whichever|wherein|thereof|of one's own|of its own kind|else's business|"
    r"(?-i:is none|are none|of none)|goes? (?:its|their) way|brought? to the world|"
    r"(?:stands?|lies?|lie|stood|lay) (?:there|beside|beneath|in|for|under|above)|"
    r"leaves the house|knows? (?:of|nothing of)|hears? of|(?:a|the) (?:say|saying) of|lets? in|vouch(?:es)? for|in hands|"
    r"at work on"
)
REJECTED = re.compile(rf"\b(?:{_WORDS})\b", re.IGNORECASE)
# Sentences that begin with a fused relative: "What a run did."
OPENING = re.compile(
    r'^\s*(?:[rf]?"""|#|-|\*)?\s*(?:What|Whatever|Whoever|Who|Where|How) (?!to\b|it works\b|do\b|does\b|is\b.*\?$)[a-z].*[^?]$'
)


def findings(name: str, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, phrase, and line of each rejected phrase of a file."""
    for number, line in enumerate(text.splitlines(), 1):
        found = REJECTED.search(line)
        if not found and name.endswith(".py") and ('"""' in line or line.lstrip().startswith("#")):
            found = OPENING.match(line)
        if found and not line.endswith("# quoted"):
            yield number, found.group(0).strip(), line.strip()


def main(paths: list[str]) -> int:
    """Check the files that git tracks below these paths; return the exit code."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    count = 0
    for name in sorted(set(listed) - QUOTES):
        if (ROOT / name).is_file() and Path(name).suffix in _SUFFIXES:
            for number, phrase, line in findings(name, (ROOT / name).read_text(encoding="utf-8")):
                count += 1
                print(f"{name}:{number}: {phrase[:30]}: {line[:110]}")
    print(f"{count} found")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
