"""Train on the shards with torchdata's StatefulDataLoader: it keeps the position of every worker itself.

python examples/train_with_torchdata.py data/shards --steps 20 --state loader.pt
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional
from torchdata.stateful_dataloader import StatefulDataLoader

from imagemill.reading import ShardDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shards")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--state", type=Path, help="file that keeps the position from one call to the next")
    arguments = parser.parse_args()

    # `repeat`, because the position is in the workers: the dataset of this process does not learn that an epoch ended.
    dataset = ShardDataset(
        arguments.shards, arguments.batch_size, latents="crop", tail="pad", repeat=True, allow_preview=True
    )
    loader = StatefulDataLoader(dataset.pipeline(), batch_size=None, num_workers=arguments.workers)
    if arguments.state and arguments.state.exists():
        loader.load_state_dict(torch.load(arguments.state))
    model = torch.nn.Conv2d(16, 16, 3, padding=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(islice(loader, arguments.steps), start=1):
        latents = batch["vae"].float()
        loss = functional.mse_loss(model(latents + torch.randn_like(latents)), latents)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  epoch {batch['epoch']}  loss {loss.item():.4f}  {' '.join(batch['image_id'])}")
    if arguments.state:
        torch.save(loader.state_dict(), arguments.state)


if __name__ == "__main__":
    main()
