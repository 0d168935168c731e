"""What a run asks of its machine before any GPU work (ranks, GPU, compiler, log folder), and the log it writes.

check_* give one sentence that names rule, value and remedy, or '' where nothing is wrong, so that a user reads all of
them at once; launched_ranks and try_gpu raise ValueError with theirs.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

import triton_kernels as kernels


def launched_ranks() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun gives them; (0, 0, 1) without a launcher. Raises ValueError."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = [name for name in names if os.environ.get(name, "") != ""]
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        raise ValueError(f"{', '.join(given)} is set but {missing} is not: start with torchrun train_gpt.py.")
    values = [os.environ.get(name) or default for name, default in zip(names, ("0", "0", "1"))]
    told = ", ".join(f"{name}={value}" for name, value in zip(names, values))
    if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[2]):
        raise ValueError(f"ranks must be whole numbers below WORLD_SIZE; got {told}: start with torchrun.")
    if int(values[2]) > 1 and not (os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")):
        raise ValueError(f"{told} need MASTER_ADDR and MASTER_PORT to find each other: start with torchrun.")
    return tuple(map(int, values))


def check_device(preset: str, world_size: int) -> str:
    """One sentence where this machine cannot run the preset, else ''."""
    if sys.platform == "win32":
        return "native Windows is not supported: use Linux or WSL2."
    if not torch.cuda.is_available():
        if preset == "demo":
            return ""
        return "no NVIDIA GPU is visible, and preset=record needs one or more: on this machine run ./run.sh demo."
    if torch.version.hip:
        return "ROCm builds of PyTorch are not supported: use NVIDIA GPUs (Ampere or newer), or the demo on a CPU."
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, and bfloat16 kernels need 8.0 "
            "(Ampere) or newer: hide it with CUDA_VISIBLE_DEVICES= to run the demo on the CPU."
        )
    local, visible = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), torch.cuda.device_count()
    if local > visible:
        return f"{local} processes need as many GPUs, but {visible} are visible: try NPROC={visible} ./run.sh."
    return check_compiler()


def check_choices(cfg) -> str:
    """One sentence where fp8= or attention= asks for what this machine lacks, else ''; cfg: the run's RunConfig."""
    gpu, attention = torch.cuda.is_available(), cfg.attention
    if cfg.fp8 == "on" and not (gpu and torch.cuda.get_device_capability() >= (8, 9)):
        return "fp8=on needs a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell): use fp8=auto."
    if cfg.fp8 == "on" and cfg.model.dtype != torch.bfloat16:
        return f"fp8=on takes bfloat16 models, which preset={cfg.preset} is not: use fp8=auto."
    if attention in ("auto", "reference"):
        return ""
    if not gpu:
        return f"attention={attention} needs a GPU: use attention=auto or attention=reference on the CPU."
    if attention in ("torch", "fa4") and cfg.model.dtype.itemsize != 2:
        return f"attention={attention} takes 16-bit models, which preset={cfg.preset} is not: use auto."
    if attention == "fa4" and not _importable("flash_attn.cute"):
        return "attention=fa4 needs the package flash-attn-4 (pip install flash-attn-4), or use auto."
    return ""


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its package is missing, or does not import here
        return False


def choose_fp8(cfg, device: torch.device) -> tuple[bool, str]:
    """(on, why): where the device has it, for models in bfloat16; cfg: the run's RunConfig."""
    if cfg.fp8 == "off":
        return False, "as asked"
    if cfg.model.dtype != torch.bfloat16:
        return False, f"{str(cfg.model.dtype).removeprefix('torch.')} models train without it"
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return able, f"this device has {'' if able else 'no '}FP8"


