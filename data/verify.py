"""verify.py: look at shards before anything trains on them.

    python data/verify.py SHARD...                                   # GPT-2 tokens, the record's stages
    python data/verify.py --preset demo data/demo/*.bin              # bytes, the demo's stages
    python data/verify.py --vocab-size 32000 --bos-id 1 SHARD...     # another vocabulary

Checks each shard as the trainer does, and its contents against SHA256SUMS where data/cached_fineweb10B.py or
data/fineweb.py recorded them, then shows what is in it and what training will make of it. Exit code 2, and one sentence
on stderr for each shard that is wrong.

The other data tools take their manners (one sentence, exit code 2) and their checksums from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

if TYPE_CHECKING:
    from train_gpt import RunConfig, ShardInfo

# train_gpt (and with it torch) is imported inside functions: the tokenizer's worker processes import this module too.
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

SUMS_FILE = "SHA256SUMS"  # beside the shards, as sha256sum -c reads it
FIRST_LINES = 2  # documents whose beginning is shown
LINE_CHARS = 100


# === Manners ===
class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def explain(error: Exception) -> str:
    """An exception a user can cause as one sentence."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.filename or 'while writing'}): make room and run the same command again."
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename} cannot be used ({error.strerror}): check the path and its permissions."
    return " ".join(str(error).split())


def run_tool(main: Callable[[], int]) -> NoReturn:
    """Run main() as a command and leave the process: one sentence and code 2 on error, code 130 on Ctrl+C.

    os._exit, because a download that hangs in its thread must not keep the process alive.
    """
    try:
        code = main()
    except (ValueError, OSError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted: what was finished is kept.", file=sys.stderr)
        code = 130
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# === Checksums ===
def sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def recorded_sums(folder: Path) -> dict[str, str]:
    """File name -> sha256, as recorded in the folder; empty where nothing was."""
    try:
        lines = (folder / SUMS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: digest for digest, name in (line.split(maxsplit=1) for line in lines if line.strip())}


def record_sums(folder: Path, changes: dict[str, str | None]) -> None:
    """Record file name -> sha256 for finished shards, None for one that is gone."""
    sums = recorded_sums(folder) | changes
    draft = folder / f"{SUMS_FILE}.{os.getpid()}"
    draft.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()) if digest))
    os.replace(draft, folder / SUMS_FILE)


def matches_recorded_sum(path: Path) -> bool:
    """True if the file's recorded sum was checked, False if none is recorded; ValueError if it differs."""
    recorded = recorded_sums(path.parent).get(path.name)
    if recorded is None:
        return False
    if (found := sha256(path)) != recorded:
        raise ValueError(
            f"{path} has changed since it was made (sha256 {found[:12]}..., recorded {recorded[:12]}...): delete it "
            "and run the tool that made it again."
        )
    return True


# === What is in a shard ===
def stage_use(info: ShardInfo, local_tokens: int, max_len: int) -> tuple[int, int]:
    """(tokens served, tokens used up) when the trainer's own cutter runs through a shard at one stage's shape."""
    from train_gpt import PIECES, cut_batches

    served, last_start = 0, -1
    for _, batch in cut_batches([info], itertools.repeat((local_tokens, max_len)), PIECES):
        served += PIECES * local_tokens
        last_start = batch[-1][-1][0]
    starts = np.append(info.bos_positions, info.num_tokens)
    return served, int(starts[np.searchsorted(starts, last_start, side="right")] - starts[0]) if served else 0


