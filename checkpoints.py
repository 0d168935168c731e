"""checkpoints.py: what lets a run survive: files that are whole or absent, states that are safe to read, early ends.

Knows nothing of the model: a state is a dictionary of tensors and plain values.
"""

import contextlib
import math
import os
import pickle
import re
import signal
import sys
import time
import zipfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from exchange import all_gather

FORMAT = "speedrun state 1"
FIELDS = {
    "step": int,  # optimizer steps done: also the position in the data and in the schedule
    "seconds": float,  # on the clock
    "world_size": int,  # of the run that wrote it; the tensors do not depend on it
    "config": dict,  # every option
    "sources": dict,  # source file -> start of its sha256
    "model": dict,  # label -> parameter or buffer, without padding
    "optimizer": dict,  # see NorMuonAndAdam.snapshot
}


class Stopped(Exception):
    """Why a run ends early, in one sentence. `agreed`: every rank raises it together, and one of them tells."""

    def __init__(self, why: str, code: int = 1, agreed: bool = True):
        super().__init__(why)
        self.code, self.agreed = code, agreed


# === Files ===


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name when it is whole and on the disk, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save(path: Path, state: dict[str, object], like: dict[str, Tensor], rank: int, world_size: int) -> None:
    """Write a state on rank 0. Collective; raises Stopped on every rank where it cannot be, and leaves no file then.

    Tensors are cut to the shapes in `like`: what lies behind is padding. state["optimizer"] is a function that passes
    its tensors through another, one by one as they are gathered from all ranks, so that no GPU holds them all.
    """
    if not all(tensor.isfinite().all() for tensor in state["model"].values()):
        raise Stopped(f"after step {state['step']} a parameter is no longer finite: nothing is saved, the run stops.")

    def keep(name: str, full: Tensor) -> Tensor | None:
        return leading(full, like.get(name, full)).to("cpu", copy=True) if rank == 0 else None

    model = {name: keep(name, tensor) for name, tensor in state["model"].items()}
    state = {"format": FORMAT} | state | {"model": model, "optimizer": state["optimizer"](keep)}
    told = [write(path, state) if rank == 0 else ""]
    if world_size > 1:
        dist.broadcast_object_list(told)
    if told[0]:
        raise Stopped(f"rank 0 could not save step {state['step']}: {told[0]}")


def write(path: Path, state: dict[str, object]) -> str:
    """Save a state. One sentence where that fails, else ''."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(".state_step*.tmp"):  # of a process that was killed while it wrote
            leftover.unlink()
        with whole_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch wraps some of the disk's errors
        cause = error if isinstance(error, OSError) else error.__context__ or error
        last = newest(path.parent.glob("state_step*.pt"))
        kept = f"then go on with resume={last}" if last else "there is no earlier checkpoint of this run"
        return f"{path} cannot be written ({getattr(cause, 'strerror', None) or cause}): free some space; {kept}."
    return ""


def newest(paths: Iterator[Path]) -> Path | None:
    return max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def find(where: str, logs: Path = Path("logs")) -> Path:
    """`latest`: the newest state in logs/; a run's name or folder: its newest; else the file itself. Or ValueError."""
    folder = None if where == "latest" else next((p for p in (Path(where), logs / where) if p.is_dir()), None)
    if where != "latest" and not folder:
        return Path(where)
    found = newest(folder.glob("state_step*.pt") if folder else logs.glob("*/state_step*.pt"))
    if not found:
        raise ValueError(f"{folder or logs} holds no checkpoint (state_step*.pt): write some with checkpoint_every=.")
    return found


