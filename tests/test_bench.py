"""bench/step.py: its synthetic tokens, its arithmetic, and one small run of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import batch_of, small_run, write_random_shards
from hypothesis import given
from hypothesis import strategies as st

import train_gpt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import step  # noqa: E402
import step_worker  # noqa: E402

# === Synthetic tokens ===


def test_synthetic_tokens_are_zipf_in_log_normal_documents():
    count, vocab, bos = 2_000_000, 1000, 7
    tokens = step.synthetic_tokens(count, vocab, bos, seed=3)
    assert len(tokens) == count and tokens[0] == bos and tokens.min() >= 0 and tokens.max() < vocab
    logs = np.log(np.diff(np.flatnonzero(tokens == bos)))
    standard_error = np.sqrt(np.pi / 2 / len(logs))  # of the median of normal values with sigma 1
    assert abs(np.median(logs) - 6) < 4 * standard_error
    assert abs(logs.std() - 1) < 4 / np.sqrt(2 * len(logs))
    ids = np.delete(np.arange(vocab), bos)
    counts = np.bincount(tokens, minlength=vocab)[ids]
    expected = counts.sum() / np.arange(1, vocab) / (1 / np.arange(1, vocab)).sum()
    assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_a_training_run_takes_the_synthetic_shards(tmp_path):
    cfg = small_run(scheduled_steps=60, extension_steps=20, epochs=1000)
    files = step.write_synthetic(cfg, tmp_path)
    plan = train_gpt.data_plan(
        small_run(scheduled_steps=60, extension_steps=20, epochs=1000, **files), train_gpt.PIECES
    )
    assert len(plan.train) == 2 and len(plan.val) == 1


# === Arithmetic ===


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(0, 12))
def test_keys_seen(lengths, window):
    seen = sum(min(position, window) + 1 for length in lengths for position in range(length))
    assert step_worker.keys_seen(np.array(lengths, dtype=np.int64), window) == seen


def test_step_flops_against_shapes_and_masks():
    """Weights from the parameter table, keys from a mask of every position pair."""
    cfg = train_gpt.parse_options(["preset=demo"])
    T, cu_seqlens = 96, [0, 1, 50, 96, 96]
    batch = batch_of([0] * T, [1] * T, cu_seqlens, [0] * T)
    shapes = {label: row.shape for label, row in train_gpt.parameter_plan(cfg.model).items()}
    layers, bank = len(cfg.model.plan), shapes["mlp_bank"]
    weights = sum(np.prod(shapes[label]) for label in ("qk_bank", "vo_bank", "lm_head"))
    weights += np.prod(bank) * layers // bank[0]  # the bank is padded
    view, scores = train_gpt.view_at(cfg, 0), 0
    for spec in cfg.model.plan:
        if spec.window != "none":
            streams = 2 if spec.paired else 1
            at = np.arange(streams * T)
            document = np.searchsorted(streams * np.array(cu_seqlens), at, side="right")
            back = at[:, None] - at[None, :]
            window = view.long if spec.window == "long" else view.short
            mask = (back >= 0) & (back <= window) & (document[:, None] == document[None, :])
            scores += mask.sum() * cfg.model.heads // streams
    forward = (
        2 * T * weights + 2 * 2 * cfg.model.head_dim * scores
    )  # QK^T and PV, a multiplication and an addition each
    assert step_worker.step_flops(train_gpt, cfg, 0, [batch, batch]) == 2 * 3 * forward


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_covered_is_the_length_of_the_union(spans):
    points = {point for begin, length in spans for point in range(begin, begin + length)}
    spans = np.array([(begin, begin + length) for begin, length in spans], dtype=float).reshape(-1, 2)
    assert step_worker.covered(spans) == len(points)


def event(name: str, begin_ms: float, ms: float) -> dict:
    return {"name": name, "ts": 1000 * begin_ms, "dur": 1000 * ms}


def test_device_times_tell_hidden_from_exposed_communication():
    events = [event("gemm", 0, 10), event("ncclDevKernel_ReduceScatter", 5, 15), event("Memcpy HtoD", 30, 1)]
    times = step_worker.device_times(events)
    assert times == {"gpu_ms": 21 / step_worker.PROFILED, "exposed_ms": 10 / step_worker.PROFILED}
    assert step_worker.device_times([]) == {"gpu_ms": 0, "exposed_ms": 0}


def test_waits_for_other_ranks_are_timed_and_wait_is_put_back():
    store = torch.distributed.HashStore()
    group = torch.distributed.ProcessGroupGloo(store, 0, 1)
    wait = torch.distributed.Work.wait
    with step_worker.host_waits() as waits:
        group.allreduce([torch.ones(4)]).wait()
    assert len(waits) == 1 and waits[0] >= 0 and torch.distributed.Work.wait is wait


def test_top_kernels_sums_by_name():
    lines = step_worker.top_kernels([event("a", 0, 1), event("b", 1, 5), event("a", 6, 2)]).splitlines()
    assert lines[1].split() == ["2.500", "0.5", "b"] and lines[2].split() == ["1.500", "1.0", "a"]
    assert "4.00 ms/step" in lines[0]


def column(ms: list[float], **more) -> dict:
    half = [value / 4 for value in ms]
    rest = [value - quarter for value, quarter in zip(ms, half)]
    return {"name": "stage 0", "tokens": 1000, "forward_backward_ms": rest, "optimizer_ms": half} | more


def test_report():
    stage = column([100, 140, 104, 140], micro_batches=8, gpu_ms=90.75, exposed_ms=3.0, flops=989e12 / 100, peak_mib=9)
    validation = {"name": "validation", "tokens": 64, "validation_ms": 7.0, "peak_mib": 2000.4}
    rows = step.report_rows({"machine": {"device": "NVIDIA H200"}, "columns": [stage, validation]})
    table = {row[""].strip(): (row["stage 0"], row["validation"]) for row in rows}
    assert table["ms"] == ("121.0 ±1.0 (min 120.0)", "7.0")
    assert table["even steps"] == ("102.0 ±2.0 (min 100.0)", None) and table["odd steps"][0].startswith("140.0 ±0.0")
    assert table["forward_backward"][0].startswith("90.8 ") and table["optimizer"][0].startswith("30.2 ")
    assert table["GPU busy"][0] == "75.0%" and table["exposed communication"][0] == "3.0"
    assert table["tokens per second"][0] == "8,264"  # 1000 tokens in 0.121 s
    assert table["MFU"][0] == "8.3%"  # a hundredth of the peak's second, in 0.121 s
    assert table["peak MiB"] == ("9", "2,000")
    assert "MB sent, even / odd steps" not in table, "one rank sends nothing"
    shared = step.cells(stage | {"sent_mb": [1.0, 20.0, 1.0, 30.0]}, "NVIDIA H200")
    assert shared["  MB sent, even / odd steps"] == "1.00 / 25.00"
    unknown = step.report_rows({"machine": {"device": "cpu"}, "columns": [stage]})
    assert "MFU" not in [row[""] for row in unknown]


def test_compare_cancels_a_steady_drift():
    """A takes 0.9 of B's time, and everything slows down by 2 % from run to run."""
    runs = [{"columns": [column([ms * 1.02**k] * 4)]} for k, ms in enumerate((90, 100, 100, 90))]
    (row,) = step.compare_rows(runs)
    assert (
        row["A/B"] == "0.9000"
        and row["first pair"] == f"{0.9 / 1.02:.4f}"
        and row["second pair"] == f"{0.9 * 1.02:.4f}"
    )
    assert row["A again/A"] == f"{1.02**3:.4f}" and row["B again/B"] == "1.0200"


