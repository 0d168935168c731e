"""step_worker.py: what one rank measures for step.py, which starts it with a job (JSON); rank 0 writes the result.

`t` is the train_gpt of the checkout that the job names.
"""

import contextlib
import gzip
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

PROFILED = 2  # steps under the profiler, an even and an odd one; as many before them, whose record is dropped


def keys_seen(lengths: np.ndarray, window: int) -> int:
    """Keys that all queries of documents see together: each itself and up to `window` earlier ones."""
    full = np.minimum(lengths, window + 1)
    return int((full * (full + 1) // 2 + (lengths - full) * (window + 1)).sum())


def step_flops(t, cfg, step: int, batches: list) -> float:
    """Model FLOPs of a rank's step, as step.py's MFU counts them."""
    m, view, total = cfg.model, t.view_at(cfg, step), 0.0
    weights = m.dim * (4 * m.dim * len(m.attn_layers) + 8 * m.dim * len(m.plan) + m.vocab_padded)
    for batch in batches:
        total += 2 * weights * int((batch.targets >= 0).sum())
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


@contextlib.contextmanager
def host_waits() -> Iterator[list[float]]:
    """ms of every wait of this process for a collective: communication that a CPU does not hide."""
    waits, wait = [], torch.distributed.Work.wait

    def timed(*args):
        began = time.perf_counter()
        try:
            return wait(*args)
        finally:
            waits.append(1000 * (time.perf_counter() - began))

    torch.distributed.Work.wait = timed
    try:
        yield waits
    finally:
        torch.distributed.Work.wait = wait


def time_steps(trainer, loader, steps: range) -> dict[str, list[float]]:
    """ms of each step's two parts. Data loading counts to the first, FP8 requantization to the second.

    And the MB that this rank's optimizer sends in each step, where its checkout counts them; on the CPU, how long the
    rank waits for others, on average.
    """
    marks, optimizer = [], trainer.optimizer
    sent = [getattr(optimizer, "sent", 0)]
    update = optimizer.step

    def marked_update(**numbers):
        marks.append(mark(trainer.runtime))
        return update(**numbers)

    optimizer.step = marked_update
    with host_waits() as waits:
        for step in steps:
            marks.append(mark(trainer.runtime))
            trainer.train_step(step, next(loader))
            sent.append(getattr(optimizer, "sent", 0))
    marks.append(mark(trainer.runtime))
    del optimizer.step
    ms = ms_between(marks, trainer.runtime)
    times = {"forward_backward_ms": ms[0::2], "optimizer_ms": ms[1::2]}
    if waits and trainer.runtime.device.type != "cuda":
        times["exposed_ms"] = sum(waits) / len(steps)
    return times | {"sent_mb": (np.diff(sent) / 1e6).tolist()} if sent[-1] else times


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
    """GPU time of a few steps; with `out`, <out>_top.txt and <out>_trace.json.gz are written as well."""
    runtime, activity = trainer.runtime, torch.profiler.ProfilerActivity
    cuda = runtime.device.type == "cuda"
    if not cuda and not out:
        return {}
    kinds = [*([activity.CUDA] if cuda else []), *([activity.CPU] if out or not cuda else [])]
    plan = torch.profiler.schedule(wait=0, warmup=PROFILED, active=PROFILED)
    with torch.profiler.profile(activities=kinds, schedule=plan) as profiler:
        for step in steps:
            if step != steps[0]:
                profiler.step()
            trainer.train_step(step, next(loader))
            runtime.sync()
    with tempfile.TemporaryDirectory() as scratch:
        write = out and runtime.main
        path = Path(f"{out}_trace.json.gz") if write else Path(scratch) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            trace = json.load(file)["traceEvents"]
    events = [event for event in trace if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if write:
        table = top_kernels(events) if cuda else profiler.key_averages().table("self_cpu_time_total", row_limit=40)
        Path(f"{out}_top.txt").write_text(table)
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
    result = {"name": f"stage {stage}", "tokens": t.stage_at(cfg, first).batch_tokens, "micro_batches": len(batches)}
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
    """The second of two validations; the first one compiles."""
    runtime, step = trainer.runtime, trainer.cfg.total_steps - 1

    def validate() -> dict:
        marks = [mark(runtime), trainer.validate(step), mark(runtime)]
        return {"validation_ms": ms_between(marks[::2], runtime)[0]}

    validate()
    return {"name": "validation", "tokens": trainer.cfg.val_tokens} | measure_memory(runtime, validate)


def work(job: dict) -> None:
    """One rank of a measurement; rank 0 writes job["result"]."""
    sys.path.insert(0, job["root"])
    t = importlib.import_module("train_gpt")
    cfg = t.parse_options(job["options"])
    rank, local_rank, world_size = t.launched_ranks()
    runtime = t.start_runtime(local_rank, rank, world_size)
    attention, why = t.choose_attention(cfg.attention, runtime.device, cfg.model.head_dim, cfg.model.dtype)
    fp8, _ = t.choose_fp8(cfg, runtime.device)
    trainer = t.Trainer(cfg, t.data_plan(cfg, runtime.pieces), runtime, attention, fp8)
    columns = [measure_stage(t, trainer, job, stage) for stage in job["stages"]]
    if not job["times_only"]:
        columns.append(measure_validation(trainer))
    if runtime.main:
        device = torch.cuda.get_device_name() if runtime.device.type == "cuda" else "cpu"
        triton = t.kernels.triton.__version__ if t.kernels.triton else "not installed"
        machine = {"device": device, "world size": world_size, "torch": torch.__version__, "triton": triton}
        machine |= {"attention": f"{attention} ({why})", "fp8": "on" if fp8 else "off"}
        Path(job["result"]).write_text(json.dumps({"machine": machine, "columns": columns}))
    if world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        work(json.loads(Path(sys.argv[1]).read_text()))
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
