"""Named parts of the inputs of a data root: of the viewer, of `imagemill status --json`, and of `limits` in imagemill.yaml.

Which inputs they contain is defined in store/ledger/overview.py.
"""

from typing import NamedTuple

from imagemill.domain.buckets import LEAST_COVERAGE, MOST_ENLARGEMENT


class Filter(NamedTuple):
    """A part of the inputs. `title`: for people; `share`: whether it is a part of the images of `approved/`."""

    title: str
    share: bool = True


FILTERS = {
    "all": Filter("all inputs", share=False),
    "seen": Filter("images in approved/"),
    "in_shards": Filter("in shards", share=False),
    "up_to_date": Filter("up to date"),
    "refused": Filter("refused"),
    "failed": Filter("failed"),
    "waiting": Filter("waiting"),
    "withdrawn": Filter("withdrawn", share=False),
    "marked": Filter("marked", share=False),
    "problems": Filter("with a problem", share=False),
    "no_caption": Filter("without a caption"),
    "caption_cut": Filter("caption cut by the text encoder"),
    "enlarged": Filter(f"enlarged more than {MOST_ENLARGEMENT} times"),
    "low_coverage": Filter(f"less than {LEAST_COVERAGE:.0%} of the picture used"),
    "near_duplicates": Filter("near duplicates"),
}
SHARES = tuple(name for name, part in FILTERS.items() if part.share)
