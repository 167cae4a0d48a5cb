"""Speed of the embedding stream relative to the bare full-size model, and of a plain loop.

    bare      the model alone: the inputs of the stream's calls, kept from an earlier round, already on the device
    stream    images decoded, prepared, encoded, written, flushed, recorded and renamed, as in a real pass
    plain     captions four by four, each padded to 77 tokens, encoded and saved one after the other (T5 only)
    host      the stream around a model that costs nothing (not on the CPU, whose cores do both)

The models have the real classes and sizes and random weights. All ways run in one process, interleaved. If other programs
use the cores, all ways are equally slow, so goals are judged by the fastest round of each; the median ratio to bare is also
printed.

Goals: on the CPU at least 0.95 of bare; on a GPU the VAE at least 0.90 of bare, DINOv3 and T5 at least 0.85 of the slower of
bare and host. T5 at least twice as fast as the plain loop.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.common.full_size import write_model
from benchmarks.common.inputs import mixed_captions, noise_photos, scratch
from imagemill.config import Config
from imagemill.domain.embedding_specs import DINOV3, T5, T5_TOKENS, VAE, EmbeddingSpec
from imagemill.domain.encoder_settings import EncoderSettings
from imagemill.domain.layout import DataRoot
from imagemill.encoders.loading import library
from imagemill.pipeline.batch_size import FIRST
from imagemill.pipeline.stage2.embed import EmbedWorker
from imagemill.pipeline.stage2.image_metadata import complete_facts
from imagemill.pipeline.stage2.inventory import Inventory
from imagemill.pipeline.stage2.plan import plan_for
from imagemill.store.ledger import Ledger
from imagemill.store.provenance import read_recorded_models
from tests.helpers.passes import run_pass

CPU_GOAL, VAE_GOAL, GPU_GOAL, PLAIN_GOAL = 0.95, 0.90, 0.85, 2.0
PLAIN_BATCH = 4


def main() -> int:
    arguments = _arguments()
    kinds = [spec for spec in (DINOV3, VAE, T5) if not arguments.kind or spec.kind in arguments.kind]
    with scratch() as folder:
        _inputs(folder, arguments)
        print(
            f"{arguments.device}, {arguments.dtype}, {arguments.threads} threads; items/s, fastest of {arguments.rounds} rounds"
        )
        print(
            f"{'':<12}{'bare':>9}{'stream':>9}{'plain':>9}{'host':>9}{'of bare':>10}{'median':>10}{'of plain':>10}{'TFLOP/s':>10}"
        )
        missed = [spec.kind for spec in kinds if not _measure(spec, folder, arguments)]
    print(f"goals missed: {', '.join(missed)}" if missed else "every goal is met")
    return 1 if missed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kind", action="append", help="only this embedding kind; may repeat")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--dtype", default="bfloat16", help="of weights and arithmetic")
    parser.add_argument("--threads", type=int, default=Config().model_threads, help="of the model's arithmetic")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=FIRST)
    parser.add_argument("--images", type=int, default=9, help="photographs of 1 MP for DINOv3")
    parser.add_argument("--latents", type=int, default=3, help="images for the VAE")
    parser.add_argument("--side", type=int, default=256, help="their height and width in pixels")
    parser.add_argument("--captions", type=Path, help="text file, one caption a line")
    parser.add_argument("--caption-count", type=int, default=65)
    parser.add_argument("--peak-tflops", type=float, help="of the device in that dtype: shows the utilisation")
    return parser.parse_args()


# ---- inputs


def _inputs(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a data root per kind."""
    noise_photos(folder / DINOV3.kind / "approved", arguments.images, width=1152, height=896, smooth=8)
    noise_photos(folder / VAE.kind / "approved", arguments.latents, width=arguments.side, height=arguments.side)
    texts = _captions(arguments)
    noise_photos(folder / T5.kind / "approved", len(texts), width=64, height=64)
    for number, text in enumerate(texts):
        (folder / T5.kind / "approved" / f"photo{number:06d}.txt").write_text(text, "utf-8")


def _captions(arguments: argparse.Namespace) -> list[str]:
    if arguments.captions:
        return arguments.captions.read_text("utf-8").split("\n")[: arguments.caption_count]
    return mixed_captions(arguments.caption_count)


# ---- the ways