# === Measuring ===


def test_a_stage_is_timed_at_its_own_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    cfg = small_run(scheduled_steps=18, extension_steps=6, epochs=9)
    write_random_shards(tmp_path, cfg, seed=1)
    trainer = train_gpt.Trainer(
        cfg, train_gpt.data_plan(cfg, train_gpt.PIECES), train_gpt.Runtime(), "reference", False
    )
    steps, tokens, train_step = [], [], trainer.train_step

    def spy(number, batches):
        steps.append(number)
        tokens.append(sum(len(batch.inputs) for batch in batches))
        return train_step(number, batches)

    trainer.train_step = spy
    job = {"warmup": 2, "steps": 4, "out": "", "times_only": False}
    result = step_worker.measure_stage(train_gpt, trainer, job, 3)
    assert steps == list(range(18, 24)) and trainer.optimizer.split, "the extension, long after the embedding's split"
    assert set(tokens) == {cfg.schedule.extension.batch_tokens} == {result["tokens"]}
    assert len(result["forward_backward_ms"]) == len(result["optimizer_ms"]) == job["steps"]
    assert min(result["forward_backward_ms"] + result["optimizer_ms"]) > 0 and result["micro_batches"] == 8
    assert "step" not in vars(trainer.optimizer), "the optimizer is left as it was"


