"""fineweb.py: text to shards, for your own corpus or for FineWeb itself.

    python data/fineweb.py INPUT... --out data/mine

INPUT is a .jsonl, .jsonl.gz, .txt or .parquet file (parquet needs pyarrow) or a folder of them, read in sorted order. A
document is one JSON line or parquet row (its field `text`), or one .txt file; in a .txt, a line `<|endoftext|>` starts
the next document. Out come data/mine/mine_train_000001.bin ... and mine_val_000000.bin ...: BOS before each document,
whole documents only, so that every shard starts with one. A document goes to validation by a hash of its text, so
copies of one text never fall on both sides; neither the number of workers nor an interruption changes any byte.
Interrupted, the same command continues after the last finished shard; finished, it changes nothing.

Training sees only the head of a long document (data/verify.py says how much that discards): --document-chars 8000 cuts
books and the like into documents of about 2,000 GPT-2 tokens.

The field's FineWeb-10B in this form: `hf download HuggingFaceFW/fineweb --repo-type dataset --include "sample/10BT/*"`
(the published shards that data/cached_fineweb10B.py fetches cut documents at shard ends; ours do not).
"""

import glob
import gzip
import hashlib
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

# train_gpt (and with it torch) is imported inside functions: the worker processes import this module too.
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from verify import Parser, matches_recorded_sum, record_sums, run_tool, sha256  # noqa: E402

CHUNK_CHARS = 1_000_000  # text handed to a worker at a time: about a quarter of a second of work
SEPARATOR = b"<|endoftext|>"

# === Encodings ===
# GPT-2's two vocabulary files under the names that tiktoken's cache gives them (sha1 of the address of each).
GPT2_FILES = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}


class ByteEncoding:
    """Bytes as tokens, BOS = 256, as in the demo: for text without a tokenizer. Looks like a tiktoken.Encoding."""

    name, n_vocab, eot_token = "bytes", 257, 256

    def encode_ordinary(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")


def gpt2_cache() -> Path:
    """Where tiktoken looks for its vocabulary files."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default)))


def gpt2_is_cached() -> bool:
    return all((gpt2_cache() / name).is_file() for name in GPT2_FILES.values())


def load_gpt2() -> Any:
    """tiktoken's GPT-2 encoding; ValueError naming the cache files where they are missing and cannot be fetched."""
    try:
        import tiktoken
    except ImportError:
        raise ValueError("GPT-2 tokens need tiktoken: pip install tiktoken, or use --encoding bytes.") from None
    if not gpt2_is_cached():
        print(f"fetching GPT-2's vocabulary into {gpt2_cache()}", file=sys.stderr)
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # tiktoken lets through whatever requests, ssl or the disk raise
        files = " and ".join(f"{name} ({file})" for file, name in GPT2_FILES.items())
        raise ValueError(
            f"GPT-2's vocabulary is not cached and cannot be fetched ({type(error).__name__}): put the files {files} "
            f"into {gpt2_cache()} (or where TIKTOKEN_CACHE_DIR points), from a machine where "
            """`python -c "import tiktoken; tiktoken.get_encoding('gpt2')"` has run."""
        ) from error


ENCODINGS = {"gpt2": load_gpt2, "bytes": ByteEncoding}


# === Reading: each reader yields (text, how many bytes of its file are read) ===
def read_jsonl(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix.lower() == ".gz" else raw as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}): put one object on each line.") from None
            text = record.get(text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                found = f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
                found = f"{type(text).__name__} there" if text is not None else found
                raise ValueError(
                    f"{path}, line {number}: a document is an object with a string {text_key!r}, but this line holds "
                    f"{found}: name the field with --text-key."
                )
            yield text, raw.tell()


def read_txt(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    def decode(lines: list[bytes]) -> str:
        try:
            return b"".join(lines).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): convert it with iconv.") from None

    with open(path, "rb") as raw:
        lines = []
        for line in raw:
            if line.strip() == SEPARATOR:
                yield decode(lines), raw.tell()
                lines = []
            else:
                lines.append(line)
        yield decode(lines), raw.tell()


def read_parquet(path: Path, text_key: str) -> Iterator[tuple[str, int]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path} needs pyarrow to be read: pip install pyarrow, or convert it to jsonl.") from None
    size, done = path.stat().st_size, 0
    try:
        with ParquetFile(path) as table:
            if text_key not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise ValueError(f"{path} has no column {text_key!r} among {names}: name it with --text-key.")
            for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
                done += len(batch)
                for text in batch[text_key].to_pylist():
                    yield text or "", size * done // table.metadata.num_rows
    except ArrowException as error:
        raise ValueError(f"{path} is not a readable parquet file ({error}): fetch it again.") from None


READERS = {".jsonl": read_jsonl, ".jsonl.gz": read_jsonl, ".txt": read_txt, ".parquet": read_parquet}


def reader_of(path: Path) -> Any:
    return next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)