def describe_cuts(info: ShardInfo, cfg: RunConfig) -> Iterator[str]:
    """What cutting documents discards at each stage of a preset, and how much text one run uses up."""
    from train_gpt import PIECES, stages_by_step

    tokens = Counter()
    for stage in stages_by_step(cfg):
        tokens[stage.batch_tokens // PIECES, stage.max_doc_len] += stage.batch_tokens
    needed = 0.0
    for (local_tokens, max_len), wanted in tokens.items():
        served, used = stage_use(info, local_tokens, max_len)
        shape = f"to {max_len:,} tokens a document, {local_tokens:,} a sequence"
        if not served:
            yield f"{shape}: too few documents for one batch"
            return
        yield f"{shape}: discards {1 - served / used:.1%}"
        needed += wanted * used / served
    yield f"a {cfg.preset} run trains on {sum(tokens.values()):,} tokens and uses up {needed:,.0f} of text like this"


def decoder(vocab_size: int, bos_id: int) -> Callable[[list[int]], str] | None:
    """What turns tokens into text, if they are bytes or GPT-2's and its vocabulary is at hand (it is not fetched)."""
    from fineweb import ByteEncoding, gpt2_is_cached, load_gpt2

    if (vocab_size, bos_id) == (ByteEncoding.n_vocab, ByteEncoding.eot_token):
        return ByteEncoding().decode
    if (vocab_size, bos_id) == (50257, 50256) and gpt2_is_cached():
        return load_gpt2().decode
    return None


def first_lines(tokens: np.ndarray, starts: np.ndarray, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The beginnings of the first documents."""
    for start, end in list(zip(starts, [*starts[1:], len(tokens)]))[:FIRST_LINES]:
        text = " ".join(decode(tokens[start + 1 : end][: 2 * LINE_CHARS].tolist()).split())
        yield text if len(text) <= LINE_CHARS else text[:LINE_CHARS] + "..."


def describe_shard(path: Path, cfg: RunConfig) -> str:
    """A paragraph on a shard; ValueError, in one sentence, if it is not one to train on."""
    from train_gpt import SHARD_MAGIC, SHARD_VERSION, check_shard, read_shard

    info = check_shard(path, vocab_size=cfg.vocab_size, bos_id=cfg.bos_id)
    summed = matches_recorded_sum(path)
    starts = info.bos_positions
    lengths = np.diff(starts, append=info.num_tokens)
    percents = (5, 25, 50, 75, 95, 100)
    values = zip(percents, np.percentile(lengths, percents))
    rows = [
        ("header", f"magic {SHARD_MAGIC}, version {SHARD_VERSION}, {info.num_tokens:,} tokens"),
        ("sha256", f"as recorded in {SUMS_FILE}" if summed else f"no {SUMS_FILE} here to compare with"),
        ("documents", f"{len(starts):,}, mean {lengths.mean():,.0f} tokens with their BOS"),
        ("lengths", ", ".join(f"{percent}% <= {value:,.0f}" for percent, value in values)),
    ]
    if starts[0]:
        rows.append(("note", f"the {starts[0]:,} tokens before the first BOS are never served in training"))
    if empty := int(np.count_nonzero(lengths == 1)):
        rows.append(("note", f"{empty:,} documents are empty (a BOS, then the next BOS or the end)"))
    rows += [("cutting", line) for line in describe_cuts(info, cfg)]
    if decode := decoder(cfg.vocab_size, cfg.bos_id):
        rows += [("text", line) for line in first_lines(read_shard(path), starts, decode)]
    return "\n".join([str(path), *(f"  {label:<10}{line}" for label, line in rows)])


def main(argv: list[str] | None = None) -> int:
    from train_gpt import PRESETS

    parser = Parser(description="Check shards and show what is in them.")
    parser.add_argument("shards", nargs="+", metavar="SHARD", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="record", help="whose vocabulary and stages (%(default)s)")
    parser.add_argument("--vocab-size", type=int, help="token ids are below this (default: the preset's)")
    parser.add_argument("--bos-id", type=int, help="token that starts a document (default: the preset's)")
    args = parser.parse_args(argv)
    given = {key: value for key in ("vocab_size", "bos_id") if (value := getattr(args, key)) is not None}
    cfg = dataclasses.replace(PRESETS[args.preset](), **given)
    code = 0
    for path in args.shards:
        try:
            print(describe_shard(path, cfg))
        except (ValueError, OSError) as error:
            print(f"error: {explain(error)}", file=sys.stderr)
            code = 2
    return code


if __name__ == "__main__":
    run_tool(main)
