"""Train a LoRA of a FLUX transformer on shards, with Accelerate: no VAE and no text encoder is loaded.

    accelerate launch examples/train_flux_lora.py data/shards path/to/transformer --steps 1000

The shards are made with `vae_latents: {size: bucket}` and FLUX's text encoders, of which CLIP is listed as `clip_l`
(docs/how-to/text-encoders.md).
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch.nn.functional import mse_loss

from imagemill.reading import ShardDataset

LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]


def add_lora(transformer: FluxTransformer2DModel, rank: int = 16) -> list[torch.nn.Parameter]:
    """Freeze a transformer and add trainable low-rank matrices to its attention; return them."""
    from peft import LoraConfig

    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=LAYERS))
    return [parameter for parameter in transformer.parameters() if parameter.requires_grad]


def predict(transformer: Any, noisy: torch.Tensor, sigmas: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the predicted velocity of noisy latents, (n, 16, H, W)."""
    count, channels, height, width = noisy.shape
    device, states = noisy.device, batch["t5h"].float()
    guided = transformer.config.guidance_embeds
    packed = transformer(
        hidden_states=FluxPipeline._pack_latents(noisy, count, channels, height, width),
        timestep=sigmas,
        guidance=torch.ones(count, device=device) if guided else None,
        pooled_projections=batch["clip_l_pooled"].float(),
        encoder_hidden_states=states,
        txt_ids=torch.zeros(states.shape[1], 3, device=device),
        img_ids=FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, device, noisy.dtype),
    ).sample
    return FluxPipeline._unpack_latents(packed, 8 * height, 8 * width, vae_scale_factor=8)


def train(
    batches: Iterable[Mapping[str, Any]],
    transformer: Any,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    seed: int = 0,
) -> Iterator[float]:
    """Take one step per batch; yield its loss, the mean squared error of the predicted velocity (rectified flow)."""
    chance = torch.Generator().manual_seed(seed)
    for batch in batches:
        latents = batch["vae"]
        noise = torch.randn(latents.shape, generator=chance).to(latents.device)
        sigmas = torch.randn(len(latents), generator=chance).sigmoid().to(latents.device)
        mixed = sigmas.view(-1, 1, 1, 1)
        velocity = predict(transformer, (1 - mixed) * latents + mixed * noise, sigmas, batch)
        loss = mse_loss(velocity, noise - latents)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    """Train for some steps and save the LoRA."""
    from accelerate import Accelerator
    from peft import get_peft_model_state_dict

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards")
    parser.add_argument("transformer", help="hub id or folder of a FluxTransformer2DModel")
    parser.add_argument(
        "--subfolder", help="its folder in the repository: `transformer` for black-forest-labs/FLUX.1-dev"
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output", default="lora")
    parser.add_argument("--allow-preview", action="store_true", help="train on random states, to try the pipeline out")
    given = parser.parse_args()

    accelerator = Accelerator()  # before the dataset, which takes its rank from the process group
    dataset = ShardDataset(
        given.shards, given.batch_size, members=("vae", "t5h", "clip_l_pooled"), normalized=True, tail="pad",
        repeat=True, allow_preview=given.allow_preview,
    )  # fmt: skip
    transformer = FluxTransformer2DModel.from_pretrained(given.transformer, subfolder=given.subfolder).train()
    optimizer = torch.optim.AdamW(add_lora(transformer, given.rank), lr=1e-4)
    prepared, optimizer, loader = accelerator.prepare(transformer, optimizer, dataset.loader(num_workers=1))
    losses = train(loader, prepared, optimizer, accelerator.backward)
    for step, loss in enumerate(islice(losses, given.steps), start=1):
        accelerator.print(f"step {step}: loss {loss:.4f}")
    if accelerator.is_main_process:
        layers = get_peft_model_state_dict(accelerator.unwrap_model(prepared))
        FluxPipeline.save_lora_weights(given.output, transformer_lora_layers=layers)
    accelerator.end_training()


if __name__ == "__main__":
    main()
