"""Train on the shards with Lightning: its checkpoints contain the position, so that training resumes within an epoch.

python examples/train_with_lightning.py data/shards --steps 20 --checkpoint last.ckpt
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch.nn import functional

from imagemill.reading import ShardDataset, ShardLoader


class Denoiser(lightning.LightningModule):
    def __init__(self, shards: str, batch_size: int) -> None:
        super().__init__()
        self.shards, self.shard_batch_size = shards, batch_size
        self.layer = torch.nn.Conv2d(16, 16, 3, padding=1)

    def train_dataloader(self) -> ShardLoader:
        # Here, because Lightning calls it in every process when the ranks are known.
        dataset = ShardDataset(
            self.shards, self.shard_batch_size, latents="crop", tail="pad", repeat=True, allow_preview=True
        )
        return dataset.loader(num_workers=1)

    def training_step(self, batch: dict, number: int) -> torch.Tensor:
        latents = batch["vae"].float()
        loss = functional.mse_loss(self.layer(latents + torch.randn_like(latents)), latents)
        print(f"step {self.global_step + 1}  loss {loss.item():.4f}  {' '.join(batch['image_id'])}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shards")
    parser.add_argument("--steps", type=int, default=20, help="last step, over all calls")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--checkpoint", type=Path, default=Path("last.ckpt"))
    arguments = parser.parse_args()

    trainer = lightning.Trainer(
        max_steps=arguments.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    earlier = arguments.checkpoint if arguments.checkpoint.exists() else None
    trainer.fit(Denoiser(arguments.shards, arguments.batch_size), ckpt_path=earlier)
    trainer.save_checkpoint(arguments.checkpoint)


if __name__ == "__main__":
    main()