def read(path: Path, needs: Iterable[str] = FIELDS) -> dict:
    """A state, its tensors mapped from the file. Runs nothing that the file holds. ValueError, one sentence, if bad."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not look at checksums
        state = None if damaged else torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check the path.") from None
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} asks for {wanted[1] if wanted else 'code'}, and a checkpoint holds tensors and plain values only: "
            "nothing of it was run; do not trust where it comes from."
        ) from None
    except Exception as error:  # a broken or hostile archive may raise anything
        damaged = str(error).splitlines()[0] if str(error) else type(error).__name__
    if damaged:
        raise ValueError(f"{path} is damaged or no checkpoint ({damaged}): use another one.")
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of this trainer (it does not say {FORMAT!r}): use another one.")
    if lacking := [name for name in needs if not isinstance(state.get(name), FIELDS[name])]:
        raise ValueError(f"{path} holds no valid {', '.join(lacking)}, which is needed here: use another one.")
    return state


def read_to_resume(
    where: str, facts: dict[str, dict], may_differ: set[str], like: dict[str, Tensor], steps: Container[int]
) -> dict:
    """A state, and its path, that this run can go on from: same options, sources and tensors, after one of the steps
    where a run saves. Raises ValueError."""
    path = find(where)
    state = read(path)
    then, now = (given["config"] | given["sources"] for given in (state, facts))
    differing = [name for name in now if name not in may_differ and then.get(name) != now[name]]
    if differing:
        told = ", ".join(f"{name} ({then.get(name)} there, {now[name]} here)" for name in differing)
        raise ValueError(f"{path} belongs to another run: {told}; give the same options and source, or start anew.")
    step, optimizer, labels = state["step"], state["optimizer"], {name for name in like if "." not in name}
    updates, tensors = optimizer.get("steps"), optimizer.get("tensors")
    sound = {
        "step": type(step) is int and step in steps,
        "seconds": 0 <= state["seconds"] < math.inf,
        "world_size": type(state["world_size"]) is int and state["world_size"] > 0,
        "optimizer.split": isinstance(optimizer.get("split"), bool),
        "optimizer.steps": isinstance(updates, dict) and set(updates) == labels
        and all(type(count) is int and count >= 0 for count in updates.values()),
        "optimizer.tensors": isinstance(tensors, dict),
    }  # fmt: skip
    if unsound := [name for name, is_sound in sound.items() if not is_sound]:
        raise ValueError(f"{path} cannot be resumed: no run saves such {', '.join(unsound)}; use another one.")
    found = state["model"] | tensors
    for name, wanted in like.items():
        got = found.get(name)
        plain = isinstance(got, Tensor) and got.layout == torch.strided and not got.is_meta
        if not plain or (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            is_ = f"{got.dtype} {tuple(got.shape)}" if plain else "missing" if got is None else "no plain tensor"
            raise ValueError(
                f"{path} cannot be resumed: {name} is {is_}, not {wanted.dtype} {tuple(wanted.shape)}; use another one."
            )
    return state | {"path": path}


def leading(held: Tensor, like: Tensor) -> Tensor:
    """The part of `held` that is as large as `like`; the rest is padding."""
    return held[tuple(map(slice, like.shape))]


def copy_into(held: Tensor, fresh: Tensor) -> None:
    """Overwrite the leading part of a tensor in place."""
    leading(held, fresh).copy_(fresh)


# === Early ends ===


class Watch:
    """Looks out for what ends a run early: signals, and a loss that is no number or far worse than guessing.

    Training does not wait for it. A loss is copied to the host behind the step and read EVERY steps later; ranks tell
    each other of losses and signals over gloo, and hear the answer after another EVERY steps. Alone, a process sees its
    signal after the step in hand.
    """

    EVERY = 4  # steps

    def __init__(self, rank: int, world_size: int, device: torch.device, limit: float):
        self.rank, self.world_size, self.limit = rank, world_size, limit
        self.received = 0  # number of the signal that this rank got
        self.agreed = 0  # number of the signal that all ranks know of
        self.copied = torch.cuda.Event() if device.type == "cuda" else None
        self.loss = torch.zeros((), pin_memory=device.type == "cuda")
        self.noted: tuple[int, float] | None = None  # step and scale of the loss on its way to the host
        self.exchange: tuple[int, Tensor, dist.Work] | None = None  # step, (signal, loss) by rank

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While inside, a first SIGINT, SIGTERM or SIGHUP is noted, and a second SIGINT or SIGTERM ends the process at
        once; a closing terminal sends SIGHUP twice. Under nohup SIGHUP stays ignored (but torchrun undoes that)."""
        launched, since = "TORCHELASTIC_RUN_ID" in os.environ, 0.0

        def note(number: int, _) -> None:
            nonlocal since
            if not self.received:
                self.received, since = number, time.monotonic()
                if self.rank == 0:
                    with contextlib.suppress(OSError):  # the terminal may be gone; not print(), it may be interrupted
                        os.write(2, b"\nfinishing what is in hand, saving if steps are left; a second signal ends it\n")
            elif number != signal.SIGHUP and (not launched or time.monotonic() > since + 1):
                os._exit(128 + number)  # not within a second of a launcher's, which passes on what its ranks have got

        hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def observe(self, step: int, loss: Tensor, scale: float) -> None:
        """Call after every step, on every rank; loss * scale is the mean loss of a token. Raises Stopped."""
        if self.world_size == 1:
            self.agreed = self.received
        if step % self.EVERY:
            return
        if self.exchange:
            told_of, everyone, work = self.exchange
            work.wait()
            self._judge(told_of, everyone)
        if self.noted:
            self._tell(*self.noted)
        self.loss.copy_(loss, non_blocking=True)
        if self.copied:
            self.copied.record()
        self.noted = step, scale

    def _tell(self, step: int, scale: float) -> None:
        if self.copied:
            self.copied.synchronize()  # of EVERY steps ago: it has long been reached
        own = torch.tensor([[self.received, self.loss.item() * scale]], dtype=torch.float64)
        if self.world_size == 1:
            return self._judge(step, own)
        everyone = own.new_empty(self.world_size, 2)
        self.exchange = step, everyone, all_gather(everyone, own, async_op=True)

    def _judge(self, step: int, everyone: Tensor) -> None:
        signals, losses = everyone.T.tolist()
        self.agreed = int(max(signals))
        for rank, loss in enumerate(losses):
            self.check(f"training loss of rank {rank}", step, loss)

    def check(self, what: str, step: int, loss: float) -> None:
        """Raises Stopped where a loss is no number or above the limit."""
        if not loss <= self.limit:
            why = "more than twice that of equal guesses" if math.isfinite(loss) else "not finite"
            raise Stopped(
                f"the {what} is {loss:.4g} at step {step}, which is {why}: the run stops, earlier checkpoints stay."
            )

    def leave(self, where: str) -> None:
        """Raises Stopped if the ranks agreed on a signal."""
        if self.agreed:
            raise Stopped(f"{signal.Signals(self.agreed).name} stopped the run {where}", code=128 + self.agreed)