def find_inputs(inputs: Iterable[str | Path]) -> list[Path]:
    """The files to read: those named, in their order, and those in the folders named, sorted."""
    files = []
    for given in map(Path, inputs):
        if given.is_dir():
            found = sorted(p for p in given.rglob("*") if p.is_file() and reader_of(p))
        else:
            found = [given] if given.is_file() and reader_of(given) else []
        if not found:
            state = "holds none" if given.is_dir() else "is none" if given.exists() else "does not exist"
            raise ValueError(f"inputs are {', '.join(READERS)} files or folders of them, and {given} {state}.")
        files += found
    return files


def read_documents(files: list[Path], text_key: str) -> Iterator[tuple[str, int]]:
    """(text, input bytes read so far) of each document."""
    before = 0
    for path in files:
        try:
            for text, position in reader_of(path)(path, text_key):
                yield text, before + position
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged or cut off ({error}): fetch or compress it again.") from None
        before += path.stat().st_size


# === Tokenizing ===
class Chunk(NamedTuple):
    texts: list[str]
    splits: list[str]  # "train" or "val", one for each text
    position: int  # input bytes read up to its end


def split_of(text: str, val_fraction: float) -> str:
    """The side of a document, from its text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return "val" if int.from_bytes(digest, "little") < val_fraction * 2**64 else "train"


def cut_text(text: str, most: int) -> Iterator[str]:
    """Cut a text into pieces of at most `most` characters, each at the end of a paragraph, line or word if it can."""
    start = 0
    while len(text) - start > most:
        ends = ((text.rfind(mark, start + most // 2, start + most), mark) for mark in ("\n\n", "\n", " "))
        end = next((found + len(mark) for found, mark in ends if found >= 0), start + most)
        yield text[start:end]
        start = end
    yield text[start:]


def cut_and_split(
    documents: Iterator[tuple[str, int]], val_fraction: float, document_chars: int
) -> Iterator[tuple[str, str, int]]:
    """(text, split, input bytes read) of each document to write; the pieces of a long one stay on one side."""
    for whole, position in documents:
        split = split_of(whole, val_fraction)
        for text in cut_text(whole, document_chars) if document_chars else (whole,):
            if text.strip():
                yield text, split, position


def make_chunks(documents: Iterator[tuple[str, str, int]], skip: dict[str, int]) -> Iterator[Chunk]:
    """Group documents for the workers, leaving out the first skip[split] of each split: finished shards hold them."""
    skip = dict(skip)
    texts, splits, size, position = [], [], 0, 0
    for text, split, position in documents:
        if skip[split]:
            skip[split] -= 1
            continue
        texts.append(text)
        splits.append(split)
        size += len(text)
        if size >= CHUNK_CHARS:
            yield Chunk(texts, splits, position)
            texts, splits, size = [], [], 0
    yield Chunk(texts, splits, position)


def encode_texts(encoding: Any, texts: list[str]) -> list[np.ndarray]:
    """Tokens of each text, BOS first. Ordinary tokens only: a text that spells <|endoftext|> starts no document."""
    bos = np.array([encoding.eot_token], dtype=np.uint16)
    return [np.concatenate((bos, np.array(encoding.encode_ordinary(text), dtype=np.uint16))) for text in texts]


def start_worker(encoding: Any) -> None:
    global worker_encoding
    worker_encoding = encoding
    threading.Thread(target=leave_with_parent, daemon=True).start()


def leave_with_parent() -> None:
    """End this worker when its parent is gone; a parent that was killed cannot say so, and it would wait for ever."""
    parent_process().join()
    os._exit(1)


def encode_in_worker(texts: list[str]) -> list[np.ndarray]:
    return encode_texts(worker_encoding, texts)


def submit(pool: Executor, texts: list[str]) -> Future:
    """Hand texts to the pool. A worker that this starts never sees SIGINT: Ctrl+C is for the parent to answer."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return pool.submit(encode_in_worker, texts)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def map_in_order(pool: Executor, chunks: Iterator[Chunk], ahead: int) -> Iterator[tuple[Chunk, list[np.ndarray]]]:
    """Encode chunks in a pool, results in order; at most `ahead` are in memory (Executor.map would read all input)."""
    queue: deque[tuple[Chunk, Future]] = deque()
    for chunk in chunks:
        queue.append((chunk, submit(pool, chunk.texts)))
        if len(queue) >= ahead:
            chunk, future = queue.popleft()
            yield chunk, future.result()
    for chunk, future in queue:
        yield chunk, future.result()


