"""Who a vision-language model of this deployment is, whatever it is asked for: summaries or captions.

Belongs here: its identity, with the prompt it gets.
Belongs elsewhere: which settings and which prompt (summarizer.py, captioner.py), what an identity holds (encoders/vlm.py).
"""

import hashlib
from typing import Literal

from imagemill.config import VlmSettings
from imagemill.store.provenance import ModelIdentity
from resources.data_root import DataRootResource


def vlm_identity(
    data_root: DataRootResource, settings: VlmSettings, section: Literal["summarizer", "captioner"], prompt: str
) -> ModelIdentity:
    """The model with its prompt, read from its files; no weights are loaded. Raises ModelUnusable.

    Args:
        section: of imagemill.yaml, which errors name.
    """
    from imagemill.encoders.vlm import CAPTIONER, SUMMARIZER, VisionLanguageModel

    return VisionLanguageModel.identify(
        settings,
        spec=SUMMARIZER if section == "summarizer" else CAPTIONER,
        threads=data_root.session.config.model_threads,
        preview_root=data_root.root().preview_models,
        prompt_sha256=hashlib.sha256(prompt.encode()).hexdigest(),
    )
