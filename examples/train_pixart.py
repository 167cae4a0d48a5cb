"""Fine-tune a PixArt transformer on shards: latents and text states come from the tars, so no VAE and no text encoder is loaded.

    python examples/train_pixart.py data/shards path/to/transformer --steps 1000

The shards are made with `vae_latents: {size: bucket}` and the model's own text encoder (docs/how-to/text-encoders.md).
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from diffusers import DDPMScheduler, PixArtTransformer2DModel
from torch.nn.functional import mse_loss

from imagemill.reading import ShardDataset


def train(
    batches: Iterable[Mapping[str, Any]], transformer: PixArtTransformer2DModel, seed: int = 0
) -> Iterator[float]:
    """Take one step per batch; yield its loss, the mean squared error of the predicted noise."""
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-4)
    chance = torch.Generator().manual_seed(seed)
    for batch in batches:
        latents = batch["vae"]
        noise = torch.randn(latents.shape, generator=chance)
        times = torch.randint(scheduler.config["num_train_timesteps"], (len(latents),), generator=chance)
        predicted = transformer(
            scheduler.add_noise(latents, noise, times),
            encoder_hidden_states=batch["t5h"].float(),
            encoder_attention_mask=batch["t5m"].float(),
            timestep=times,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        # A PixArt model also predicts the variance, in the second half of its channels.
        loss = mse_loss(predicted[:, : latents.shape[1]], noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Train for some steps and save the transformer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("transformer", help="hub id or folder of a PixArtTransformer2DModel")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--output", default="trained")
    parser.add_argument("--allow-preview", action="store_true", help="train on random states, to try the pipeline out")
    given = parser.parse_args()

    transformer = PixArtTransformer2DModel.from_pretrained(given.transformer).train()
    # `normalized` applies the VAE's scaling and shift; batches without samples exist only with several ranks.
    dataset = ShardDataset(
        given.shards, given.batch_size, members=("vae", "t5h", "t5m"), normalized=True, tail="drop",
        allow_preview=given.allow_preview,
    )  # fmt: skip
    batches = (batch for _ in iter(int, 1) for batch in dataset)  # every epoch has its own order
    for step, loss in enumerate(islice(train(batches, transformer), given.steps), start=1):
        print(f"step {step}: loss {loss:.4f}")
    transformer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