LOST = re.compile(r"timed? ?out|connection|peer|gloo|nccl", re.I)  # how torch words a collective that failed


@contextlib.contextmanager
def telling(rank: int, world_size: int, log, micro_splits: int, most_splits: int) -> Iterator[None]:
    """Put what may befall a run into one sentence, in the log too. A rank that fails alone does not wait for others."""
    try:
        try:
            yield
        except torch.OutOfMemoryError:
            amounts = (*torch.cuda.mem_get_info(), torch.cuda.max_memory_allocated())
            free, total, peak = (amount / 2**30 for amount in amounts)
            smaller = f"set micro_splits={2 * micro_splits}, or " if 2 * micro_splits <= most_splits else ""
            raise Stopped(
                f"rank {rank} ran out of GPU memory ({free:.1f} of {total:.1f} GiB free, {peak:.1f} GiB at this run's "
                f"peak): {smaller}free the GPU of other work.",
                agreed=False,
            ) from None
        except ValueError as problem:  # of data or a file that only this rank met
            raise Stopped(f"rank {rank}: {problem}", code=2, agreed=False) from None
        except RuntimeError as problem:
            if world_size == 1 or not LOST.search(str(problem)):
                raise
            why = str(problem).strip().splitlines()[0]
            raise Stopped(
                f"rank {rank} lost the others in a collective ({why}): one of them died or hangs, torchrun's report "
                "tells which; go on with resume=latest if a checkpoint was saved.",
                agreed=False,
            ) from None
    except Stopped as stop:
        log.write(str(stop))
        if world_size > 1 and not stop.agreed:
            print(f"error: {stop}", file=sys.stderr, flush=True)
            os._exit(stop.code)
        raise
