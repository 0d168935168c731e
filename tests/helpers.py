"""What several tests share: small configurations, golden data, random parameters."""

import dataclasses
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch

import train_gpt
from train_gpt import Batch, ModelConfig, RunConfig, View

DATA = Path(__file__).parent / "data"
GOLDEN = ModelConfig(head_dim=8, vocab_size=128, bigram_rows=97, sign_rows=16, dtype=torch.float64)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(DATA / f"{name}_golden.npz"))


def small_run(**changes) -> RunConfig:
    """The demo's configuration at the smallest useful size."""
    base = train_gpt.parse_options(["preset=demo"])
    stages = tuple(
        dataclasses.replace(stage, batch_tokens=tokens, max_doc_len=doc)
        for stage, (tokens, doc) in zip(base.schedule.stages, ((512, 48), (768, 64), (1024, 96)))
    )
    schedule = dataclasses.replace(
        base.schedule,
        stages=stages,
        extension=dataclasses.replace(base.schedule.extension, batch_tokens=1024, max_doc_len=96),
        window_block=8,
        momentum_warmup=4,
        momentum_cooldown=2,
        val_chunk=128,
    )
    model = dataclasses.replace(
        base.model, head_dim=8, bigram_rows=96, sign_rows=16, vocab_size=50, dtype=torch.float64
    )
    values = dict(
        scheduled_steps=9, extension_steps=2, val_every=4, val_tokens=2048, vocab_size=50, bos_id=49, epochs=1
    )
    return dataclasses.replace(base, model=model, schedule=schedule, **(values | changes))


def write_random_shards(root: Path, cfg: RunConfig, *, seed: int, train_tokens: int = 40_000) -> None:
    """Two training shards and a validation shard of random documents, where cfg looks for them under root."""
    rng = np.random.default_rng(seed)

    def documents(count: int) -> np.ndarray:
        tokens = rng.integers(0, cfg.bos_id, count)
        starts = np.cumsum(1 + rng.geometric(1 / 30, count))
        tokens[[0, *starts[starts < count]]] = cfg.bos_id
        return tokens

    for pattern, name, count in (
        (cfg.train_files, "000001", train_tokens // 2),
        (cfg.train_files, "000002", train_tokens // 2),
        (cfg.val_files, "000000", cfg.val_tokens + 1),
    ):
        path = root / pattern.replace("*", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        train_gpt.write_shard(path, documents(count))


def randomize(model: torch.nn.Module, seed: int = 0, size: float = 0.3) -> None:
    """Give every parameter, also those that start at zero, a random value around its own; padding changes no other."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            p += size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def batch_of(inputs, targets, cu_seqlens, bigram_rows) -> Batch:
    return Batch(
        torch.as_tensor(inputs, dtype=torch.int32),
        torch.as_tensor(targets, dtype=torch.int64),
        torch.as_tensor(cu_seqlens, dtype=torch.int32),
        torch.as_tensor(bigram_rows, dtype=torch.int32),
    )


def view_of(windows, scale: float) -> View:
    short, long = (int(w) for w in windows)
    return View(short, long, float(scale), max_len=10**6)
