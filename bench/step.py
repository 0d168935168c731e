"""step.py: time the optimizer step stage by stage, and the start of a run.

    python bench/step.py [key=value ...]                        with train_gpt.py's options; one GPU (demo: or the CPU)
    torchrun --nproc_per_node=2 bench/step.py [key=value ...]   the same on two GPUs
    python bench/step.py --profile --out FOLDER                 top kernels and a chrome trace of every stage as well
    python bench/step.py --compare ../other                     two checkouts in turn, A B B A, and the ratio

A step is all micro-batches of a rank, data loading included, and the whole optimizer. Steps follow each other as in a
run, without a pause, and are timed with CUDA events (on the CPU with the host's clock). Every stage is made as short as
its timing needs, so scheduled_steps=, extension_steps= and epochs= do not count. Tokens are synthetic unless
train_files= and val_files= name real ones.

This process plans and prints; each start and each set of steps is measured in processes of its own, one a GPU, that end
before the next begin. Times and memory are rank 0's.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARD_STEPS = 12  # steps' worth of tokens, at the largest batch, in each of two synthetic shards
START_STEPS = 6  # steps of each stage where a start is timed: warm-up then samples as many as in a full run
PROFILED = 2  # steps under the profiler, an even and an odd one; as many before them, whose record is dropped
PEAK = {"H100": 989e12, "H200": 989e12}  # dense bf16 FLOP/s by what the GPU's name holds
MFU = """\
MFU = 3 x forward FLOPs / time / peak of 989 TFLOP/s (dense bf16, also where FP8 is on). Forward: 2 a token and weight of
QKVO, MLP and padded head, 4 x head dim for each key a query and head sees. Gates, DC and norms are not counted.
GPU ms: any kernel or copy runs. Exposed communication: only NCCL runs, or waits for another rank."""
LAUNCHER = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PREFLIGHT_")


def import_trainer(root: str | Path):
    """train_gpt of a checkout."""
    sys.path.insert(0, str(root))
    return importlib.import_module("train_gpt")


def synthetic_tokens(count: int, vocab_size: int, bos_id: int, seed: int) -> np.ndarray:
    """Zipf-distributed ids in documents of log-normal length (median e^6 tokens, sigma 1), BOS at each start."""
    rng = np.random.default_rng(seed)
    ids = np.delete(np.arange(vocab_size), bos_id)
    mass = np.cumsum(1 / np.arange(1, len(ids) + 1))
    tokens = ids[np.searchsorted(mass, mass[-1] * rng.random(count))]
    starts = np.cumsum(np.ceil(rng.lognormal(6, 1, count // 100 + 10)).astype(np.int64))
    tokens[[0, *starts[starts < count]]] = bos_id
    return tokens


def write_synthetic(t, cfg, folder: Path) -> dict[str, str]:
    """Two training shards and one for validation; the options that name them."""
    size = SHARD_STEPS * max(stage.batch_tokens for stage in (*cfg.schedule.stages, cfg.schedule.extension))
    for seed, (name, count) in enumerate((("train_1", size), ("train_2", size), ("val_1", cfg.val_tokens + 1))):
        t.write_shard(folder / f"{name}.bin", synthetic_tokens(count, cfg.vocab_size, cfg.bos_id, seed))
    return {f"{kind}_files": str(folder / f"{kind}_*.bin") for kind in ("train", "val")}


# === Measuring: in the processes that do the work. `t` is their train_gpt ===


def keys_seen(lengths: np.ndarray, window: int) -> int:
    """Keys that all queries of documents see together: each itself and up to `window` earlier ones."""
    full = np.minimum(lengths, window + 1)
    return int((full * (full + 1) // 2 + (lengths - full) * (window + 1)).sum())


def step_flops(t, cfg, step: int, batches: list) -> float:
    """Model FLOPs of a rank's step, as MFU above counts them."""
    m, view, total = cfg.model, t.view_at(cfg, step), 0.0
    weights = m.dim * (4 * m.dim * len(m.attn_layers) + 8 * m.dim * len(m.plan) + m.vocab_padded)
    for batch in batches:
        total += 2 * weights * len(batch.inputs)
        lengths = np.diff(batch.cu_seqlens.cpu().numpy().astype(np.int64))
        for spec in (m.plan[i] for i in m.attn_layers):
            streams = 2 if spec.paired else 1  # a paired layer has half the heads over twice the positions
            keys = keys_seen(streams * lengths, view.long if spec.window == "long" else view.short)
            total += 4 * m.head_dim * m.heads // streams * keys
    return 3 * total


