"""Runs that survive: whole states, resumed runs, refused files, signals, kills, bad losses, full disks, text.

What may be killed runs in processes forked from one that has imported everything (checkpoint_worker.py).
"""

import contextlib
import dataclasses
import errno
import gc
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_worker import group, rank_of_a_run, tiny
from helpers import randomize, write_random_shards

import checkpoints
import train_gpt
from checkpoints import Stopped, Watch
from evals import generate
from train_gpt import Runtime, Trainer, main

HERE = Path(__file__).parent
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["checkpoint_worker"])


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_random_shards(folder, tiny(), seed=1)
    return folder / "data"


@pytest.fixture
def workplace(shards, tmp_path, monkeypatch):
    """An empty current folder that holds the data, no launcher, no GPU."""
    (tmp_path / "data").symlink_to(shards)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PREFLIGHT_WORLD_SIZE", "DATA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.fixture
def call(workplace, monkeypatch, capfd):
    """call(cfg) -> (exit code of main, its lines on stderr but for the progress bar)."""

    def run(cfg) -> tuple[int, list[str]]:
        monkeypatch.setattr(train_gpt, "parse_options", lambda _: cfg)
        code = main([])
        return code, [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]

    return run


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory):
    """The folder of an unbroken run on one rank, logs/whole."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "data").symlink_to(shards)
    with inside(folder):
        train_gpt.run(tiny(run_id="whole"))
    return folder


@contextlib.contextmanager
def inside(folder: Path):
    before = os.getcwd()
    os.chdir(folder)
    yield
    os.chdir(before)


def state_file(folder: Path, run_id: str, step: int) -> Path:
    return folder / "logs" / run_id / f"state_step{step:06d}.pt"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    state = torch.load(path)
    return state["model"] | state["optimizer"]["tensors"]


def same(one: Path, other: Path) -> bool:
    """Whether two states hold the same numbers, bit by bit, and have counted the same steps."""
    a, b = torch.load(one), torch.load(other)
    a_, b_ = tensors(one), tensors(other)
    counted = all(a["optimizer"][key] == b["optimizer"][key] for key in ("split", "steps")) and a["step"] == b["step"]
    return counted and a_.keys() == b_.keys() and all(torch.equal(a_[name], b_[name]) for name in a_)


def val_lines(folder: Path, run_id: str) -> dict[str, str]:
    """Loss by step, as the log states it."""
    lines = (folder / "logs" / f"{run_id}.txt").read_text().split("=" * 100)[-1].splitlines()
    return {line.split("/")[0]: line.split()[1] for line in lines if "val_loss:" in line and line.startswith("step:")}


# ----------------------------------------------------------------------------------------------------------------------
# States


def test_a_state_holds_every_tensor_in_its_dtype_and_loads_under_torchs_safe_default(workplace):
    low = dataclasses.replace(tiny().model, dtype=torch.bfloat16)
    cfg = dataclasses.replace(tiny(), model=low)
    trainer = Trainer(cfg, train_gpt.data_plan(cfg, 8), Runtime(), "reference", fp8=False)
    loader = train_gpt.TrainLoader(cfg, trainer.plan, Runtime())
    for step in range(2):
        trainer.train_step(step, next(loader))
    loader.close()
    log = SimpleNamespace(path=Path("logs/a.txt"), say=lambda text: None)
    state = torch.load(trainer.save(log, 2, 1.5))
    own = trainer.optimizer.states
    assert state["step"] == 2 and state["seconds"] == 1.5 and state["config"]["seed"] == 0
    assert set(state["model"]) == {name for name, _ in trainer.model.named_parameters()} | {"sign_table"}
    assert state["model"]["embed"].dtype == torch.bfloat16 and state["model"]["scalars"].dtype == torch.float32
    kinds = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "momentum": torch.float32}
    kinds |= {"second_moment": torch.float32, "mantissa": torch.uint16}
    saved = state["optimizer"]["tensors"]
    expected = {f"{label}.{kind}" for label in own for kind in kinds if getattr(own[label], kind) is not None}
    assert set(saved) == expected and saved["qk_bank.mantissa"].any()
    for name, tensor in saved.items():
        label, kind = name.split(".")
        assert tensor.dtype == kinds[kind] and torch.equal(tensor, getattr(own[label], kind)), name
    fresh = Trainer(dataclasses.replace(cfg, seed=5), trainer.plan, Runtime(), "reference", fp8=False)
    places = {name: p.data_ptr() for name, p in fresh.model.named_parameters()}
    fresh.load(checkpoints.read(state_file(workplace, "a", 2)))
    assert all(torch.equal(p, trainer.model.state_dict()[name]) for name, p in fresh.model.state_dict().items())
    for (name, _, a), (_, _, b) in zip(trainer.optimizer.tensors(), fresh.optimizer.tensors()):
        assert torch.equal(a, b), name
    assert {label: s.steps for label, s in fresh.optimizer.states.items()} == {k: s.steps for k, s in own.items()}
    assert places == {name: p.data_ptr() for name, p in fresh.model.named_parameters()}, "graphs point at them"


@pytest.mark.parametrize("every, steps", [(1, [2, 4, 6, 7]), (2, [2, 4, 6, 7]), (3, [4, 6, 7]), (5, [6, 7]), (99, [7])])
def test_states_are_saved_where_no_gradient_waits(call, workplace, monkeypatch, every, steps):
    """Adam sums two steps' gradients: a checkpoint that is due in between comes one step later. The last one is there
    before the last validation."""
    monkeypatch.setattr(Trainer, "train_step", lambda *_: torch.tensor(100.0))
    saved = lambda: [int(path.stem[-6:]) for path in sorted(workplace.glob("logs/a/*.pt"))]  # noqa: E731
    seen = []
    monkeypatch.setattr(Trainer, "validate", lambda _, step: (seen.append((step, saved())), 1.0)[1])
    assert call(tiny(checkpoint_every=every, run_id="a")) == (0, [])
    assert saved() == steps and seen[-1] == (7, steps)
    assert not list(workplace.glob("logs/a/.*")), "no partial file"


def test_without_checkpoint_every_nothing_is_written(call, workplace, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda *_: torch.tensor(100.0))
    assert call(tiny(checkpoint_every=0, run_id="a")) == (0, [])
    assert not list(workplace.glob("logs/*/"))


@pytest.mark.parametrize("step", [2, 4, 6, 7])
def test_a_resumed_run_equals_the_unbroken_one_bit_by_bit(whole, call, workplace, step):
    """Across stage changes (2, 4, 6) and the split (after step 5); its log names what it resumed."""
    path = state_file(whole, "whole", step)
    assert call(tiny(run_id="b", resume=str(path), val_every=2)) == (0, [])
    log = (workplace / "logs" / "b.txt").read_text().split("=" * 100)[-1]
    assert f"resumed: {path} (step {step}, clock " in log and f"step:{step}/7 train_time" not in log
    assert val_lines(workplace, "b")["step:7"] == val_lines(whole, "whole")["step:7"]
    if step < 7:
        assert same(state_file(workplace, "b", 7), state_file(whole, "whole", 7))


def test_the_clock_goes_on_and_stands_still_while_saving(call, workplace, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(train_gpt.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Trainer, "train_step", lambda *_: (now.__setitem__(0, now[0] + 1), torch.tensor(100.0))[1])
    write = checkpoints.write
    slowly = lambda *given: (now.__setitem__(0, now[0] + 50), write(*given))[1]  # noqa: E731
    monkeypatch.setattr(checkpoints, "write", slowly)
    assert call(tiny(run_id="a", checkpoint_every=4))[0] == 0
    assert call(tiny(run_id="b", resume="logs/a/state_step000004.pt"))[0] == 0
    for name in "ab":
        text = (workplace / "logs" / f"{name}.txt").read_text()
        assert re.search(r"^step:7/7 val_loss:\S+ train_time:7000ms step_avg:1000\.00ms$", text, re.M)


def test_warm_up_leaves_no_trace(workplace):
    """Every stage and the split run on the weights, and all is as new afterwards, in the same places."""
    cfg, log = tiny(val_tokens=1024), SimpleNamespace(say=lambda text: None)
    plan = train_gpt.data_plan(cfg, 8)
    fresh, warm = (Trainer(cfg, plan, Runtime(), "reference", fp8=False) for _ in range(2))
    places = [p.data_ptr() for p in warm.model.parameters()]
    warm.warm_up(log)
    assert all(
        torch.equal(p, q) and not p.grad.any() for p, q in zip(warm.model.parameters(), fresh.model.parameters())
    )
    assert not any(own.any() for _, _, own in warm.optimizer.tensors()) and not warm.optimizer.split
    assert all(state.steps == 0 for state in warm.optimizer.states.values()) and warm.stage == 0
    assert places == [p.data_ptr() for p in warm.model.parameters()]


def test_the_warm_up_cuts_the_data_once_and_takes_the_widest_steps_first(workplace, monkeypatch):
    cut, made = train_gpt.cut_batches, []
    cfg, log = tiny(val_tokens=1024), SimpleNamespace(say=lambda text: None)
    trainer = Trainer(cfg, train_gpt.data_plan(cfg, 8), Runtime(), "reference", fp8=False)
    monkeypatch.setattr(train_gpt, "cut_batches", lambda *given: made.append(given) or cut(*given))
    trained, validated = [], []
    monkeypatch.setattr(Trainer, "train_step", lambda _, step, batches: trained.append(step))
    monkeypatch.setattr(Trainer, "validate", lambda _, step, limit: validated.append(step))
    trainer.warm_up(log)
    assert len(made) == 1
    sizes = [train_gpt.stage_at(cfg, step).batch_tokens for step in trained]
    assert sorted(trained) == train_gpt.warmup_steps(cfg) and sizes == sorted(sizes, reverse=True)
    stages = [train_gpt.stage_index(cfg, step) for step in validated]
    assert sorted(stages[:-1]) == [0, 1, 2, 3] and validated[-1] == cfg.total_steps


def test_garbage_collection_rests_while_the_clock_runs(call, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "train_step", lambda *_: seen.append(gc.isenabled()) or torch.tensor(100.0))
    assert call(tiny()) == (0, []) and seen == [False] * 7 and gc.isenabled()
    monkeypatch.setattr(Trainer, "train_step", lambda *_: seen.append(gc.isenabled()) or torch.tensor(torch.nan))
    assert call(tiny())[0] == 1 and not any(seen) and gc.isenabled()


def test_a_step_leaves_no_garbage(workplace):
    """Which is why collection may rest."""
    cfg = tiny(val_tokens=1024)
    trainer = Trainer(cfg, train_gpt.data_plan(cfg, 8), Runtime(), "reference", fp8=False)
    gc.collect()
    with contextlib.closing(train_gpt.TrainLoader(cfg, trainer.plan, Runtime())) as loader:
        for step in range(2):
            trainer.train_step(step, next(loader))
    trainer.validate(2)
    assert gc.collect() < 100, "objects in cycles: a leak of tensors, or one a step"


def test_latest_is_the_newest_state(workplace):
    with pytest.raises(ValueError, match=r"^logs holds no checkpoint \(state_step\*.pt\): write some with checkpoint_"):
        checkpoints.find("latest")
    for k, name in enumerate(("old/state_step000900.pt", "new/state_step000002.pt", "new/state_step000010.pt")):
        path = workplace / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (k, k))
    (workplace / "logs" / "new" / ".state_step000012.pt.77.tmp").touch()  # of a process that was killed
    Path("latest").mkdir()
    Path("logs/latest").mkdir()
    Path("logs/latest/state_step000001.pt").touch()
    os.utime("logs/latest/state_step000001.pt", (1, 1))
    assert checkpoints.find("latest") == Path("logs/new/state_step000010.pt")  # the word, whatever bears it as a name
    assert checkpoints.find("old") == Path("logs/old/state_step000900.pt")
    assert checkpoints.find("somewhere/x.pt") == Path("somewhere/x.pt")


# ----------------------------------------------------------------------------------------------------------------------
# Refusals


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def rewrite(change):
    """A damage that changes a state's contents and saves it again."""

    def damage(path: Path) -> None:
        state = torch.load(path)
        torch.save(change(state) or state, path)

    return damage


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def swap(*keys, value):
    """Put a value into nested dictionaries."""

    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return rewrite(change)