@dataclass
class Kept:
    """One loaded encoder, which every round's worker reuses, and the inputs of its model calls."""

    encoder: Any
    inputs: list[tuple[tuple, dict[str, Any]]] = field(default_factory=list)

    @property
    def module(self) -> Any:
        model = self.encoder._model
        return getattr(model, "encoder", model) if self.encoder.identity.kind == VAE.kind else model

    @contextmanager
    def noting_inputs(self) -> Iterator[None]:
        hook = self.module.register_forward_pre_hook(
            lambda module, args, kwargs: self.inputs.append((args, kwargs)), with_kwargs=True
        )
        yield
        hook.remove()

    @torch.inference_mode()
    def bare(self) -> float:
        began = time.perf_counter()
        for args, kwargs in self.inputs:
            self.module(*args, **kwargs)
        _wait()
        return time.perf_counter() - began


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _with_encoder(spec: EmbeddingSpec, encoder: Any) -> EmbeddingSpec:
    """Return the kind with an encoder that is already loaded and is never closed."""

    class Loaded:
        identify = staticmethod(lambda settings, **given: encoder.identity)
        load = staticmethod(lambda settings, **given: encoder)

    class Spec(EmbeddingSpec):
        def encoder_class(self):
            return Loaded

    return Spec(**{one.name: getattr(spec, one.name) for one in fields(spec)})


def _stream(spec: EmbeddingSpec, folder: Path, settings: EncoderSettings) -> float:
    """Return the seconds of one kind's pass, from its jobs to its files. For captions, the images have been opened before."""
    config = Config()
    with TemporaryDirectory(dir=folder) as name, Ledger(Path(name) / "ledger.sqlite") as ledger:
        root = DataRoot(Path(name))
        root.approved.symlink_to(folder / "approved")
        inventory = Inventory(root)
        inventory.survey(ledger)
        if spec.source == "caption":
            complete_facts(root.approved, inventory.scan, ledger)
        jobs = plan_for(spec, list(inventory.scan.sources), inventory, ledger).jobs
        worker = EmbedWorker(
            spec=spec,
            approved=root.approved,
            store=inventory.store(spec),
            recorded_models=read_recorded_models(ledger, spec.kind),
            preview_root=root.preview_models,
            settings=settings,
            threads=config.model_threads,
            decode_threads=config.decoders,
            write_threads=config.write_threads,
            decode_ahead_pixels=config.decode_ahead_pixels,
        )
        worker.close = lambda: None
        began = time.perf_counter()
        counts = run_pass(worker, jobs, ledger)
        took = time.perf_counter() - began
        assert counts["computed"] == len(inventory.scan.sources), counts
    return took


def _host(spec: EmbeddingSpec, folder: Path, settings: EncoderSettings, encoder: Any) -> float:
    """Return the seconds of the stream with the same preparation and a model that costs nothing."""

    class Free:
        calls, identity, prepare = 0, encoder.identity, encoder.prepare

        def encode(self, batch: Sequence[Any]) -> list[np.ndarray]:
            return [np.zeros(_stored_shape(spec, item), spec.dtype) for item in batch]

    return _stream(_with_encoder(spec, Free()), folder, settings)


def _stored_shape(spec: EmbeddingSpec, item: Any) -> tuple[int, ...]:
    height, width = item.payload.shape[:2] if spec is VAE else (0, 0)
    return spec.shape(height, width)


