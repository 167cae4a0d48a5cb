"""Settings of encoders, as a run gets them.

Spec: docs/spec/conventions.md#provenance
"""

import pytest

from imagemill.domain.embedding_specs import DINOV3
from imagemill.pipeline.session import open_session
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import ModelIdentity
from resources.data_root import DataRootResource
from resources.encoders import Encoders
from tests.helpers.stage2 import record_identity_of


def dtype_of(root, **overrides):
    with open_session(str(root.path)):
        data_root = DataRootResource(path=str(root.path), config_file="", output_base_dir="")
        encoders = Encoders(data_root=data_root, overrides={DINOV3.kind: overrides} if overrides else {})
        return encoders.settings(DINOV3).dtype


def test_auto_dtype_without_files_is_left_to_the_device(data_root):
    Ledger(data_root.ledger).close()

    assert dtype_of(data_root) == "auto"


@pytest.mark.parametrize("recorded", ["float32", "bfloat16"])
def test_auto_dtype_is_that_of_the_recorded_model(data_root, recorded):
    record_identity_of(
        data_root, ModelIdentity(kind=DINOV3.kind, model="preview", facts={"compute_dtype": recorded}, preview=True)
    )

    assert dtype_of(data_root) == recorded
    assert dtype_of(data_root, dtype="float16") == "float16"