def check_compiler() -> str:
    """Triton builds launchers with a C compiler and Python's headers. One sentence where one is missing, else ''."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
        return "Triton needs a C compiler and none is on PATH: install gcc (apt-get install gcc) or set CC."
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"Triton needs Python's headers and {header} does not exist: install python3-dev for this Python."
    return ""


def check_logs(folder: Path, run_id: str) -> str:
    """One sentence where logs/<run_id>.txt or the folder of its checkpoints cannot be, else ''. Leaves only logs/."""
    if run_id and (folder / f"{run_id}.txt").exists():
        return f"run_id={run_id} already has the log {folder / (run_id + '.txt')}: choose another run_id=."
    if run_id and (folder / run_id).exists() and not (folder / run_id).is_dir():
        return f"{folder / run_id} is a file where run_id={run_id} would keep its checkpoints: choose another run_id=."
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(2**20))  # more than a log takes, should the disk be full
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        return f"the log folder {folder} cannot be written ({error.strerror}): free it or run in another folder."
    return ""


def try_gpu(device: torch.device, rank: int, world_size: int) -> None:
    """One tiny kernel and one tiny collective, so that a broken tool chain says so now. Raises ValueError."""
    if device.type != "cuda":
        return
    what = "Triton kernel"
    remedy = "check gcc, Python's headers, the driver and that the folder of TRITON_CACHE_DIR can be written."
    try:
        source = torch.arange(6.0, device=device).view(2, 3)
        kernels.transpose_copy(source, target := torch.empty(3, 2, device=device))
        assert torch.equal(target, source.T), "a transposed copy must equal the transpose"
        if world_size > 1:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            what, remedy = f"all-reduce (NCCL {version})", "set NCCL_DEBUG=INFO to see why."
            dist.all_reduce(source)
            torch.cuda.synchronize()
    except Exception as problem:  # whatever a compiler, linker or driver may raise
        why = repr(problem).splitlines()[-1]
        raise ValueError(f"a first {what} failed on rank {rank} ({why}): {remedy}") from problem


class Steady:
    """A text file that falls silent where it cannot be written any more (a closed pipe or terminal, a full disk)."""

    def __init__(self, stream: TextIO | None, name: str):
        self.stream, self.name, self.silent = stream or open(os.devnull, "w"), name, False

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text) or 0

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, call: Callable, *given) -> int | None:
        try:
            return call(*given)
        except OSError as error:
            if not self.silent:
                self.silent = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
                why = f"{self.name} cannot be written any more ({error.strerror})"
                print(f"warning: {why}: the run goes on without it.", file=sys.stderr, flush=True)

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def steadily(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """main(argv), which goes on where nobody reads what it prints."""
    out, err = Steady(sys.stdout, "standard output"), Steady(sys.stderr, "standard error")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main(argv)


class RunLog:
    """logs/<run_id>.txt on rank 0. `say` also prints; other ranks do nothing. A run goes on where it cannot write."""

    RULE = "=" * 100

    def __init__(self, path: Path | None):
        self.path = path
        self.file = Steady(open(path, "x", encoding="utf-8", newline=""), str(path)) if path else None

    def write(self, text: str) -> None:
        """Append a line to the file only."""
        if self.file:
            self.file.write(text + "\n")
            self.file.flush()

    def say(self, text: str) -> None:
        """Append a line to the file and show it."""
        if self.path:
            self.write(text)
            print(text, flush=True)

    def end(self) -> None:
        """Say where the log is."""
        if self.path:
            print(f"log: {self.path}" if self.path.exists() else f"warning: the log {self.path} was removed meanwhile.")

    def embed(self, name: str, text: str) -> None:
        """Embed one source file between markers; `bytes` counts the text itself, whatever it contains."""
        raw = text.encode()
        self.write(f"##### BEGIN {name} bytes={len(raw)} sha256={hashlib.sha256(raw).hexdigest()} #####")
        self.write(text.removesuffix("\n"))
        self.write(f"##### END {name} #####")


def cell(value: object) -> str:
    """One value of a table as text."""
    if value is True:
        return "yes"
    text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return "-" if value is None or value is False or not text else text


def format_table(rows: list[dict]) -> str:
    """Rows with the same keys, which become the heading, as aligned text."""
    cells = [list(rows[0])] + [[cell(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def commit(root: Path) -> str:
    """The commit of the source folder, with '(dirty)' where files differ from it."""
    try:
        git = ("git", "-C", str(root))
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        ).stdout
        return head + (" (dirty)" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def packages() -> dict[str, str]:
    """Versions of what a run and its data tools import."""
    found = {}
    for name in ("torch", "triton", "numpy", "tiktoken", "huggingface_hub", "tqdm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