STAND_IN = """
import pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
total = int(words["scheduled_steps"]) + int(words["extension_steps"])
pathlib.Path("logs").mkdir()
log = open(f"logs/{words['run_id']}.txt", "w")
log.write(f'a docstring that quotes step:0/{total} val_loss:9\\n')
log.flush()
if words["seed"] == "1":
    sys.exit("out of luck")
time.sleep(0.3)
pathlib.Path("ready").touch()
log.write(f"step:0/{total} val_loss:5.5 train_time:0ms step_avg:0.00ms\\n")
log.flush()
time.sleep(600)
"""


def bench_with(tmp_path, monkeypatch, **words) -> step.Bench:
    (tmp_path / "train_gpt.py").write_text(STAND_IN)
    monkeypatch.setattr(step, "ROOT", tmp_path)
    return step.Bench(train_gpt.parse_options(["preset=demo"]), {"preset": "demo", **words}, False, 1, tmp_path)


def test_start_is_timed_to_the_first_validation_and_ends_the_run(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **more: started.append(popen(*words, **more)) or started[-1]
    )
    bench = bench_with(tmp_path, monkeypatch, seed=0)
    seconds = bench.start_seconds("cold", step.child_environment(tmp_path))
    assert (tmp_path / "ready").exists() and seconds >= 0.3, "the stand-in sleeps as long before it validates"
    assert [run.poll() is not None for run in started] == [True], "no process is left"


def test_a_start_that_fails_says_why(tmp_path, monkeypatch):
    bench = bench_with(tmp_path, monkeypatch, seed=1)
    with pytest.raises(ValueError, match="exit code 1 before its first step: out of luck"):
        bench.start_seconds("cold", step.child_environment(tmp_path))


def test_children_see_no_launcher_and_their_own_caches(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    env = step.child_environment(tmp_path)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(env)
    caches = [env[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")]
    assert len(set(caches)) == 3 and all(Path(cache).parent == tmp_path for cache in caches)
    assert env["PATH"] == os.environ["PATH"]


# === Command line ===


@pytest.mark.parametrize(
    "words, told",
    [
        (["preset=demo", "--steps", "3"], "--steps must be even and at least 2; got 3: try --steps 4."),
        (["preset=demo", "--warmup", "0"], "--warmup must be even and at least 2; got 0: try --warmup 2."),
        (["--stages", "0,4", "preset=demo"], "--stages takes numbers from 0 to 3 with commas between; got '0,4'."),
        (["preset=demo", "--compare", "no/such"], "--compare takes the folder of a checkout; no/such holds"),
        (["presett=demo"], "unknown option 'presett=demo'; did you mean preset=?"),
    ],
)
def test_bad_arguments_are_one_sentence(words, told, capsys):
    assert step.main(words) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"error: {told}") and err.count("\n") == 1


def test_other_ranks_leave_the_work_to_the_first(monkeypatch, capfd):
    for word in "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=1".split():
        monkeypatch.setenv(*word.split("="))
    assert step.main(["preset=demo"]) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run on the CPU")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_small_run(tmp_path, world_size):
    saved = tmp_path / "numbers.json"
    words = ["preset=demo", "val_tokens=16384", "--stages", "0", "--steps", "2", "--warmup", "2", "--no-start"]
    command = step.command(world_size, ROOT / "bench" / "step.py", *words, "--json", saved)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(saved.read_text())
    stage, validation = numbers["columns"]
    assert stage["tokens"] == 2048 and len(stage["forward_backward_ms"]) == 2 and validation["validation_ms"] > 0
    rows = step.report_rows(numbers)
    assert done.stdout.startswith(train_gpt.format_table(rows))
    assert f"world size {world_size}" in done.stdout.splitlines()[-1]
    told = {row[""].strip() for row in rows} & {"MB sent, even / odd steps", "exposed communication"}
    assert len(told) == (2 if world_size > 1 else 0)
    assert numbers["options"] == words[:2] and not (tmp_path / "logs" / "bench.txt").exists()
