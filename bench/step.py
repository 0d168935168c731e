"""step.py: time the optimizer step stage by stage, and the start of a run.

    python bench/step.py [key=value ...]                        with train_gpt.py's options; one GPU (demo: or the CPU)
    torchrun --nproc_per_node=2 bench/step.py [key=value ...]   the same on two GPUs
    python bench/step.py --profile --out FOLDER                 top kernels and a chrome trace of every stage as well
    python bench/step.py --compare ../other                     two checkouts in turn, A B B A, and the ratio

A step is all micro-batches of a rank, data loading included, and the whole optimizer. Steps follow each other as in a
run, without a pause, and are timed with CUDA events (on the CPU with the host's clock). Every stage is made as short as
its timing needs, so scheduled_steps=, extension_steps= and epochs= count only where a start on real tokens is timed.
Tokens are synthetic unless train_files= and val_files= name real ones.

This process plans and prints; each start (train_gpt.py itself) and each set of steps (step_worker.py) runs in processes
of its own, one a GPU, that end before the next begin. Times and memory are rank 0's.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from step_worker import PROFILED

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402

SHARD_STEPS = 12  # steps' worth of tokens, at the largest batch, in each of two synthetic shards
START_STEPS = 6  # steps of each stage where a start is timed: warm-up then samples as many as in a full run
LAUNCHER = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PREFLIGHT_")  # variables
PEAK = {"H100": 989e12, "H200": 989e12}  # dense bf16 FLOP/s by what the GPU's name holds
LEGEND = """\
a ±b (min c): median, median absolute deviation, least; "ms" averages each even step with the odd one after it.
forward_backward holds data loading, optimizer holds FP8 requantization.
GPU ms: some kernel or copy runs. Exposed communication: only NCCL runs (on the CPU: the host waits for a collective),
which may be waiting for another rank.
MB sent: by one rank in gradients and weights, as ring algorithms do; touched rows count for the busiest rank.
MFU: 3 x forward FLOPs / time / 989 TFLOP/s, dense bf16, also where FP8 is on. Forward: 2 a token and weight of QKVO,
MLP and padded head, and 4 x head dim for each key that a query of a head sees. Gates, DC and norms are not counted.
Start: from the command to the first timed step of train_gpt.py, its validation included; cold: empty compile caches."""


# === Synthetic tokens ===


def synthetic_tokens(count: int, vocab_size: int, bos_id: int, seed: int) -> np.ndarray:
    """Zipf-distributed ids in documents of log-normal length (median e^6 tokens, sigma 1), BOS at each start."""
    rng = np.random.default_rng(seed)
    ids = np.delete(np.arange(vocab_size), bos_id)
    mass = np.cumsum(1 / np.arange(1, len(ids) + 1))
    tokens = ids[np.searchsorted(mass, mass[-1] * rng.random(count))]
    starts = np.cumsum(np.ceil(rng.lognormal(6, 1, count // 100 + 10)).astype(np.int64))
    tokens[[0, *starts[starts < count]]] = bos_id
    return tokens


def write_synthetic(cfg: train_gpt.RunConfig, folder: Path) -> dict[str, str]:
    """Two training shards and one for validation; the options that name them."""
    size = SHARD_STEPS * max(stage.batch_tokens for stage in (*cfg.schedule.stages, cfg.schedule.extension))
    for seed, (name, count) in enumerate((("train_1", size), ("train_2", size), ("val_1", cfg.val_tokens + 1))):
        tokens = synthetic_tokens(count, cfg.vocab_size, cfg.bos_id, seed)
        train_gpt.write_shard(folder / f"{name}.bin", tokens)
    return {f"{kind}_files": str(folder / f"{kind}_*.bin") for kind in ("train", "val")}


# === Processes that measure ===


def child_environment(caches: Path | None = None) -> dict[str, str]:
    """This environment without what torchrun put there; compile caches in a folder of their own where one is given."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER)}
    env.setdefault("DATA_PATH", os.getcwd())
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
    return env | ({name: str(caches / name.lower()) for name in names} if caches else {})