@torch.inference_mode()
def _plain(encoder: Any, tokenizer: Any, captions: Sequence[str], folder: Path) -> float:
    """Return the seconds of the original specification's loop: four at a time, padded to 77, all steps sequential."""
    began = time.perf_counter()
    device = encoder.identity.device
    with TemporaryDirectory(dir=folder) as name:
        for start in range(0, len(captions), PLAIN_BATCH):
            tokens = tokenizer(
                list(captions[start : start + PLAIN_BATCH]),
                padding="max_length",
                truncation=True,
                max_length=T5_TOKENS,
                return_tensors="pt",
            ).to(device)
            hidden = encoder._model(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
            for number, row in enumerate(hidden.to(torch.float16).cpu().numpy(), start):
                np.save(Path(name) / f"{number}.npy", row)
    return time.perf_counter() - began


# ---- one kind


def _measure(spec: EmbeddingSpec, folder: Path, arguments: argparse.Namespace) -> bool:
    """Print one line of the table; return whether its goals are met."""
    folder = folder / spec.kind
    captions = _captions(arguments) if spec is T5 else []
    model = write_model(spec, folder / "model", arguments.dtype, captions=captions)
    settings = EncoderSettings(
        model=str(model), device=arguments.device, dtype=arguments.dtype, batch_size=arguments.batch_size
    )
    given: dict[str, Any] = {"spec": spec, "threads": arguments.threads, "preview_root": folder}
    kept = Kept(spec.encoder_class().load(settings, **given))
    stream_spec = _with_encoder(spec, kept.encoder)
    with kept.noting_inputs():
        _stream(stream_spec, folder, settings)

    ways: dict[str, Callable[[], float]] = {"bare": kept.bare, "stream": lambda: _stream(stream_spec, folder, settings)}
    if spec is T5:
        tokenizer = library("transformers").AutoTokenizer.from_pretrained(model)
        ways["plain"] = lambda: _plain(kept.encoder, tokenizer, captions, folder)
    if arguments.device != "cpu":
        ways["host"] = lambda: _host(spec, folder, settings, kept.encoder)
    kept.bare()
    rounds = [{name: way() for name, way in ways.items()} for _ in range(arguments.rounds)]
    kept.encoder.close()
    return _report(spec, rounds, _items(spec, arguments), _flops(spec, kept.inputs), arguments)


def _items(spec: EmbeddingSpec, arguments: argparse.Namespace) -> int:
    return {DINOV3: arguments.images, VAE: arguments.latents, T5: len(_captions(arguments))}[spec]


def _report(
    spec: EmbeddingSpec, rounds: Sequence[dict[str, float]], items: int, flops: float, arguments: argparse.Namespace
) -> bool:
    fastest = {name: min(took[name] for took in rounds) for name in rounds[0]}

    def against(*others: str) -> float:
        """Return the speed of the stream relative to the slowest of the others."""
        return max(fastest[other] for other in others) / fastest["stream"]

    rates = "".join(
        f"{items / fastest[name]:>9.2f}" if name in fastest else f"{'':>9}"
        for name in ("bare", "stream", "plain", "host")
    )
    reached = flops / fastest["stream"] / 1e12
    used = f" {reached / arguments.peak_tflops:.0%} of peak" if arguments.peak_tflops else ""
    of_plain = against("plain") if "plain" in fastest else None
    shown = f"{of_plain:>10.2f}" if of_plain else f"{'':>10}"
    usual = median(took["bare"] / took["stream"] for took in rounds)
    print(f"{spec.kind:<12}{rates}{against('bare'):>10.3f}{usual:>10.3f}{shown}{reached:>10.2f}{used}", flush=True)
    if arguments.device == "cpu":
        enough = against("bare") >= CPU_GOAL
    elif spec is VAE:
        enough = against("bare") >= VAE_GOAL
    else:
        enough = against("bare", "host") >= GPU_GOAL
    return enough and (of_plain is None or of_plain >= PLAIN_GOAL)


# ---- arithmetic: 2 per multiplication and addition


def _flops(spec: EmbeddingSpec, inputs: Sequence[tuple[tuple, dict[str, Any]]]) -> float:
    """Return the floating-point operations of the model's calls, by the shapes of their inputs."""
    count = {DINOV3: _dinov3_flops, VAE: _vae_flops, T5: _t5_flops}[spec]
    return sum(count(next(iter((*args, *kwargs.values()))).shape) for args, kwargs in inputs)


def _transformer_flops(tokens: int) -> float:
    """Return the operations of 24 layers of width 1024 with an inner width of 4096."""
    width, layers = 1024, 24
    return layers * tokens * (2 * (4 * width**2 + 2 * width * 4 * width) + 4 * tokens * width)


def _dinov3_flops(shape: Sequence[int]) -> float:
    patches = (shape[2] // 16) * (shape[3] // 16)
    return shape[0] * (_transformer_flops(patches + 5) + 2 * patches * 3 * 16 * 16 * 1024)


def _vae_flops(shape: Sequence[int]) -> float:
    """Return the operations of an image: 4.10 TFLOP per megapixel of convolution, and the attention in the middle."""
    height, width = shape[2], shape[3]
    return shape[0] * (4.10e6 * height * width + 2048 * ((height // 8) * (width // 8)) ** 2)


def _t5_flops(shape: Sequence[int]) -> float:
    return shape[0] * _transformer_flops(shape[1])


if __name__ == "__main__":
    sys.exit(main())
