"""loader.py: tokens per second of the training loader, without a GPU or a model.

    python bench/loader.py [key=value ...]      with train_gpt.py's options; record preset, synthetic shards by default

Prints one line for each world size: what one rank cuts, packs and hashes. A run on 8 H100s takes about 5 million tokens
a second in all, so one rank must make 0.6.
"""

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from step import synthetic_tokens  # noqa: E402

import train_gpt  # noqa: E402

TOKENS = 20_000_000  # in each of two synthetic shards


def measure(cfg: train_gpt.RunConfig, plan: train_gpt.DataPlan, world_size: int) -> tuple[float, float]:
    """(million tokens per second, ms per step) of rank 0."""
    loader = train_gpt.TrainLoader(cfg, plan, train_gpt.Runtime(world_size=world_size))
    tokens, start = 0, time.perf_counter()
    for _ in range(cfg.total_steps):
        tokens += sum(len(batch.inputs) for batch in next(loader))
    seconds = time.perf_counter() - start
    loader.close()
    return tokens / seconds / 1e6, 1000 * seconds / cfg.total_steps


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        return print(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        options, asked = list(argv), train_gpt.parse_options(argv)
        given = {word.partition("=")[0] for word in argv}
        if "train_files" not in given:
            for seed, name in enumerate(("train_1", "train_2", "val")):
                tokens = synthetic_tokens(TOKENS, asked.vocab_size, asked.bos_id, seed)
                train_gpt.write_shard(Path(folder) / f"{name}.bin", tokens)
            usual = {"train_files": f"{folder}/train_*.bin", "val_files": f"{folder}/val.bin", "scheduled_steps": 60}
            options += [f"{key}={value}" for key, value in usual.items() if key not in given]
        cfg = train_gpt.parse_options(options)
        start = time.perf_counter()
        plan = train_gpt.data_plan(cfg, train_gpt.PIECES)
        print(f"checking and planning all shards: {time.perf_counter() - start:.2f} s")
        for world_size in (1, 2, 4, 8):
            rate, ms = measure(cfg, plan, world_size)
            print(f"world size {world_size}: {rate:5.1f} million tokens/s a rank, {ms:.1f} ms a step")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