NOT_OURS = r"is damaged or no checkpoint \(.+\): use another one\."
OTHER = r"belongs to another run: {}; give the same options and source, or start anew\."
DAMAGES = {
    "missing": (Path.unlink, r"cannot be read \(No such file or directory\): check the path\."),
    "empty": (lambda path: path.write_bytes(b""), NOT_OURS),
    "truncated": (cut, NOT_OURS),
    "one bit": (flip, NOT_OURS),
    "text": (lambda path: path.write_text("dear results\n"), NOT_OURS),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Evil())), NOT_OURS),
    "malicious": (
        lambda path: torch.save({"format": checkpoints.FORMAT, "step": Evil()}, path),
        r"asks for \w+\.mkdir, and a checkpoint holds tensors and plain values only: nothing of it was run; do not "
        r"trust where it comes from\.",
    ),
    "foreign": (
        rewrite(lambda state: state["model"]),
        r"is no checkpoint of this trainer \(it does not say 'speedrun state 1'\): use another one\.",
    ),
    "weights only": (
        rewrite(lambda state: state.pop("optimizer") and None),
        r"holds no valid optimizer, which is needed here: use another one\.",
    ),
    "a moment missing": (
        rewrite(lambda state: state["optimizer"]["tensors"].pop("embed.exp_avg") is None or None),
        r"cannot be resumed: embed\.exp_avg is missing, not torch\.float64 \(128, 48\); use another one\.",
    ),
    "another dtype": (
        swap("optimizer", "tensors", "qk_bank.momentum", value=torch.zeros(60, 16, 48, dtype=torch.bfloat16)),
        r"cannot be resumed: qk_bank\.momentum is torch\.bfloat16 \(60, 16, 48\), not torch\.float64 \(60, 16, 48\); "
        r"use another one\.",
    ),
    "a moment without storage": (
        swap("optimizer", "tensors", "qk_bank.momentum", value=torch.zeros(60, 16, 48, device="meta")),
        r"cannot be resumed: qk_bank\.momentum is no plain tensor, .+",
    ),
    "a sparse weight": (
        swap("model", "embed", value=torch.zeros(128, 48, dtype=torch.float64).to_sparse()),
        r"cannot be resumed: embed is no plain tensor, not torch\.float64 \(128, 48\); use another one\.",
    ),
} | {
    f"{'.'.join(keys)} = {value}": (
        swap(*keys, value=value),
        rf"cannot be resumed: no run saves such {re.escape('.'.join(keys[:2]))}; use another one\.",
    )
    for *keys, value in [
        ("step", 3), ("step", 10**6), ("step", -2), ("step", 0),
        ("seconds", math.nan), ("seconds", -5.0), ("world_size", -1),
        ("optimizer", "split", 1), ("optimizer", "steps", {}), ("optimizer", "steps", 5), ("optimizer", "tensors", 5),
        ("optimizer", "steps", "embed", "x"), ("optimizer", "steps", "embed", -1),
    ]
} | {
    "another option": (swap("config", "seed", value=7), OTHER.format(r"seed \(7 there, 0 here\)")),
    "another source": (
        swap("sources", "triton_kernels.py", value="0123456789abcdef"),
        OTHER.format(r"triton_kernels\.py \(0123456789abcdef there, [0-9a-f]{16} here\)"),
    ),
    "another sibling": (
        swap("sources", "exchange.py", value="0123456789abcdef"),
        OTHER.format(r"exchange\.py \(0123456789abcdef there, [0-9a-f]{16} here\)"),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_refused_before_anything_starts(whole, call, workplace, name):
    damage, sentence = DAMAGES[name]
    path = workplace / "state.pt"
    path.write_bytes(state_file(whole, "whole", 4).read_bytes())
    damage(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "start_runtime", lambda *_: pytest.fail("a refusal comes before the run"))
        code, told = call(tiny(run_id="b", resume=str(path)))
    assert code == 2 and len(told) == 1
    assert re.fullmatch(rf"error: {path} {sentence}", told[0]), told[0]
    assert not (workplace / "evil").exists() and not (workplace / "logs" / "b.txt").exists()


def test_options_that_may_differ(whole, call, workplace):
    """The name, what it resumes and how often it looks at itself; everything else is another run."""
    resume = str(state_file(whole, "whole", 6))
    assert call(tiny(run_id="b", resume=resume, checkpoint_every=0, val_every=1)) == (0, [])
    [told] = call(tiny(run_id="c", resume=resume, seed=1, micro_splits=2))[1]
    assert "seed (0 there, 1 here), micro_splits (1 there, 2 here)" in told


# ----------------------------------------------------------------------------------------------------------------------
# More ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processes(target, world_size: int, *arguments) -> list:
    started = [FORK.Process(target=target, args=(*arguments[:2], rank, world_size, *arguments[2:]))
               for rank in range(world_size)]  # fmt: skip
    for process in started:
        process.start()
    return started


def ended(started: list, timeout: float = 240) -> list[int]:
    """Exit codes; what does not end is killed and counts as hanging."""
    limit = time.monotonic() + timeout
    for process in started:
        process.join(max(0.1, limit - time.monotonic()))
    hung = [process for process in started if process.exitcode is None]
    for process in hung:
        process.kill()
        process.join()
    assert not hung, "a process hangs"
    return [process.exitcode for process in started]


@pytest.mark.parametrize("world_size", [2, 4])
def test_other_world_sizes(whole, workplace, world_size):
    """From one rank to more and back equals the unbroken run to rounding; at equal world size, bit by bit.

    On two ranks also: both stop, and the same one tells, where the loss of one is no number.
    """
    first, out = state_file(whole, "whole", 4), workplace / "result.json"
    started = processes(group, world_size, tiny(), workplace, free_port(), str(first), str(out))
    assert ended(started) == [0] * world_size
    result = json.loads(out.read_text())
    one = tensors(state_file(whole, "whole", 7))
    for name in result["losses"]:
        many = tensors(state_file(workplace, name, 7))
        assert many.keys() == one.keys(), "nothing depends on the world size, padding neither"
        for label, tensor in one.items():
            close = dict(rtol=1e-7, atol=1e-8 * tensor.abs().max().clamp(min=1e-9).item())
            torch.testing.assert_close(many[label], tensor, **close, msg=f"{name}: {label}")
    train_gpt.run(tiny(run_id="back", resume=str(state_file(workplace, "moved", 6))))
    losses = {val_lines(workplace, "back")["step:7"], val_lines(whole, "whole")["step:7"]}
    assert losses | {f"val_loss:{loss:.4f}" for loss in result["losses"].values()} == losses and len(losses) == 1
    if world_size == 2:
        assert result["losses"]["again"] == result["losses"]["whole"]
        lines = (workplace / "logs" / "whole.txt").read_text().splitlines()
        [told] = [line for line in lines if line.startswith("bigram_embed: gradients")]
        assert " travel densely; " in told and lines[lines.index(told) - 1].startswith("step:2/7 train_time")
        assert same(state_file(workplace, "again", 7), state_file(workplace, "whole", 7))
        for why, code, agreed in result["told"]:
            assert why.startswith("the training loss of rank 1 is nan at step 0, which is not finite: the run stops")
            assert code == 1 and agreed


# ----------------------------------------------------------------------------------------------------------------------
# Kills


SEED = random.randrange(2**32)
SOMETIME = [round(random.Random(SEED + k).uniform(0.1, 1.5), 2) for k in range(2)]  # seconds after the first step
CAMPAIGNS = {  # world sizes, taken in turn; where a rank dies; each attempt resumes what the ones before it left
    "one rank": ((1,), ["update 1", "write 1", "split 1", f"seconds {SOMETIME[0]}", "validation 1", "nothing 0"]),
    "more ranks": ((2, 4), ["split 1", f"seconds {SOMETIME[1]}", "nothing 0"]),
}


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_run_that_is_killed_again_and_again_ends_like_the_unbroken_one(whole, workplace, name):
    """At the first update, mid-write, in the split step, in a validation, at random moments; and resumed each time."""
    world_sizes, moments = CAMPAIGNS[name]
    for k, moment in enumerate(moments):
        kind, number = moment.split()
        resume = "latest" if list(workplace.glob("logs/*/state_step*.pt")) else ""
        size, cfg = world_sizes[k % len(world_sizes)], tiny(run_id=f"run{k}", resume=resume)
        given = cfg, workplace, free_port(), (kind, float(number))
        codes = ended(processes(rank_of_a_run, size, *given))
        told = (workplace / "rank0.out").read_text()
        if kind == "nothing" or kind == "seconds" and codes == [0] * size:
            assert codes == [0] * size, told
        else:
            assert codes == [1] * (size - 1) + [-signal.SIGKILL], (SOMETIME, moment, told)
            assert told.count("error: rank 0 lost the others in a collective (") == (size > 1), told
    last = f"run{len(moments) - 1}"
    assert val_lines(workplace, last)["step:7"] == val_lines(whole, "whole")["step:7"], SOMETIME
    if world_sizes == (1,):
        assert same(checkpoints.find("latest"), state_file(whole, "whole", 7)), SOMETIME


def test_a_rank_that_hangs_is_given_up_after_the_timeout(workplace):
    started = processes(rank_of_a_run, 2, tiny(run_id="a"), workplace, free_port(), ("hang", 3))
    started[0].join(240)
    started[1].kill()
    assert started[0].exitcode == 1
    told = (workplace / "rank0.out").read_text()
    assert "error: rank 0 lost the others in a collective (" in told and "Traceback" not in told
    assert "one of them died or hangs" in (workplace / "logs" / "a.txt").read_text()


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def start(cfg, folder: Path, moment=("nothing", 0.0)):
    [process] = processes(rank_of_a_run, 1, cfg, folder, 0, moment)
    return process


def wait_for(path: Path, text: str) -> None:
    limit = time.monotonic() + 240
    while not (path.exists() and text in path.read_text().split("=" * 100)[-1]):
        assert time.monotonic() < limit, f"{text} does not appear in {path}"
        time.sleep(0.02)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_run_after_a_whole_state(whole, call, workplace, number, code):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("these tests run under nohup")
    process = start(tiny(run_id="a", checkpoint_every=0), workplace)
    wait_for(workplace / "logs" / "a.txt", "step:1/7 train_time")
    os.kill(process.pid, number)
    if number == signal.SIGHUP:  # a closing terminal sends it twice
        time.sleep(0.02)
        os.kill(process.pid, number)
    assert ended([process]) == [code]
    told, [path] = (workplace / "rank0.out").read_text(), (workplace / "logs" / "a").iterdir()
    step = int(path.stem[-6:])
    why = f"{number.name} stopped the run after step {step} of 7: go on with resume={path.relative_to(workplace)}"
    assert f"error: {why}" in told and "Traceback" not in told
    assert "finishing what is in hand, saving if steps are left; a second signal ends it" in told
    assert why in (workplace / "logs" / "a.txt").read_text()
    assert call(tiny(run_id="b", resume="latest")) == (0, [])
    assert same(state_file(workplace, "b", 7), state_file(whole, "whole", 7))


def test_a_second_signal_ends_it_at_once(workplace):
    process = start(tiny(run_id="a"), workplace, ("hang", 1.0))  # a first step of a minute
    wait_for(workplace / "logs" / "a.txt", "step:0/7 val_loss")
    os.kill(process.pid, signal.SIGINT)
    process.join(1)
    assert process.exitcode is None, "the first one finishes the step"
    os.kill(process.pid, signal.SIGINT)
    assert ended([process], 5) == [130] and not (workplace / "logs" / "a").exists()


def test_a_signal_before_training(call, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_gpt, "data_plan", interrupt)
    assert call(tiny()) == (130, ["error: interrupted outside the training loop: nothing new was saved."])


def test_torchrun_passes_its_signal_on(whole, call, workplace):
    """Both ranks agree on the step; rank 0 saves; no process stays behind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = {"run_id": "a", "checkpoint_every": 0, "scheduled_steps": 300, "epochs": 30}
    process = subprocess.Popen(
        [*command, str(HERE / "checkpoint_worker.py"), json.dumps(options)], cwd=workplace, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(workplace / "logs" / "a.txt", "step:2/301 train_time")
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.terminate()
    told = process.communicate(timeout=240)[0]
    [path] = (workplace / "logs" / "a").iterdir()
    step = int(path.stem[-6:])
    assert process.returncode != 0 and f"error: SIGTERM stopped the run after step {step} of 301" in told
    assert told.count("go on with resume=") == 1
    assert torch.load(path)["step"] == step and torch.load(path)["world_size"] == 2
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)


# ----------------------------------------------------------------------------------------------------------------------
# What goes wrong inside


def poison(monkeypatch, at: int, label: str = "scalars") -> None:
    """A NaN in one gradient of the at-th update."""
    step, calls = train_gpt.NorMuonAndAdam.step, []

    def poisoned(self, **named):
        calls.append(None)
        if len(calls) == at:
            self.states[label].param.grad.view(-1)[0] = torch.nan
        return step(self, **named)

    monkeypatch.setattr(train_gpt.NorMuonAndAdam, "step", poisoned)


def test_a_nan_reaches_no_checkpoint(call, workplace, monkeypatch):
    poison(monkeypatch, 4)
    code, told = call(tiny(run_id="a", val_every=100))
    assert code == 1
    assert told == ["error: after step 4 a parameter is no longer finite: nothing is saved, the run stops."]
    assert [path.name for path in (workplace / "logs" / "a").iterdir()] == ["state_step000002.pt"]
    assert told[0].removeprefix("error: ") in (workplace / "logs" / "a.txt").read_text()


def test_a_nan_is_seen_within_a_few_steps(call, monkeypatch):
    poison(monkeypatch, 2)  # the second update is Adam's first
    monkeypatch.setattr(Watch, "EVERY", 1)
    code, told = call(tiny(checkpoint_every=0, val_every=100))
    assert code == 1 and told == [
        "error: the training loss of rank 0 is nan at step 2, which is not finite: the run stops, earlier "
        "checkpoints stay."
    ]


def test_a_nan_is_seen_by_validation(call, monkeypatch):
    poison(monkeypatch, 2)
    code, told = call(tiny(checkpoint_every=0, val_every=3))
    assert code == 1 and told[0].startswith("error: the validation loss is nan at step 3, which is not finite")


def test_the_watch_lags_by_its_interval_and_knows_an_explosion():
    watch = Watch(0, 1, torch.device("cpu"), limit=10.0)
    for step in range(5 * watch.EVERY):
        watch.observe(step, torch.tensor(9.9 if step < 2 * watch.EVERY else 1e3), 1.0)
        if step == 3 * watch.EVERY - 1:
            break
    with pytest.raises(
        Stopped, match="rank 0 is 1000 at step 8, which is more than twice that of equal guesses"
    ) as told:
        watch.observe(3 * watch.EVERY, torch.tensor(1e3), 1.0)
    assert told.value.code == 1


def test_training_loss_is_watched_per_token(call, monkeypatch):
    """The first loss is about that of equal guesses among the padded vocabulary, whatever stage and weights are."""
    seen = []
    monkeypatch.setattr(Watch, "observe", lambda self, step, loss, scale: seen.append(loss.item() * scale))
    assert call(tiny(checkpoint_every=0, val_every=100))[0] == 0
    assert abs(seen[0] - np.log(128)) < 0.1 and max(seen) < np.log(128) * 1.1 and min(seen) > 3


def no_space(state, file):
    file.write(b"half a file")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_killed_write_left_goes_with_the_next(tmp_path):
    left, other = tmp_path / ".state_step000002.pt.77.tmp", tmp_path / "mine.tmp"
    left.touch(), other.touch()
    assert checkpoints.write(tmp_path / "state_step000004.pt", {}) == ""
    assert not left.exists() and other.exists() and (tmp_path / "state_step000004.pt").exists()


def test_a_full_disk(call, workplace, monkeypatch):
    """One sentence, nothing partial, the last good state kept and named."""
    save, calls = torch.save, []
    monkeypatch.setattr(torch, "save", lambda *given: (calls.append(0), (save if len(calls) < 2 else no_space)(*given)))
    code, told = call(tiny(run_id="a"))
    assert code == 1 and told == [
        "error: rank 0 could not save step 4: logs/a/state_step000004.pt cannot be written (No space left on device): "
        "free some space; then go on with resume=logs/a/state_step000002.pt."
    ]
    assert [path.name for path in (workplace / "logs" / "a").iterdir()] == ["state_step000002.pt"]
    monkeypatch.undo()


def test_a_disk_that_is_full_at_the_end_costs_no_result(call, workplace, monkeypatch):
    """The last validation comes all the same, then the sentence."""
    monkeypatch.setattr(torch, "save", no_space)
    code, told = call(tiny(run_id="a", checkpoint_every=100))
    assert code == 1 and told[0].startswith("error: rank 0 could not save step") and told[1:] == []
    assert "there is no earlier checkpoint of this run" in told[0]
    last = [line for line in (workplace / "logs" / "a.txt").read_text().splitlines() if line.startswith("step:")][-1]
    step = last.partition(" ")[0].removeprefix("step:").split("/")
    assert step[0] == step[1] and "val_loss:" in last and f"save step {step[1]}:" in told[0]
    monkeypatch.undo()


def test_a_limit_of_the_system_itself(workplace):
    """The kernel refuses to let the file grow: torch wraps that error, the sentence does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        told = checkpoints.write(workplace / "a" / "state_step000002.pt", {"model": torch.zeros(10**6)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert told.endswith(
        "cannot be written (File too large): free some space; there is no earlier checkpoint of this run."
    )
    assert list((workplace / "a").iterdir()) == []


def test_out_of_memory(call, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Trainer, "train_step", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**29, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 23 * 2**30)
    for splits, more in (2, "set micro_splits=4, or "), (train_gpt.MAXIMUM["micro_splits"], ""):
        assert call(tiny(micro_splits=splits)) == (1, [
            "error: rank 0 ran out of GPU memory (0.5 of 24.0 GiB free, 23.0 GiB at this run's peak): "
            f"{more}free the GPU of other work."
        ])  # fmt: skip


def test_a_fault_of_our_own_keeps_its_traceback(call, monkeypatch):
    def fail(*_):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(Trainer, "train_step", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        call(tiny())


# ----------------------------------------------------------------------------------------------------------------------
# Text from a state


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo state after no step, with random weights that make losses differ, its trainer and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    cfg = train_gpt.parse_options(["preset=demo", "val_tokens=16384", f"val_files={folder}/val_*.bin"])
    tokens = np.random.default_rng(3).integers(0, 256, 16385)
    tokens[::200] = 256
    train_gpt.write_shard(folder / "val_000000.bin", tokens)
    plan = train_gpt.DataPlan([], [folder / "val_000000.bin"], {2048: 128})
    trainer = Trainer(cfg, plan, Runtime(), "reference", fp8=False)
    randomize(trainer.model, size=0.05)
    trainer.model.refresh(fp8=False)
    with inside(folder):
        trainer.save(SimpleNamespace(path=Path("logs/demo.txt"), say=lambda text: None), 102, 1.0)
    return SimpleNamespace(folder=folder, trainer=trainer, state=state_file(folder, "demo", 102))


def text_of(*arguments, capsys) -> str:
    threads = torch.get_num_threads()
    generate.main(list(map(str, arguments)))
    torch.set_num_threads(threads)
    return capsys.readouterr().out


def test_the_loss_is_the_trainers(demo, monkeypatch, capsys):
    monkeypatch.chdir(demo.folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loss, seen, exact = demo.trainer.validate(102), [], generate.validation_loss
    monkeypatch.setattr(generate, "validation_loss", lambda trained: seen.append(exact(trained)) or seen[0])
    assert text_of("demo", "--loss", capsys=capsys) == f"step:102/102 val_loss:{loss:.4f}\n"
    assert seen == [loss]


def test_text(demo, monkeypatch, capsys):
    """The same seed gives the same text, another one another; a prompt of any length; no shards are needed."""
    monkeypatch.chdir(demo.folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ("--max-tokens", 12, "--prompt", "Naïve ☃")
    one, two, other = (text_of("latest", *options, "--seed", seed, capsys=capsys) for seed in (1, 1, 2))
    assert one == two != other and one.startswith("Naïve ☃") and one.endswith("\n")
    assert text_of(demo.state, "--temperature", 0, "--max-tokens", 3, capsys=capsys)
    assert text_of(demo.state, "--top-k", 1, "--max-tokens", 3, capsys=capsys) == text_of(
        demo.state, "--temperature", 0, "--max-tokens", 3, capsys=capsys
    )


def test_logits_are_the_models_and_do_not_see_the_filling(demo, monkeypatch):
    trained, context = generate.load(demo.state, torch.device("cpu")), [256, *b"some bytes of a context"]
    generate.look_at(trained, 256)
    logits = generate.next_logits(trained, context)
    monkeypatch.setattr(generate, "BUCKET", 1)
    torch.testing.assert_close(generate.next_logits(trained, context), logits, rtol=1e-4, atol=1e-4)
    losses = []
    for target in (5, 77):  # losses of two targets differ as their logits do
        tokens = np.array([*context, target])
        batch = train_gpt.packed_batch(tokens, np.array([0]), 16, trained.cfg.model.bigram_rows, torch.device("cpu"))
        losses.append(trained.model(batch, trained.view._replace(max_len=256))[-1])
    torch.testing.assert_close(losses[0] - losses[1], logits[77] - logits[5], rtol=1e-4, atol=1e-4)


def test_bytes_are_decoded_as_they_come(demo, monkeypatch, capsys):
    """A character of three bytes appears once it is whole; what is no text is shown as such."""
    monkeypatch.setattr(generate, "generate", lambda *_, **__: iter("☃".encode() + b"\xff!"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert text_of(demo.state, capsys=capsys) == "☃\N{REPLACEMENT CHARACTER}!\n"


def test_bytes_of_gpt2_like_tokens():
    """A token may be part of a character."""
    import tiktoken

    ranks = {bytes([i]): i for i in range(256)} | {"☃".encode()[:2]: 256}
    encoding = tiktoken.Encoding("toy", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 257})
    tokens = encoding.encode_ordinary("a☃")
    assert tokens == [97, 256, 0x83]
    assert b"".join(generate.token_bytes(encoding, token) for token in tokens) == "a☃".encode()


def test_sampling():
    logits, generator = torch.tensor([0.0, 2.0, 1.0, -1.0]), torch.Generator().manual_seed(0)
    assert generate.sample(logits, 0, 0, generator) == 1
    assert {generate.sample(logits, 5.0, 2, generator) for _ in range(100)} == {1, 2}
    assert {generate.sample(logits, 5.0, 0, generator) for _ in range(300)} == {0, 1, 2, 3}
    assert generate.sample(logits, 1e-320, 2, generator) == 1
    counts = np.bincount([generate.sample(logits, 1.0, 0, generator) for _ in range(4000)], minlength=4) / 4000
    expected = torch.softmax(logits, 0).numpy()
    assert (abs(counts - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000)).all()


def test_weights_alone_are_enough(demo, tmp_path):
    state = torch.load(demo.state)
    del state["optimizer"], state["seconds"]
    torch.save(state, tmp_path / "weights.pt")
    assert generate.load(tmp_path / "weights.pt", torch.device("cpu")).step == 102


def test_generate_refuses_in_one_sentence(tmp_path, monkeypatch):
    script = str(HERE.parent / "evals" / "generate.py")
    done = subprocess.run([sys.executable, script, "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    told = "error: nowhere cannot be read (No such file or directory): check the path.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    monkeypatch.chdir(tmp_path)
    for arguments, sentence in (
        (["latest"], "logs holds no checkpoint"),
        (["x", "--temperature", "-1"], "--temperature must be from 0"),
        (["x", "--temperature", "nan"], "--temperature must be from 0"),
        (["x", "--seed", "9" * 23], "--seed must be from 0"),
        (["x", "--max-tokens", "0"], "--max-tokens must be from 1"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            generate.main(arguments)


@pytest.mark.parametrize("where", ["kept", "logs/kept", "logs/kept/", "logs/kept.txt"])
def test_a_run_that_kept_no_checkpoint(where, tmp_path, monkeypatch):
    """Its log may be all there is, or its folder may be empty; a log names the states beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "kept.txt").touch()
    told = r"^(logs/)?kept kept no checkpoint \(state_step\*\.pt\): run it again with checkpoint_every=N steps\.$"
    with pytest.raises(ValueError, match=told):
        generate.find(where)
    (tmp_path / "logs" / "kept").mkdir()
    with pytest.raises(ValueError, match=told):
        generate.find(where)
    state_file(tmp_path, "kept", 5).touch()
    assert generate.find(where) == Path("logs/kept/state_step000005.pt")


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda state: state.update(model={1: 2}), "does not fit this model"),
        (lambda state: state["config"].update(tiger=3), r"does not fit this model \(unknown option 'tiger=3'"),
        (lambda state: state.update(step=103), r"does not fit this model \(step 103 is not among its 102 steps"),
        (lambda state: state["model"]["embed"].fill_(torch.nan), "holds numbers that are not finite, in embed: use"),
    ],
)
def test_generate_names_the_file_that_it_cannot_use(demo, tmp_path, change, told):
    state = torch.load(demo.state)
    change(state)
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"^{tmp_path}/other.pt {told}"):
        generate.load(tmp_path / "other.pt", torch.device("cpu"))


def test_weights_too_large_to_sample_from(demo):
    trained = generate.load(demo.state, torch.device("cpu"))
    trained.model.lm_head.fill_(3e38)
    generate.look_at(trained, 256)
    with pytest.raises(ValueError, match="^the logits at token 3 are not finite"):
        generate.next_logits(trained, [256, 5, 7])


def test_a_vocabulary_without_an_encoding():
    with pytest.raises(ValueError, match="a vocabulary of its own"):
        generate.encoding_of(tiny())
