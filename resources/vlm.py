"""Identity of a vision-language model of this deployment, for summaries and captions.

Settings and prompts are chosen in summarizer.py and captioner.py; the identity is computed in encoders/vlm.py.
"""

from typing import Literal

from imagemill.config import VlmSettings
from imagemill.encoders.recipes import identify_vlm
from imagemill.store.provenance import ModelIdentity
from resources.data_root import DataRootResource


def vlm_identity(
    data_root: DataRootResource, settings: VlmSettings, section: Literal["summarizer", "captioner"], prompt: str
) -> ModelIdentity:
    """Return the identity of a model with its prompt, read from its files; no weights are loaded. Raises ModelUnusable.

    Args:
        data_root: data root of the configuration.
        settings: settings of the model.
        section: section of imagemill.yaml, named in errors.
        prompt: text of the prompt.
    """
    threads, preview_root = data_root.session.config.model_threads, data_root.root().preview_models
    return identify_vlm(section, settings, prompt, threads, preview_root)
