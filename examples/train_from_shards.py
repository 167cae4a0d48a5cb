"""Train on the shards: one bucket per batch, latents and masked text states straight out of the tars.

    python examples/train_from_shards.py data/shards --steps 20 --batch-size 4

The model is a toy (it shows that the loss falls, and nothing else); the way the data goes is the one for a real model. The
shards are plain WebDataset tars: nothing of imagemill is imported here.

One sample holds
    json        the record: image_id, caption, size, bucket, …
    vae.npy     float16 (16, H // 8, W // 8): latent of the whole image, neither scaled nor shifted
    t5h.npy     float16 (77, 1024): hidden states of the caption     t5m.npy  uint8 (77,): 1 where there is text
    dinov3.npy  float32 (1024,): for search and curation, not used here
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import webdataset
from torch import nn
from torch.nn import functional

LATENT_CHANNELS = 16
TEXT_WIDTH = 1024

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shards", type=Path, help="folder of bucket_<bucket>/, or one such bucket folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    arguments = parser.parse_args()

    buckets = find_buckets(arguments.shards)
    if not buckets:
        print(f"no shards in {arguments.shards}; do: imagemill run --data-root …", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    model = ToyDenoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # One bucket after the other: a batch never mixes aspect ratios.
    loaders = itertools.cycle([(folder.name, batches(folder, arguments.batch_size)) for folder in buckets])
    for step, (name, loader) in enumerate(itertools.islice(loaders, arguments.steps), start=1):
        latents, text, mask = next(loader)
        loss = denoising_loss(model, latents, text, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  {name}  latents {tuple(latents.shape)}  loss {loss.item():.4f}")
    return 0


# ---- data


def find_buckets(folder: Path) -> list[Path]:
    """Bucket folders with shards in them, in name order."""
    return sorted({tar.parent for pattern in ("shard-*.tar", "bucket_*/shard-*.tar") for tar in folder.glob(pattern)})


def batches(bucket: Path, batch_size: int) -> Iterator[Batch]:
    """Batches of one bucket, for ever."""
    scale, shift = latent_factors(bucket)
    tars = [str(tar) for tar in sorted(bucket.glob("shard-*.tar"))]
    samples = (
        # A buffer of samples is shuffled; where there are many shards, `shardshuffle` mixes those too.
        webdataset.WebDataset(tars, shardshuffle=False, empty_check=False)
        .shuffle(1000)
        .decode()
        .to_tuple("vae.npy", "t5h.npy", "t5m.npy", "json")
        .batched(batch_size, collation_fn=None)
    )
    while True:
        for batch in samples:
            latents, text, mask = collate(batch)
            yield (latents - shift) * scale, text, mask


def collate(batch: list) -> Batch:
    """Stack samples. Images keep their own size, so latents are cropped, around the middle, to the smallest of the batch."""
    latents, text, masks, _records = zip(*batch, strict=True)
    height = min(latent.shape[1] for latent in latents)
    width = min(latent.shape[2] for latent in latents)
    return (
        torch.stack([centre_crop(torch.from_numpy(latent).float(), height, width) for latent in latents]),
        torch.stack([torch.from_numpy(hidden).float() for hidden in text]),
        torch.stack([torch.from_numpy(mask) for mask in masks]).bool(),
    )


def centre_crop(latent: torch.Tensor, height: int, width: int) -> torch.Tensor:
    top, left = (latent.shape[1] - height) // 2, (latent.shape[2] - width) // 2
    return latent[:, top : top + height, left : left + width]


def latent_factors(bucket: Path) -> tuple[float, float]:
    """(scaling factor, shift factor) of the VAE that made the latents, out of the manifest beside the shards."""
    provenance = json.loads((bucket / "manifest.json").read_text("utf-8"))["provenance"]["vae_latents"]
    facts = provenance["facts"] or {}
    return facts.get("scaling_factor") or 1.0, facts.get("shift_factor") or 0.0


# ---- model


class ToyDenoiser(nn.Module):
    """Three convolutions whose middle the text moves; the noise level is one more channel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv2d(LATENT_CHANNELS + 1, width, 3, padding=1)
        self.text = nn.Linear(TEXT_WIDTH, 2 * width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, LATENT_CHANNELS, 3, padding=1)

    def forward(self, noisy: torch.Tensor, level: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(batch, 16, h, w), (batch, 1, 1, 1), (batch, 77, 1024), (batch, 77) → (batch, 16, h, w)."""
        # The mean over words alone: where the mask is 0 there is nothing to read.
        words = (text * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        gain, offset = self.text(words)[..., None, None].chunk(2, dim=1)
        hidden = functional.silu(self.enter(torch.cat([noisy, level.expand_as(noisy[:, :1])], dim=1)))
        hidden = functional.silu(self.middle(hidden * (1 + gain) + offset))
        return self.leave(hidden)


def denoising_loss(model: nn.Module, latents: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rectified flow: predict the straight way from latent to noise at a random point of it."""
    noise, level = torch.randn_like(latents), torch.rand(len(latents), 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    return functional.mse_loss(model(noisy, level, text, mask), noise - latents)


if __name__ == "__main__":
    sys.exit(main())
