"""Batches of Megatron-Energon, of captions and one tensor. Importing this module imports energon."""

import torch
from megatron import energon

from benchmarks.common.class_sets import MEMBERS

JSON, ARRAY = MEMBERS


@energon.edataclass
class CookedSample(energon.Sample):
    caption: str
    values: torch.Tensor


@energon.stateless
def cook(sample: dict) -> CookedSample:
    return CookedSample(
        **energon.basic_sample_keys(sample),
        caption=sample[JSON]["caption"],
        values=torch.as_tensor(sample[ARRAY]),
    )


class BatchEncoder(energon.TaskEncoder):
    cookers = (energon.Cooker(cook),)

    def encode_sample(self, sample: CookedSample) -> CookedSample:
        return sample

    def batch(self, samples: list[CookedSample]) -> tuple[list[str], torch.Tensor]:
        return [sample.caption for sample in samples], torch.stack([sample.values for sample in samples])
