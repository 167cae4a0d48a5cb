"""Fine-tune a Stable Diffusion 3 transformer on shards: no VAE and none of its three text encoders is loaded.

    python examples/train_sd3.py data/shards path/to/transformer --steps 1000

The shards are made with `vae_latents: {size: bucket}` and the model's own text encoders, of which CLIP is listed as `clip_l` and
`clip_g` (docs/how-to/text-encoders.md).
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch.nn.functional import mse_loss, pad

from imagemill.reading import ShardDataset

MEMBERS = ("vae", "t5h", "clip_l", "clip_l_pooled", "clip_g", "clip_g_pooled")


def text_states(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states of all text encoders (n, 77 + tokens, width of T5), and the pooled state (n, width of both CLIPs)."""
    long = batch["t5h"].float()
    short = torch.cat([batch["clip_l"].float(), batch["clip_g"].float()], dim=2)
    short = pad(short, (0, long.shape[2] - short.shape[2]))
    pooled = torch.cat([batch["clip_l_pooled"].float(), batch["clip_g_pooled"].float()], dim=1)
    return torch.cat([short, long], dim=1), pooled


def train(batches: Iterable[Mapping[str, Any]], transformer: SD3Transformer2DModel, seed: int = 0) -> Iterator[float]:
    """Take one step per batch; yield its loss, the mean squared error of the predicted velocity (rectified flow)."""
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)
    chance = torch.Generator().manual_seed(seed)
    for batch in batches:
        latents = batch["vae"]
        noise = torch.randn(latents.shape, generator=chance)
        sigmas = torch.randn(len(latents), generator=chance).sigmoid()
        mixed = sigmas.view(-1, 1, 1, 1)
        states, pooled = text_states(batch)
        velocity = transformer(
            hidden_states=(1 - mixed) * latents + mixed * noise,
            timestep=1000 * sigmas,
            encoder_hidden_states=states,
            pooled_projections=pooled,
        ).sample
        loss = mse_loss(velocity, noise - latents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Train for some steps and save the transformer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("transformer", help="hub id or folder of an SD3Transformer2DModel")
    parser.add_argument("--subfolder", help="its folder in the repository")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--output", default="trained")
    parser.add_argument("--allow-preview", action="store_true", help="train on random states, to try the pipeline out")
    given = parser.parse_args()

    transformer = SD3Transformer2DModel.from_pretrained(given.transformer, subfolder=given.subfolder).train()
    dataset = ShardDataset(
        given.shards, given.batch_size, members=MEMBERS, normalized=True, tail="drop", repeat=True,
        allow_preview=given.allow_preview,
    )  # fmt: skip
    for step, loss in enumerate(islice(train(dataset, transformer), given.steps), start=1):
        print(f"step {step}: loss {loss:.4f}")
    transformer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