def encode_chunks(encoding: Any, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, list[np.ndarray]]]:
    if workers == 1:
        yield from ((chunk, encode_texts(encoding, chunk.texts)) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (encoding,))
    try:
        yield from map_in_order(pool, chunks, ahead=4 * workers)
    except BrokenProcessPool:
        raise ValueError("a worker process died, most likely for want of memory: set fewer --workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


# === Writing ===
class ShardWriter:
    """Collects one split's documents and writes a shard whenever the next document would not fit.

    A shard holds whole documents and at most `shard_tokens` tokens, or one document longer than that. Shards that an
    interrupted run left in the folder count as finished; `documents` says how many documents they hold.
    """

    def __init__(self, stem: Path, number: int, shard_tokens: int, encoding: Any) -> None:
        self.stem, self.number, self.shard_tokens = stem, number, shard_tokens
        self.vocabulary = {"vocab_size": encoding.n_vocab, "bos_id": encoding.eot_token}
        self.pending: list[np.ndarray] = []
        self.size = 0
        self.shards: list[tuple[Path, int, int]] = []  # path, tokens, documents
        while self.path.exists() and self.keep():
            self.number += 1

    @property
    def path(self) -> Path:
        return Path(f"{self.stem}_{self.number:06d}.bin")

    @property
    def documents(self) -> int:
        return sum(documents for _, _, documents in self.shards)

    def keep(self) -> bool:
        """Check the shard at `path` and take it as finished; False where it is damaged."""
        from train_gpt import check_shard

        try:
            if not matches_recorded_sum(self.path):  # killed between writing and recording
                record_sums(self.path.parent, {self.path.name: sha256(self.path)})
            info = check_shard(self.path, **self.vocabulary)
        except ValueError:
            print(f"{self.path.name} is damaged and is made again", file=sys.stderr)
            return False
        self.shards.append((self.path, info.num_tokens, len(info.bos_positions)))
        return True

    def add(self, document: np.ndarray) -> None:
        if self.size + len(document) > self.shard_tokens:
            self.flush()
        self.pending.append(document)
        self.size += len(document)

    def flush(self) -> None:
        from train_gpt import write_shard

        if not self.pending:
            return
        write_shard(self.path, np.concatenate(self.pending))
        record_sums(self.path.parent, {self.path.name: sha256(self.path)})
        if not self.keep():
            raise ValueError(f"{self.path} does not read back as it was written: check the disk.")
        self.number += 1
        self.pending, self.size = [], 0


def claim_folder(out: Path, settings: dict[str, Any], fresh: bool) -> None:
    """Make `out` this run's own: no shards of other settings may be continued or mixed with."""
    out.mkdir(parents=True, exist_ok=True)
    note = out / f"{out.name}_settings.json"
    shards = sorted(out.glob(f"{out.name}_*.bin"))
    if fresh:
        for shard in shards:
            shard.unlink()
        record_sums(out, {shard.name: None for shard in shards})
    elif shards:
        earlier = json.loads(note.read_text()) if note.exists() else {}
        changed = [key for key, value in settings.items() if earlier.get(key) != value]
        if changed:
            raise ValueError(
                f"{out} holds shards made with other settings ({', '.join(changed)}): pass --fresh to replace them, or "
                "name another folder with --out."
            )
    note.write_text(json.dumps(settings, indent=1) + "\n")


def tokenize(
    inputs: Iterable[str | Path],
    out: str | Path,
    encoding: Any,
    *,
    shard_tokens: int = 100_000_000,
    val_fraction: float = 0.01,
    document_chars: int = 0,
    text_key: str = "text",
    workers: int = 1,
    fresh: bool = False,
) -> dict[str, ShardWriter]:
    """Write `inputs` as shards into the folder `out`; return the two writers, whose `shards` say what is there.

    Deterministic: the bytes depend on the inputs and the arguments above, not on `workers` or on interruptions. The
    encoding is a tiktoken.Encoding or anything with its encode_ordinary, n_vocab, eot_token and name.
    """
    files, out = find_inputs(inputs), Path(out).resolve()
    sizes = [path.stat().st_size for path in files]
    settings = {"encoding": encoding.name, "shard_tokens": shard_tokens, "val_fraction": val_fraction}
    settings |= {"document_chars": document_chars, "text_key": text_key}
    settings["inputs"] = [[path.name, size] for path, size in zip(files, sizes)]
    claim_folder(out, settings, fresh)
    writers = {
        split: ShardWriter(out / f"{out.name}_{split}", number, shard_tokens, encoding)
        for split, number in (("train", 1), ("val", 0))  # numbered as the published shards are
    }
    for path, tokens, documents in (shard for writer in writers.values() for shard in writer.shards):
        print(f"{path.name}: {tokens:,} tokens, {documents:,} documents, finished before", file=sys.stderr)
    skip = {split: writer.documents for split, writer in writers.items()}
    chunks = make_chunks(cut_and_split(read_documents(files, text_key), val_fraction, document_chars), skip)
    workers = max(1, min(workers, sum(sizes) // CHUNK_CHARS))  # starting a process takes longer than a chunk
    start, done = time.perf_counter(), 0
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="tokenizing") as bar:
        for chunk, documents in encode_chunks(encoding, chunks, workers):
            for split, document in zip(chunk.splits, documents):
                writers[split].add(document)
            done += sum(map(len, documents))
            bar.update(chunk.position - bar.n)
            bar.set_postfix_str(f"{done / (time.perf_counter() - start):,.0f} tokens/s")
        for writer in writers.values():
            writer.flush()
    return writers


def report(writers: dict[str, ShardWriter], encoding: Any, shard_tokens: int, val_fraction: float) -> None:
    """Say what was made and how to train on it; ValueError where a split came out empty."""
    for writer in writers.values():
        for path, tokens, documents in writer.shards:
            print(f"{path.name}: {tokens:,} tokens, {documents:,} documents")
        if writer.shards and tokens < shard_tokens:
            print(f"  ({path.name} is {tokens / shard_tokens:.1%} full, as it should be: the text ends in it)")
    total = sum(writer.documents for writer in writers.values())
    for split, wanted in (("train", val_fraction < 1), ("val", val_fraction > 0)):
        if wanted and not writers[split].shards:
            raise ValueError(
                f"none of the {total:,} documents fell to {split} with --val-fraction {val_fraction:g} (pieces of one "
                "that was cut stay together): choose another fraction (with --fresh), or give more documents."
            )
    globs = {split: glob.escape(str(writer.stem)) + "_*.bin" for split, writer in writers.items() if writer.shards}
    files = " ".join(f"{split}_files={shlex.quote(pattern)}" for split, pattern in globs.items())
    print(f"train with: {files} vocab_size={encoding.n_vocab} bos_id={encoding.eot_token}")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description="Turn text into training and validation shards.")
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help=f"{', '.join(READERS)} files, or folders of them")
    add("--out", required=True, help="folder for the shards; its name begins theirs")
    add("--encoding", choices=ENCODINGS, default="gpt2", help="default: %(default)s")
    add("--shard-tokens", type=int, default=100_000_000, help="most tokens a shard (default: %(default)s)")
    add("--val-fraction", type=float, default=0.01, help="documents kept for validation (%(default)s)")
    add("--document-chars", type=int, default=0, help="cut longer documents into several (default: 0, never)")
    add("--text-key", default="text", help="JSON field or parquet column of the text (%(default)s)")
    add("--workers", type=int, default=usable_cores(), help="processes (default: %(default)s, all cores)")
    add("--fresh", action="store_true", help="replace shards that are there instead of continuing them")
    args = parser.parse_args(argv)
    if not 0 <= args.val_fraction <= 1:
        parser.error(f"--val-fraction is a share between 0 and 1, not {args.val_fraction:g}")
    for name, least in (("shard_tokens", 1), ("workers", 1), ("document_chars", 0)):
        if (value := getattr(args, name)) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    inputs = find_inputs(args.inputs)  # which says what is missing before a vocabulary is fetched
    encoding = ENCODINGS[args.encoding]()
    passed_on = ("shard_tokens", "val_fraction", "document_chars", "text_key", "workers", "fresh")
    writers = tokenize(inputs, args.out, encoding, **{name: getattr(args, name) for name in passed_on})
    report(writers, encoding, args.shard_tokens, args.val_fraction)
    return 0


if __name__ == "__main__":
    run_tool(main)
