"""cached_fineweb10B.py: fetch FineWeb-10B as GPT-2 tokens, in shards that are made already.

    python data/cached_fineweb10B.py [N]       # the validation shard and N training shards of 200 MB, 1 to 103

Shards go to data/fineweb10B under DATA_PATH (default: the current folder). Each is fetched beside that folder's files
and moved there only once its header, length and sha256 are right, so a shard that is there is whole; run again, the
command verifies what is there and fetches what is missing. A file whose fetching was interrupted starts anew.
"""

import contextlib
import os
import re
import shutil
import sys
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout
from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import disable_progress_bars
from huggingface_hub.utils.logging import set_verbosity_error
from tqdm import tqdm

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from verify import Parser, matches_recorded_sum, record_sums, run_tool, sha256  # noqa: E402

from train_gpt import read_shard  # noqa: E402

REPO = "kjj0/fineweb10B-gpt2"
VAL_SHARD = "fineweb_val_000000.bin"
LAST_SHARD = 103
SHARD_TOKENS = 100_000_000  # in every shard but, possibly, the last
SHARD_BYTES = 1024 + 2 * SHARD_TOKENS

# A record run trains on 340 million tokens but uses up more, because what is cut off documents (to the stage's length,
# or to the room left in their batch) is discarded: data/verify.py counts 637 million where documents have 1,580 tokens
# on average, and FineWeb's are shorter. Nine shards, 900 million, leave room for a schedule that is 40% longer.
DEFAULT_SHARDS = 9

RETRY_SECONDS = (2, 10)  # before the second and third attempt at a file; huggingface_hub retries inside each as well
STALL_SECONDS = 300  # without a single byte before giving up
POLL_SECONDS = 0.5
JOBS = 4  # files at a time


# === Errors of the hub ===
class Problem(NamedTuple):
    what: str
    remedy: str
    retry: bool


AGAIN = "and run the same command again"
LOG_IN = f"log in with `hf auth login`, or unset an outdated HF_TOKEN, {AGAIN}"
CHECK_NETWORK = f"check the network (proxy, HF_ENDPOINT) or wait some minutes, {AGAIN}"
HTTP_PROBLEMS = {
    401: Problem("the hub refuses access (HTTP 401)", LOG_IN, False),
    403: Problem("the hub refuses access (HTTP 403)", LOG_IN, False),
    404: Problem(f"{REPO} has no such file (HTTP 404)", "make shards from text instead, with data/fineweb.py", False),
    429: Problem("the hub wants fewer requests (HTTP 429)", f"wait some minutes or log in, {AGAIN}", False),
}
OFFLINE = Problem("huggingface_hub is in offline mode", f"unset HF_HUB_OFFLINE {AGAIN}", False)
DISK_FULL = Problem("the disk is full", f"make room, or set DATA_PATH to a folder on another disk, {AGAIN}", False)


class DamagedFile(ValueError):
    """A file arrived that is not the shard it should be."""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it; huggingface_hub wraps the telling one, often twice."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    return next((s for e in causes(error) if (s := getattr(getattr(e, "response", None), "status_code", None))), None)


def problem_of(error: BaseException) -> Problem:
    """Name what went wrong with a download, say what to do, and whether to try again first."""
    if any(isinstance(e, OSError) and e.errno in (ENOSPC, EDQUOT) for e in causes(error)):
        return DISK_FULL
    if any(isinstance(e, OfflineModeIsEnabled) for e in causes(error)):
        return OFFLINE
    if (status := status_of(error)) in HTTP_PROBLEMS:
        return HTTP_PROBLEMS[status]
    if isinstance(error, DamagedFile):
        return Problem(f"what arrives is damaged ({error})", f"try another network or wait some hours, {AGAIN}", True)
    root = list(causes(error))[-1]
    first_line = next(iter(str(root).splitlines()), "")
    return Problem(f"the hub does not answer ({type(root).__name__}: {first_line[:200]})", CHECK_NETWORK, True)


# === One shard ===
def check_arrived(path: Path) -> None:
    """ValueError unless the file is a whole shard with the token count that the data set has."""
    found = len(read_shard(path))
    if found != SHARD_TOKENS and not (path.name == train_shard(LAST_SHARD) and found < SHARD_TOKENS):
        raise ValueError(f"{path} holds {found:,} tokens, and the shards of {REPO} {SHARD_TOKENS:,}: fetch it again.")


def train_shard(number: int) -> str:
    return f"fineweb_train_{number:06d}.bin"


def published_sha256(name: str) -> str | None:
    """The hub's own checksum of a file: its entity tag, for files stored as these are."""
    etag = get_hf_file_metadata(hf_hub_url(REPO, name, repo_type="dataset")).etag
    return etag if etag and re.fullmatch(r"[0-9a-f]{64}", etag) else None


def fetch_once(name: str, folder: Path, staging: Path, force: bool) -> str:
    """Fetch a shard into `staging`, verify it, move it to `folder`; return its sha256."""
    arrived = Path(hf_hub_download(REPO, name, repo_type="dataset", local_dir=staging, force_download=force))
    try:
        check_arrived(arrived)
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    digest, published = sha256(arrived), published_sha256(name)
    if published not in (None, digest):
        raise DamagedFile(f"{name} has sha256 {digest[:12]}..., not {published[:12]}... as published")
    os.replace(arrived, folder / name)
    return digest


