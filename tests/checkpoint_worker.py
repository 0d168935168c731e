"""Runs of test_checkpoints.py in processes of their own, which may be killed: one rank each, without torchrun.

As a program it is a whole run of the small configuration, for signals and for torchrun: python checkpoint_worker.py
'{"run_id": "a"}' [seconds that each step sleeps].
"""

import io
import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from helpers import small_run

import checkpoints
import train_gpt
from train_gpt import NorMuonAndAdam, RunConfig, RunLog, Trainer

DIE = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731


def tiny(**changes):
    """Seven steps through three stages, the extension and (after step 5) the split."""
    values = dict(scheduled_steps=6, extension_steps=1, val_every=3, val_tokens=1024, checkpoint_every=2)
    return small_run(**(values | changes))


def main_with(cfg: RunConfig) -> int:
    """train_gpt's main, for a configuration that options cannot state."""
    train_gpt.parse_options = lambda _: cfg
    return train_gpt.main([])


def before(owner: type | object, name: str, wanted, action) -> None:
    """Do `action` at the beginning of the `wanted`-th call (counted from 1) of owner.name."""
    method, calls = getattr(owner, name), []

    def wrapped(*given, **named):
        calls.append(None)
        if len(calls) == wanted:
            action()
        return method(*given, **named)

    setattr(owner, name, wrapped)


def half_a_file(state, file) -> None:
    """torch.save by a process that dies in the middle of it."""
    whole = io.BytesIO()
    SAVE(state, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()
    DIE()


SAVE = torch.save
# Where a rank can die: a kind and a number.
MOMENTS = {
    "seconds": lambda n: threading.Timer(n, DIE).start(),
    "update": lambda n: before(NorMuonAndAdam, "step", n, DIE),
    "split": lambda n: before(NorMuonAndAdam, "split_embed", n, DIE),
    "validation": lambda n: before(Trainer, "validate", n, DIE),
    "write": lambda n: before(checkpoints, "write", n, lambda: setattr(torch, "save", half_a_file)),
    "hang": lambda n: before(NorMuonAndAdam, "step", n, lambda: time.sleep(60)),
    "nothing": lambda n: None,
}


def rank_of_a_run(cfg: RunConfig, folder: Path, rank: int, world_size: int, port: int, moment: tuple[str, float]):
    """One rank; what it prints goes to rank<k>.out."""
    os.chdir(folder)
    out = os.open(f"rank{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1), os.dup2(out, 2)
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if moment[0] == "hang":
        train_gpt.COLLECTIVE_TIMEOUT = timedelta(seconds=3)
    if rank == (0 if moment[0] == "write" else world_size - 1):
        MOMENTS[moment[0]](moment[1])
    os._exit(main_with(cfg))


def group(cfg: RunConfig, folder: Path, rank: int, world_size: int, port: int, first: str, out: str) -> None:
    """One process group for all that needs one: resume, an unbroken run, a run resumed at equal world size, NaN."""
    os.chdir(folder)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    checkpoints.Watch.EVERY = 2  # steps: the run is short
    runtime = train_gpt.start_runtime(rank, rank, world_size)

    def run(name: str, resume: str = "", poison=None) -> float:
        plan, saved = train_gpt.prepare(tiny(resume=resume), world_size)
        trainer = Trainer(cfg, plan, runtime, "reference", fp8=False)
        if poison:
            poison(trainer)
        return train_gpt.train(trainer, RunLog(Path("logs") / f"{name}.txt" if runtime.main else None), saved)

    def nan_on_rank_1(trainer: Trainer) -> None:
        step = trainer.train_step
        trainer.train_step = lambda n, batches: step(n, batches) * (float("nan") if rank == 1 else 1.0)

    result = {"resumed": run(f"from1on{world_size}", first), "whole": run(f"on{world_size}")}
    result["again"] = run(f"again{world_size}", f"logs/on{world_size}/state_step000004.pt")
    try:
        run(f"nan{world_size}", poison=nan_on_rank_1)
    except train_gpt.Stopped as stop:
        told = [None] * world_size
        torch.distributed.all_gather_object(told, (str(stop), stop.code, stop.agreed))
        result["told"] = told
    if runtime.main:
        Path(out).write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        before_step = Trainer.train_step
        Trainer.train_step = lambda *given: (time.sleep(float(sys.argv[2])), before_step(*given))[1]
    sys.exit(main_with(tiny(**json.loads(sys.argv[1]))))