def command(world_size: int, *words: str | Path) -> list[str]:
    """How a script is started on so many GPUs of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    return [sys.executable, *(launcher if world_size > 1 else []), *map(str, words)]


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the measurements of one call share."""

    cfg: train_gpt.RunConfig
    words: dict[str, str | int]  # options of train_gpt.py
    real: bool  # tokens are the user's
    world_size: int
    folder: Path  # for everything temporary

    def options(self, each: int | None = None, **more: str) -> list[str]:
        """Options as words, with `each` steps in every stage where it is given."""
        short = {
            "scheduled_steps": (each or 0) * len(self.cfg.schedule.stages),
            "extension_steps": each,
            "epochs": 1000,
        }
        return [f"{key}={value}" for key, value in (self.words | (short if each else {}) | more).items()]

    def preflight(self, options: list[str]) -> None:
        """Let train_gpt.py look at data and machine; where something is wrong, its sentence is on stderr already."""
        env = child_environment() | {"PREFLIGHT_WORLD_SIZE": str(self.world_size)}
        done = subprocess.run(command(1, ROOT / "train_gpt.py", *options), cwd=self.folder, env=env)
        if done.returncode:
            raise SystemExit(done.returncode)

    def measure(self, job: dict, env: dict[str, str]) -> dict:
        """Times of all stages by step_worker.py."""
        task, result = self.folder / "job.json", self.folder / "result.json"
        task.write_text(json.dumps(job | {"result": str(result)}))
        words = command(self.world_size, Path(__file__).with_name("step_worker.py"), task)
        if code := subprocess.run(words, env=env, stdout=sys.stderr).returncode:
            raise ValueError(f"step_worker.py ended with exit code {code}: what it said is above.")
        found = json.loads(result.read_text())
        found["machine"]["commit"] = train_gpt.preflight.commit(Path(job["root"]))
        return found

    def start_seconds(self, run_id: str, env: dict[str, str]) -> float:
        """Seconds from the command until train_gpt.py has validated step 0 and starts its clock for the first step."""
        options = self.options(None if self.real else START_STEPS, run_id=run_id)
        mark = f"\nstep:0/{train_gpt.parse_options(options).total_steps} val_loss:"
        log, output = self.folder / "logs" / f"{run_id}.txt", self.folder / f"{run_id}.out"
        words, began = command(self.world_size, ROOT / "train_gpt.py", *options), time.perf_counter()
        with open(output, "wb") as out:
            run = subprocess.Popen(words, cwd=self.folder, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            while not (log.exists() and mark in log.read_text(encoding="utf-8")):
                if run.poll() is not None:
                    tail = " | ".join(output.read_text(errors="replace").splitlines()[-4:])
                    raise ValueError(
                        f"train_gpt.py ended with exit code {run.returncode} before its first step: {tail}"
                    )
                time.sleep(0.02)
            return time.perf_counter() - began
        finally:
            run.terminate()
            run.wait()


# === Tables ===


def spread(values) -> str:
    """Median, median absolute deviation and least."""
    middle = median(values)
    return f"{middle:.1f} ±{median(abs(v - middle) for v in values):.1f} (min {min(values):.1f})"


def step_ms(column: dict, *parts: str) -> np.ndarray:
    """ms of steps, or of some parts of them, (pairs, 2): an even and an odd step in each row."""
    parts = parts or ("forward_backward", "optimizer")
    return np.sum([column[f"{part}_ms"] for part in parts], axis=0).reshape(-1, 2)


def cells(column: dict, device: str) -> dict[str, str]:
    """What one column of the report shows, by row."""
    memory = {"peak MiB": f"{column['peak_mib']:,.0f}"} if "peak_mib" in column else {}
    tokens = {"tokens": f"{column['tokens']:,}"}
    if "validation_ms" in column:
        return tokens | {"ms": f"{column['validation_ms']:.1f}"} | memory
    ms, peaks = step_ms(column), [PEAK[name] for name in PEAK if name in device]
    both = median(ms.mean(1))
    shown = {"micro-batches of a rank": str(column["micro_batches"]), "ms": spread(ms.mean(1))}
    shown |= {"  even steps": spread(ms[:, 0]), "  odd steps": spread(ms[:, 1])}
    shown |= {f"  {part}": spread(step_ms(column, part).mean(1)) for part in ("forward_backward", "optimizer")}
    if "sent_mb" in column:
        even, odd = np.reshape(column["sent_mb"], (-1, 2)).mean(0)
        shown["  MB sent, even / odd steps"] = f"{even:,.2f} / {odd:,.2f}"
    if "exposed_ms" in column:
        shown["  exposed communication"] = f"{column['exposed_ms']:.1f}"
    if "gpu_ms" in column:
        shown["GPU ms"] = f"{column['gpu_ms']:.1f}"
        shown["GPU busy"] = f"{column['gpu_ms'] / both:.1%}"
    shown["tokens per second"] = f"{1000 * column['tokens'] / both:,.0f}"
    if peaks:
        shown["MFU"] = f"{column['flops'] / (both / 1000) / peaks[0]:.1%}"
    return tokens | shown | memory


def report_rows(result: dict) -> list[dict]:
    """A column for each stage and for validation."""
    shown = {column["name"]: cells(column, result["machine"]["device"]) for column in result["columns"]}
    first = next(iter(shown.values()))
    return [{"": row} | {name: column.get(row) for name, column in shown.items()} for row in first]


def compare_rows(runs: list[dict]) -> list[dict]:
    """Ratios from the runs A B B A; a steady drift cancels in the geometric mean of the two pairs."""
    rows = []
    for columns in zip(*(run["columns"] for run in runs), strict=True):
        times = [step_ms(column).mean(1) for column in columns]
        a1, b1, b2, a2 = (median(values) for values in times)
        row = {"": columns[0]["name"], "A: this, ms": spread(np.concatenate((times[0], times[3])))}
        row["B: other, ms"] = spread(np.concatenate((times[1], times[2])))
        ratios = {"A/B": (a1 / b1 * a2 / b2) ** 0.5, "first pair": a1 / b1, "second pair": a2 / b2}
        ratios |= {"A again/A": a2 / a1, "B again/B": b2 / b1}  # how far one checkout differs from itself
        rows.append(row | {name: f"{ratio:.4f}" for name, ratio in ratios.items()})
    return rows


# === Command line ===


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Raises ValueError with one sentence for what argparse does not see."""
    parser = argparse.ArgumentParser(prog="step.py", description=__doc__.splitlines()[0])
    parser.add_argument("options", nargs="*", metavar="key=value", help="options of train_gpt.py")
    parser.add_argument("--stages", default="0,1,2", help="stages to time; the one after the last is the extension")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each stage, even")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each stage before those, even")
    parser.add_argument("--no-start", action="store_true", help="leave out cold and warm start; use the usual caches")
    parser.add_argument("--profile", action="store_true", help="write top kernels and a chrome trace of each stage")
    parser.add_argument("--out", type=Path, default=Path("logs"), help="folder for what --profile writes")
    parser.add_argument("--compare", type=Path, metavar="CHECKOUT", help="only time this checkout against another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    args = parser.parse_intermixed_args(argv)
    for flag in ("steps", "warmup"):
        if (count := getattr(args, flag)) < 2 or count % 2:
            raise ValueError(f"--{flag} must be even and at least 2; got {count}: try --{flag} {max(2, count + 1)}.")
    if not all(word.isdigit() and int(word) < 4 for word in args.stages.split(",")):
        raise ValueError(f"--stages takes numbers from 0 to 3 with commas between; got {args.stages!r}.")
    if args.compare and not (args.compare / "train_gpt.py").is_file():
        raise ValueError(f"--compare takes the folder of a checkout; {args.compare} holds no train_gpt.py.")
    return args


def compare(bench: Bench, job: dict, other: Path) -> tuple[dict, list[str]]:
    """Time two checkouts A B B A; what to save, what to print."""
    a, b = ((str(root), child_environment(bench.folder / name)) for root, name in ((ROOT, "a"), (other.resolve(), "b")))
    runs = [bench.measure(job | {"root": root, "times_only": True}, env) for root, env in (a, b, b, a)]
    machine = runs[0]["machine"] | {"other commit": runs[1]["machine"]["commit"]}
    return {"machine": machine, "runs": runs}, [train_gpt.format_table(compare_rows(runs))]


def report(bench: Bench, job: dict, with_start: bool) -> tuple[dict, list[str]]:
    """Measure this checkout; what to save, what to print."""
    env = child_environment(bench.folder / "caches" if with_start else None)
    start = {name: bench.start_seconds(name, env) for name in (("cold", "warm") if with_start else ())}
    result = bench.measure(job, env) | {"start_s": start}
    seconds = [f"{name} start: {s:.1f} s" for name, s in start.items()]
    return result, [train_gpt.format_table(report_rows(result)), *seconds, LEGEND]


def run(args: argparse.Namespace, folder: Path) -> None:
    """Plan, have measured, print."""
    cfg, (rank, _, world_size) = train_gpt.parse_options(args.options), train_gpt.launched_ranks()
    if rank:
        return  # the ranks that measure are started below
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        raise ValueError(f"step.py times the GPUs of one machine; {world_size} ranks are on several: use one node.")
    user = dict(word.split("=", 1) for word in args.options)
    words = write_synthetic(cfg, folder) | user | {"run_id": "", "show": "", "resume": "", "checkpoint_every": 0}
    bench = Bench(cfg, words, "train_files" in user, world_size, folder)
    options = bench.options(args.warmup + args.steps + 2 * PROFILED)
    bench.preflight(options)
    job = {"root": str(ROOT), "options": options, "steps": args.steps, "warmup": args.warmup, "times_only": False}
    job |= {"stages": sorted(map(int, set(args.stages.split(",")))), "out": ""}
    if args.profile:
        job["out"] = str(args.out.resolve())
    for target in filter(None, (args.json and args.json.parent, args.profile and args.out)):
        try:  # now, not when all is timed
            target.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ValueError(f"{target} cannot be made ({problem.strerror}): name another folder.") from None
    result, lines = compare(bench, job, args.compare) if args.compare else report(bench, job, not args.no_start)
    print(*lines, ", ".join(f"{key} {value}" for key, value in result["machine"].items()), sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"options": args.options} | result, indent=1))


def main(argv: list[str]) -> int:
    """Exit code 0, or 2 after one sentence on stderr."""
    try:
        args = parse_arguments(argv)
        with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
            run(args, Path(folder))
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