def fetch(name: str, folder: Path, staging: Path, stop: threading.Event, said: set[str]) -> str | Problem | None:
    """The shard's sha256 once it is in `folder`, or the problem that remains after retries; None if stopped before.

    `said` are the problems that were mentioned already: what ails all files is said once.
    """
    for attempt in range(1 + len(RETRY_SECONDS)):
        if stop.is_set():
            return None
        try:
            return fetch_once(name, folder, staging, force=attempt > 0)
        except Exception as error:  # the hub's client lets through httpx, ssl, xet and disk errors alike
            problem = problem_of(error)
            (staging / name).unlink(missing_ok=True)
            if not problem.retry:
                stop.set()  # what ails this file ails them all
            if stop.is_set() or attempt == len(RETRY_SECONDS):
                return problem
            if problem.what not in said:
                said.add(problem.what)
                tqdm.write(f"{name}: {problem.what}, trying again", file=sys.stderr)
            stop.wait(RETRY_SECONDS[attempt])


# === All shards ===
def find_missing(names: list[str], folder: Path) -> list[str]:
    """Names of the shards to fetch; those that are there are verified, and set aside where they are damaged."""
    present = [folder / name for name in names if (folder / name).exists()]
    for path in tqdm(present, desc="verifying", unit="shard", disable=not present):
        try:
            check_arrived(path)
            if not matches_recorded_sum(path):
                record_sums(folder, {path.name: sha256(path)})
        except ValueError:
            aside = path.replace(path.with_name(f"{path.name}.damaged"))
            tqdm.write(f"{path.name} is damaged: it is now {aside.name}, and fetched again", file=sys.stderr)
    return [name for name in names if not (folder / name).exists()]


@contextlib.contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Hold the folder alone: a second run waits for the first, then finds everything there."""
    lock = FileLock(folder / ".download.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another run is at work in {folder}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def bytes_in(folder: Path) -> int:
    """Size of all files under a folder that other threads are changing."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # moved or removed meanwhile
            size += path.stat().st_size if path.is_file() else 0
    return size


def fetch_all(missing: list[str], folder: Path, staging: Path) -> dict[str, Problem]:
    """Fetch shards, several at a time, under one progress bar; return the problems of those that did not come."""
    stop, said, problems = threading.Event(), set(), {}
    pool = ThreadPoolExecutor(JOBS)
    names = {pool.submit(fetch, name, folder, staging, stop, said): name for name in missing}
    pending, landed, last_change = set(names), 0, time.monotonic()
    with tqdm(total=len(missing) * SHARD_BYTES, unit="B", unit_scale=True, desc="fetching") as bar:
        while pending:
            done, pending = wait(pending, timeout=POLL_SECONDS, return_when="FIRST_COMPLETED")
            for name, result in ((names[future], future.result()) for future in done):
                if isinstance(result, str):
                    record_sums(folder, {name: result})
                    landed += (folder / name).stat().st_size
                elif result:
                    problems[name] = result
            progress = landed + bytes_in(staging) - bar.n
            if progress or done:
                last_change = time.monotonic()
            bar.update(progress)
            if time.monotonic() - last_change > STALL_SECONDS:
                stalled = Problem(f"no byte arrived for {STALL_SECONDS} s", CHECK_NETWORK, True)
                problems |= {names[future]: stalled for future in pending}
                stop.set()
                break
    pool.shutdown(wait=False, cancel_futures=True)
    return problems


def shard_count(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= LAST_SHARD):
        raise ArgumentTypeError(f"N is the number of training shards, 1 to {LAST_SHARD}, not {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Fetch FineWeb-10B as GPT-2 tokens: the validation shard and N training shards.")
    parser.add_argument(
        "shards", nargs="?", type=shard_count, default=DEFAULT_SHARDS, metavar="N", help="training shards (%(default)s)"
    )
    names = [VAL_SHARD, *map(train_shard, range(1, parser.parse_args(argv).shards + 1))]
    folder = Path(os.environ.get("DATA_PATH", "."), "data", "fineweb10B").resolve()
    staging = folder / ".download"
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()  # huggingface_hub's: one bar for all files is enough, and one message about each
    set_verbosity_error()
    with sole_use(folder):
        shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
        missing = find_missing(names, folder)
        needed, free = len(missing) * SHARD_BYTES, shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(
                f"{len(missing)} shards need {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} free: make room, "
                "set DATA_PATH to a folder on another disk, or ask for fewer."
            )
        problems = fetch_all(missing, folder, staging) if missing else {}
        shutil.rmtree(staging, ignore_errors=True)
    left = [name for name in missing if not (folder / name).exists()]
    if problems:
        what, remedy, _ = next(iter(problems.values()))
        listed = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
        raise ValueError(
            f"{what}, so {listed} did not come ({len(names) - len(left)} of {len(names)} shards are good and stay in "
            f"{folder}): {remedy}."
        )
    print(f"{len(names)} of {len(names)} shards are in {folder}, whole and verified ({len(missing)} fetched now)")
    return 0


if __name__ == "__main__":
    run_tool(main)
