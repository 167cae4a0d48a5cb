"""Train on the shards with Accelerate: the plan divides the batches among the processes, `prepare` moves them to the device.

accelerate launch examples/train_with_accelerate.py data/shards --steps 20
"""

import argparse

import torch
from accelerate import Accelerator
from torch.nn import functional

from imagemill.reading import ShardDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shards")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    arguments = parser.parse_args()

    # Before the dataset, which takes its rank from the process group.
    accelerator = Accelerator()
    dataset = ShardDataset(
        arguments.shards, arguments.batch_size, latents="crop", tail="pad", repeat=True, allow_preview=True
    )
    model = torch.nn.Conv2d(16, 16, 3, padding=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, dataset.loader(num_workers=1))
    # `accelerator.save_state` and `load_state` keep the position with the weights.
    accelerator.register_for_checkpointing(dataset)
    for step, batch in zip(range(1, arguments.steps + 1), loader, strict=False):
        latents = batch["vae"].float()
        loss = functional.mse_loss(model(latents + torch.randn_like(latents)), latents)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        print(f"step {step}  {latents.device}  loss {loss.item():.4f}  {' '.join(batch['image_id'])}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