def mark(runtime):
    """A point in time: on the device's stream, or (CPU) on the host's clock."""
    if runtime.device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(marks: list, runtime) -> list[float]:
    runtime.sync()
    cuda = runtime.device.type == "cuda"
    return [a.elapsed_time(b) if cuda else 1000 * (b - a) for a, b in zip(marks, marks[1:])]


def time_steps(trainer, loader, steps: range) -> dict[str, list[float]]:
    """ms of each step's two parts. Data loading counts to the first, FP8 requantization to the second."""
    marks, optimizer = [], trainer.optimizer
    update = optimizer.step

    def marked_update(**numbers):
        marks.append(mark(trainer.runtime))
        return update(**numbers)

    optimizer.step = marked_update
    for step in steps:
        marks.append(mark(trainer.runtime))
        trainer.train_step(step, next(loader))
    marks.append(mark(trainer.runtime))
    del optimizer.step
    ms = ms_between(marks, trainer.runtime)
    return {"forward_backward_ms": ms[0::2], "optimizer_ms": ms[1::2]}


def covered(spans: np.ndarray) -> float:
    """Length of the union of intervals, rows of (begin, end)."""
    if not len(spans):
        return 0.0
    spans = spans[np.argsort(spans[:, 0])]
    reached = np.maximum.accumulate(spans[:, 1])
    return float(reached[-1] - spans[0, 0] - np.maximum(spans[1:, 0] - reached[:-1], 0).sum())


def device_times(events: list[dict]) -> dict[str, float]:
    """GPU and exposed communication ms a step, from a chrome trace's events (in µs) on the GPU."""
    spans = np.array([(e["ts"], e["ts"] + e["dur"]) for e in events]).reshape(-1, 2)
    ours = np.array(["nccl" not in e["name"].lower() for e in events], dtype=bool)
    busy, working = covered(spans), covered(spans[ours])
    return {"gpu_ms": busy / 1000 / PROFILED, "exposed_ms": (busy - working) / 1000 / PROFILED}


def top_kernels(events: list[dict]) -> str:
    """The kernels that take most, as text."""
    calls, total = Counter(e["name"] for e in events), Counter()
    for e in events:
        total[e["name"]] += e["dur"] / 1000 / PROFILED
    rows = (f"{ms:9.3f} {calls[name] / PROFILED:8.1f}  {name[:200]}\n" for name, ms in total.most_common(80))
    return f"  ms/step    calls  kernel ({sum(total.values()):.2f} ms/step in all)\n" + "".join(rows)


