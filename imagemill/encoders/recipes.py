"""How a worker makes its summarizer: picklable, and cheap to send, because torch is imported only where it is made.

    partial(make_class, "module:Mine")                     a class of one's own
    partial(make_vlm, settings, prompts, threads, root)    the vision-language model, one per process

Belongs here: making a summarizer in whatever process will use it.
Belongs elsewhere: which one a deployment uses (resources/summarizer.py), the model (encoders/vlm.py).
Source: CONTRACTS section 5, "The summarizer is replaceable".
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from imagemill.config import VlmSettings
from imagemill.encoders.prompts import Prompts
from imagemill.errors import WrongUsage
from imagemill.summarizer import Summarizer

_HINT = "give MODULE:CLASS, the class having summarize(images, mission) -> list[str], its module on PYTHONPATH"


def make_vlm(settings: VlmSettings, prompts: Prompts, threads: int, preview_root: Path) -> Summarizer:
    """The vision-language model as a summarizer; ranks of one process share its weights. Raises ModelUnusable."""
    from imagemill.encoders.vlm import SUMMARIZER, VlmSummarizer, held

    return VlmSummarizer(held(settings, SUMMARIZER, threads, preview_root), prompts)


def make_class(named: str) -> Summarizer:
    """A summarizer by the name of its class, made without arguments."""
    return import_class(named)()


def import_class(named: str) -> type[Any]:
    """The class that `MODULE:CLASS` names; modules of the working directory are found too.

    Raises:
        WrongUsage: no such module or class, or one without `summarize`.
    """
    module, _, name = named.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise WrongUsage(f"no summarizer {named!r}: {error}", do=_HINT) from error
    if not isinstance(found, type) or not callable(getattr(found, "summarize", None)):
        raise WrongUsage(f"{named!r} is no class of a summarizer", do=_HINT)
    return found
