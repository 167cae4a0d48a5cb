"""Train on the shards: one bucket per batch, with latents and masked text states read directly from the tars.

    python examples/train_from_shards.py data/shards --steps 20 --batch-size 4 --workers 2 --state position.json

The model is a toy, which shows only that the loss falls; the data loading is the one for a real model. Buckets are drawn in
proportion to their remaining samples, latents are cut to the bucket's size, worker processes read ahead, torchrun splits the
samples among the ranks, and training resumes at the position where the last call stopped (a real script stores the position
in its checkpoint, beside the model).
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from imagemill.errors import ImagemillError
from imagemill.reading import ShardDataset

LATENT_CHANNELS = 16
TEXT_WIDTH = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shards", type=Path, help="folder of bucket_<bucket>/, or one such bucket folder")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0, help="processes that read ahead")
    parser.add_argument("--state", type=Path, help="file that keeps the position from one call to the next")
    arguments = parser.parse_args()
    try:
        train(arguments)
    except ImagemillError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def train(arguments: argparse.Namespace) -> None:
    dataset = ShardDataset(
        arguments.shards,
        arguments.batch_size,
        latents="crop",
        crop="random",
        normalized=True,
        tail="pad",  # equally many full batches for every rank
        repeat=True,
        allow_preview=True,  # a toy may train on the output of preview models; remove this in a real script
    )
    if arguments.state and arguments.state.exists():
        dataset.load_state_dict(json.loads(arguments.state.read_text("utf-8")))
    torch.manual_seed(0)
    model = ToyDenoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = islice(dataset.loader(num_workers=arguments.workers), arguments.steps)
    for step, batch in enumerate(batches, start=1):
        latents, text, mask = batch["vae"], batch["t5h"].float(), batch["t5m"].bool()
        loss = denoising_loss(model, latents, text, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  bucket_{batch['bucket']}  latents {tuple(latents.shape)}  loss {loss.item():.4f}")
    if arguments.state:
        arguments.state.write_text(json.dumps(dataset.state_dict()), "utf-8")


# ---- model


class ToyDenoiser(nn.Module):
    """Three convolutions, the middle one conditioned on the text; the noise level is an additional channel."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Conv2d(LATENT_CHANNELS + 1, width, 3, padding=1)
        self.text = nn.Linear(TEXT_WIDTH, 2 * width)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.leave = nn.Conv2d(width, LATENT_CHANNELS, 3, padding=1)

    def forward(self, noisy: torch.Tensor, level: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(batch, 16, h, w), (batch, 1, 1, 1), (batch, 77, 1024), (batch, 77) → (batch, 16, h, w)."""
        # The mean over words alone: positions with mask 0 are padding.
        words = (text * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        gain, offset = self.text(words)[..., None, None].chunk(2, dim=1)
        hidden = functional.silu(self.enter(torch.cat([noisy, level.expand_as(noisy[:, :1])], dim=1)))
        hidden = functional.silu(self.middle(hidden * (1 + gain) + offset))
        return self.leave(hidden)


def denoising_loss(model: nn.Module, latents: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rectified flow: predict the straight path from latent to noise at a random point of it."""
    noise, level = torch.randn_like(latents), torch.rand(len(latents), 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    return functional.mse_loss(model(noisy, level, text, mask), noise - latents)


if __name__ == "__main__":
    sys.exit(main())