def profile_steps(trainer, loader, steps: range, out: Path | None) -> dict[str, float]:
    """GPU time of a few steps; with `out`, <out>_top.txt and <out>_trace.json are written as well."""
    runtime, activity = trainer.runtime, torch.profiler.ProfilerActivity
    cuda = runtime.device.type == "cuda"
    if not cuda and not out:
        return {}
    kinds = [*([activity.CUDA] if cuda else []), *([activity.CPU] if out or not cuda else [])]
    plan = torch.profiler.schedule(wait=0, warmup=PROFILED, active=PROFILED)
    with torch.profiler.profile(activities=kinds, schedule=plan) as profiler, tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            trainer.train_step(step, next(loader))
            runtime.sync()
            if step != steps[-1]:
                profiler.step()
        profiler.stop()
        write = out and runtime.main
        path = Path(f"{out}_trace.json") if write else Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    events = [e for e in trace if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if write:
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        Path(f"{out}_top.txt").write_text(top_kernels(events) if cuda else table)
    return device_times(events) if cuda else {}


def measure_stage(t, trainer, job: dict, stage: int) -> dict:
    """Warm up, time and profile one stage."""
    cfg, runtime, flops = trainer.cfg, trainer.runtime, []
    first = (0, *t.stage_ends(cfg))[stage]
    begin, end = first + job["warmup"], first + job["warmup"] + job["steps"]
    if first > t.split_step(cfg):
        trainer.optimizer.split_embed()
    loader = t.TrainLoader(cfg, trainer.plan, runtime, first_step=first)
    for step in range(first, begin):
        batches = next(loader)
        flops.append(step_flops(t, cfg, step, batches))
        trainer.train_step(step, batches)
    result = {"name": f"stage {stage}", "tokens": t.stage_at(cfg, first).batch_tokens, "micro_batches": runtime.accum}
    result |= measure_memory(runtime, lambda: time_steps(trainer, loader, range(begin, end)))
    if not job["times_only"]:
        out = Path(job["out"]) / f"stage{stage}" if job["out"] else None
        result |= profile_steps(trainer, loader, range(end, end + 2 * PROFILED), out)
    loader.close()
    return result | {"flops": float(np.mean(flops))}


def measure_memory(runtime, action) -> dict:
    """What `action()` returns and, on a GPU, the most memory allocated meanwhile."""
    if runtime.device.type != "cuda":
        return action()
    torch.cuda.reset_peak_memory_stats()
    return action() | {"peak_mib": torch.cuda.max_memory_allocated() / 2**20}


def measure_validation(trainer) -> dict:
    """The second of two validations; the first compiles."""
    runtime, step = trainer.runtime, trainer.cfg.total_steps - 1

    def validate() -> dict:
        marks = [mark(runtime), trainer.validate(step), mark(runtime)]
        return {"validation_ms": ms_between(marks[::2], runtime)[0]}

    validate()
    return {"name": "validation", "tokens": trainer.cfg.val_tokens} | measure_memory(runtime, validate)


def work(job: dict) -> None:
    """One rank of a measurement; rank 0 writes job["result"]."""
    t = import_trainer(job["root"])
    cfg = t.parse_options(job["options"])
    rank, local_rank, world_size = t.launched_ranks()
    runtime = t.start_runtime(local_rank, rank, world_size)
    attention, why = t.choose_attention(cfg.attention, runtime.device, cfg.model.head_dim, cfg.model.dtype)
    fp8, _ = t.choose_fp8(cfg.fp8, runtime.device)
    trainer = t.Trainer(cfg, t.data_plan(cfg, runtime.pieces), runtime, attention, fp8)
    columns = [measure_stage(t, trainer, job, stage) for stage in job["stages"]]
    if not job["times_only"]:
        columns.append(measure_validation(trainer))
    if runtime.main:
        device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "cpu"
        triton = t.kernels.triton.__version__ if t.kernels.triton else "not installed"
        machine = {"device": device, "world size": world_size, "torch": torch.__version__, "triton": triton}
        machine |= {"attention": f"{attention} ({why})", "fp8": "on" if fp8 else "off", "commit": t._commit()}
        Path(job["result"]).write_text(json.dumps({"machine": machine, "columns": columns}))
    if world_size > 1:
        torch.distributed.destroy_process_group()


# === Planning and printing ===


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


def measure(job: dict, world_size: int, folder: Path, env: dict[str, str]) -> dict:
    """Run `work` in processes of its own."""
    task, result = folder / "job.json", folder / "result.json"
    task.write_text(json.dumps(job | {"result": str(result)}))
    done = subprocess.run(command(world_size, __file__, "--worker", task), env=env, stdout=sys.stderr)
    if done.returncode:
        raise ValueError(f"a measuring process ended with exit code {done.returncode}: see its own message above.")
    return json.loads(result.read_text())


def start_seconds(options: list[str], total: int, world_size: int, folder: Path, env: dict[str, str]) -> float:
    """Seconds from the command until the clock of training runs: step 0 is validated, the first timed step begins."""
    log, output, began = folder / "logs" / "start.txt", folder / "start.out", time.perf_counter()
    log.unlink(missing_ok=True)
    words = command(world_size, ROOT / "train_gpt.py", *options, "run_id=start")
    with open(output, "wb") as out:
        run = subprocess.Popen(words, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        while not (log.exists() and f"\nstep:0/{total} val_loss:" in log.read_text(encoding="utf-8")):
            if run.poll() is not None:
                tail = " | ".join(output.read_text(errors="replace").splitlines()[-4:])
                raise ValueError(f"train_gpt.py ended with exit code {run.returncode} before its first step: {tail}")
            time.sleep(0.02)
        return time.perf_counter() - began
    finally:
        run.terminate()
        run.wait()


def spread(values) -> str:
    """Median, median absolute deviation and least."""
    middle = median(values)
    return f"{middle:.1f} ±{median(abs(v - middle) for v in values):.1f} (min {min(values):.1f})"


def pairs(column: dict, *parts: str) -> np.ndarray:
    """ms of the parts' sum, (pairs of steps, 2): an even and an odd step in each row."""
    return np.sum([column[f"{part}_ms"] for part in parts], axis=0).reshape(-1, 2)


def cells(column: dict, device: str) -> dict[str, str]:
    """What one column of the report shows, by row."""
    shown = {"tokens": f"{column['tokens']:,}"}
    if "validation_ms" in column:
        shown["ms"] = f"{column['validation_ms']:.1f}"
    else:
        ms, peaks = pairs(column, "forward_backward", "optimizer"), [PEAK[name] for name in PEAK if name in device]
        both = median(ms.mean(1))
        shown |= {"micro-batches of a rank": str(column["micro_batches"]), "ms": spread(ms.mean(1))}
        shown |= {"  even steps": spread(ms[:, 0]), "  odd steps": spread(ms[:, 1])}
        shown |= {f"  {part}": spread(pairs(column, part).mean(1)) for part in ("forward_backward", "optimizer")}
        if "gpu_ms" in column:
            shown |= {"  exposed communication": f"{column['exposed_ms']:.1f}", "GPU ms": f"{column['gpu_ms']:.1f}"}
            shown["GPU busy"] = f"{column['gpu_ms'] / both:.1%}"
        shown["tokens per second"] = f"{1000 * column['tokens'] / both:,.0f}"
        if peaks:
            shown["MFU"] = f"{column['flops'] / (both / 1000) / peaks[0]:.1%}"
    return shown | ({"peak MiB": f"{column['peak_mib']:,.0f}"} if "peak_mib" in column else {})


def report_rows(result: dict) -> list[tuple]:
    """One table: a column for each stage and for validation."""
    shown = [cells(column, result["machine"]["device"]) for column in result["columns"]]
    rows = [(row, *(column.get(row, "-") for column in shown)) for row in shown[0]]
    return [("", *(column["name"] for column in result["columns"])), *rows]


def compare_rows(results: list[dict]) -> list[tuple]:
    """Ratios from the runs A B B A; a steady drift cancels in the geometric mean of the two pairs."""
    rows = [("", "A: this, ms", "B: other, ms", "A/B", "first pair", "second pair", "A/A", "B/B")]
    for runs in zip(*(result["columns"] for result in results), strict=True):
        times = [pairs(run, "forward_backward", "optimizer").mean(1) for run in runs]
        a1, b1, b2, a2 = (median(values) for values in times)
        ratios = ((a1 / b1 * a2 / b2) ** 0.5, a1 / b1, a2 / b2, a2 / a1, b2 / b1)
        samples = (np.concatenate((times[0], times[3])), np.concatenate((times[1], times[2])))
        rows.append((runs[0]["name"], *map(spread, samples), *(f"{ratio:.4f}" for ratio in ratios)))
    return rows


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
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args(argv)
    for flag in ("steps", "warmup"):
        if (count := getattr(args, flag)) < 2 or count % 2:
            raise ValueError(f"--{flag} must be even and at least 2; got {count}: try --{flag} {max(2, count + 1)}.")
    if not all(word.isdigit() and int(word) < 4 for word in args.stages.split(",")):
        raise ValueError(f"--stages takes numbers from 0 to 3 with commas between; got {args.stages!r}.")
    if args.compare and not (args.compare / "train_gpt.py").is_file():
        raise ValueError(f"--compare takes the folder of a checkout; {args.compare} holds no train_gpt.py.")
    return args


def bench(args: argparse.Namespace, folder: Path) -> None:
    """Plan, have measured, print."""
    t = import_trainer(ROOT)
    cfg, (rank, _, world_size) = t.parse_options(args.options), t.launched_ranks()
    if rank:
        return  # the ranks that measure are started below
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        raise ValueError(f"step.py times the GPUs of one machine; {world_size} ranks are on several: use one node.")

    def options(**fixed) -> list[str]:
        return [f"{key}={value}" for key, value in (words | fixed).items()]

    def shortened(each: int) -> dict[str, int]:
        return {"scheduled_steps": each * len(cfg.schedule.stages), "extension_steps": each, "epochs": 1000}

    user = dict(word.split("=", 1) for word in args.options)
    words = write_synthetic(t, cfg, folder) | user | {"run_id": "", "show": "", "resume": "", "checkpoint_every": 0}
    steps = options(**shortened(args.warmup + args.steps + 2 * PROFILED))
    check = child_environment() | {"PREFLIGHT_WORLD_SIZE": str(world_size)}  # train_gpt.py looks, and speaks if need be
    if code := subprocess.run(command(1, ROOT / "train_gpt.py", *steps), cwd=folder, env=check).returncode:
        raise SystemExit(code)
    stages, out = sorted({int(word) for word in args.stages.split(",")}), str(args.out.resolve())
    job = {"root": str(ROOT), "options": steps, "stages": stages, "steps": args.steps, "warmup": args.warmup}
    job |= {"out": out if args.profile else "", "times_only": bool(args.compare)}
    if args.profile:
        os.makedirs(out, exist_ok=True)
    if args.compare:
        roots = [str(root) for root in (ROOT, args.compare.resolve(), args.compare.resolve(), ROOT)]
        caches = [child_environment(folder / name) for name in "abba"]
        runs = [measure(job | {"root": root}, world_size, folder, env) for root, env in zip(roots, caches)]
        report = {"machine": runs[0]["machine"] | {"other commit": runs[1]["machine"]["commit"]}, "runs": runs}
        lines = [t.format_table(compare_rows(runs))]
    else:
        caches, start = child_environment(None if args.no_start else folder / "caches"), {}
        real = options(run_id="start") if "train_files" in user else options(**shortened(START_STEPS))
        for name in () if args.no_start else ("cold start", "warm start"):
            start[name] = start_seconds(real, t.parse_options(real).total_steps, world_size, folder, caches)
        report = measure(job, world_size, folder, caches) | {"start_s": start}
        lines = [t.format_table(report_rows(report)), *(f"{name}: {s:.1f} s" for name, s in start.items()), MFU]
    print(*lines, ", ".join(f"{key} {value}" for key, value in report["machine"].items()), sep="\n")
    if args.json:
        args.json.write_text(json.dumps({"options": args.options, **report}, indent=1))


def main(argv: list[str]) -> int:
    """Exit code 0, or 2 after one sentence on stderr."""
    try:
        args = parse_arguments(argv)
        if args.worker:
            work(json.loads(args.worker.read_text()))
        else:
            with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
                bench(args, Path(folder))
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
