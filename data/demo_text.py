"""demo_text.py: the demo's text, about a million bytes of English that every CPython installation carries.

    python data/demo_text.py [folder]          # default: data/demo under DATA_PATH (default: the current folder)

Python's own documentation topics and the docstrings of its standard library, read with `ast` from source (nothing is
imported, nothing runs, no network), kept where they are prose, cut into documents of a few paragraphs, shuffled with a
fixed seed and split by document. The vocabulary is bytes: ids 0-255, and BOS = 256 before every document. The text
belongs to the Python that builds it: the same version gives the same shards, another version slightly different ones.
"""

import argparse
import ast
import inspect
import os
import random
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]  # for train_gpt, imported where shards are written or read

VOCAB_SIZE, BOS_ID = 257, 256
DOCUMENT_BYTES = 500  # documents end at the paragraph before this; short, because a batch keeps only a document's head
VAL_SHARE = 0.08
MIN_VAL_TOKENS = 70_000  # the demo validates on 65,536 tokens and their targets
MIN_BYTES = 400_000  # less text than this and the demo's numbers mean nothing
SEED = 1337

# Standard-library modules with the most prose in their docstrings, in every CPython from 3.10 on Linux and macOS.
MODULES = """
    _collections_abc _pydecimal _pyio _strptime argparse ast asyncio.base_events asyncio.events asyncio.futures
    asyncio.locks asyncio.protocols asyncio.sslproto asyncio.streams asyncio.tasks asyncio.unix_events base64 bdb bz2
    calendar cmd code codecs collections compileall concurrent.futures._base concurrent.futures.process configparser
    contextlib difflib dis doctest email._header_value_parser email._policybase email.charset email.generator
    email.header email.headerregistry email.message email.policy email.quoprimime enum fileinput fractions ftplib
    functools graphlib gzip http.client http.cookiejar http.server imaplib importlib._bootstrap
    importlib._bootstrap_external importlib.abc importlib.metadata inspect ipaddress locale logging logging.config
    logging.handlers lzma mailbox mimetypes multiprocessing.managers optparse os pdb pickle pkgutil platform poplib
    py_compile pyclbr pydoc queue random shelve shutil site smtplib socket socketserver ssl statistics subprocess
    tarfile tempfile textwrap threading timeit tokenize unittest.case unittest.mock urllib.parse urllib.request uuid
    venv wave wsgiref.handlers wsgiref.validate xml.etree.ElementTree xml.sax.handler xml.sax.xmlreader xmlrpc.client
    xmlrpc.server
"""


def parse_module(stdlib: Path, module: str) -> ast.Module | None:
    """The syntax tree of a standard-library module's source, or None where this installation lacks it."""
    path = stdlib.joinpath(*module.split("."))
    for source in (path.with_suffix(".py"), path / "__init__.py"):
        if source.is_file():
            return ast.parse(source.read_bytes())
    return None


def topic_texts(stdlib: Path) -> list[str]:
    """Chapters of the language reference: the values of the one dictionary that pydoc_data.topics is."""
    tree = parse_module(stdlib, "pydoc_data.topics")
    tables = [node for node in tree.body if isinstance(node, ast.Assign)] if tree else []
    return [text for table in tables for text in ast.literal_eval(table.value).values()]


def docstring_texts(stdlib: Path) -> list[str]:
    """One text a module: its docstrings, joined in the order in which they stand."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = []
    for tree in filter(None, (parse_module(stdlib, module) for module in MODULES.split())):
        nodes = sorted((n for n in ast.walk(tree) if isinstance(n, documented)), key=lambda n: getattr(n, "lineno", 0))
        texts.append("\n\n".join(filter(None, map(ast.get_docstring, nodes))))
    return texts


def is_prose(paragraph: str) -> bool:
    """Some words, mostly letters, few symbols, no doctest: tables, code and grammars fail one of these."""
    words = re.findall(r"[A-Za-z]{2,}", paragraph)
    plain = sum(c.isalpha() or c in " ,.;:'\"()-" for c in paragraph)
    symbols = sum(c in "=_{}[]<>|\\+*/&^%$#@~`" for c in paragraph)
    size = len(paragraph)
    return len(words) >= 6 and plain >= 0.9 * size and symbols <= 0.05 * size and ">>>" not in paragraph


def cut_documents(texts: Iterable[str]) -> Iterator[bytes]:
    """Cut texts into documents at paragraph ends.

    A paragraph that occurred before is dropped, since topics quote each other, and each becomes a single line, since
    where the source breaks its lines says nothing about English.
    """
    seen: set[str] = set()
    for text in texts:
        document = ""
        for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
            paragraph = " ".join(block.split())
            if paragraph in seen or not is_prose(paragraph):
                continue
            seen.add(paragraph)
            if document and len(document) + len(paragraph) > DOCUMENT_BYTES:
                yield document.rstrip().encode()
                document = ""
            document += paragraph + "\n\n"
        if document:
            yield document.rstrip().encode()


def to_tokens(documents: Iterable[bytes]) -> np.ndarray:
    """Byte-level tokens with BOS before each document."""
    return np.concatenate([np.array([BOS_ID, *document], dtype=np.uint16) for document in documents])


def split_documents(documents: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Shuffle and split into (train, val) by document, so that val is like train."""
    documents = list(documents)
    random.Random(SEED).shuffle(documents)
    sizes = np.cumsum([1 + len(d) for d in documents])
    cut = int(np.searchsorted(sizes, max(MIN_VAL_TOKENS, VAL_SHARE * sizes[-1]))) + 1
    return documents[cut:], documents[:cut]


def build_demo(folder: str | Path, *, stdlib: str | Path | None = None) -> tuple[Path, Path]:
    """Write demo_train_000001.bin and demo_val_000000.bin into `folder` and return their paths.

    Takes about a second. Raises ValueError where this Python carries too little documentation in source form;
    says so on stderr, and goes on, where it lacks only the topics.
    """
    from train_gpt import write_shard

    stdlib = Path(stdlib or sysconfig.get_path("stdlib"))
    topics, docstrings = topic_texts(stdlib), docstring_texts(stdlib)
    documents = list(cut_documents(topics + docstrings))
    size = sum(map(len, documents))
    if size < MIN_BYTES:
        raise ValueError(
            f"the demo's text needs {MIN_BYTES:,} bytes of Python's own documentation, but {stdlib} holds {size:,}: "
            "use a Python with its standard library in source form, or pass train_files= and val_files= of your own."
        )
    if not topics:
        print(f"{stdlib} has no pydoc_data: the demo's text is docstrings alone ({size:,} bytes).", file=sys.stderr)
    train, val = split_documents(documents)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "demo_train_000001.bin", folder / "demo_val_000000.bin"
    for path, part in zip(paths, (train, val)):
        write_shard(path, to_tokens(part))
    return paths


def bigram_baseline(train_tokens: np.ndarray, val_tokens: np.ndarray, vocab_size: int) -> float:
    """Nats per token of a bigram count model of `train_tokens` on predicting each next token of `val_tokens`.

    p(b | a) = (count(ab) + kinds(a) p(b)) / (count(a) + kinds(a)), where kinds(a) is how many different tokens followed
    a, and p(b) the add-one frequency of b (Witten and Bell 1991). Any vocabulary: only pairs that occur are stored.
    """
    train, val = (np.asarray(tokens, dtype=np.int64) for tokens in (train_tokens, val_tokens))
    unigram_V = (np.bincount(train, minlength=vocab_size) + 1) / (len(train) + vocab_size)
    pairs, pair_counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    count_V = np.bincount(pairs // vocab_size, weights=pair_counts, minlength=vocab_size)
    kinds_V = np.bincount(pairs // vocab_size, minlength=vocab_size).clip(min=1)
    last, code = val[:-1], val[:-1] * vocab_size + val[1:]
    slot = np.searchsorted(pairs, code).clip(max=len(pairs) - 1)
    count = np.where(pairs[slot] == code, pair_counts[slot], 0)
    probability = (count + kinds_V[last] * unigram_V[val[1:]]) / (count_V[last] + kinds_V[last])
    return float(-np.log(probability).mean())


def verdict(loss: float, plan, cfg) -> str:
    """A run's final loss beside what counting token pairs reaches on the same text; a DataPlan and a RunConfig."""
    from train_gpt import Runtime, read_shard, val_batches

    train = np.concatenate([read_shard(shard.path) for shard in plan.train])
    served = list(val_batches(cfg, plan, Runtime()))
    val = np.concatenate([*(batch.inputs for batch in served), served[-1].targets[-1:]])
    baseline = bigram_baseline(train, val, cfg.vocab_size)
    beside = f"{'below' if loss < baseline else 'not below'} the {baseline:.4f} of a bigram-count model"
    return f"final val_loss {loss:.4f}, {beside} of the same text, nats/{'byte' if cfg.bos_id == BOS_ID else 'token'}"


def main(argv: list[str] | None = None) -> None:
    from train_gpt import read_shard

    parser = argparse.ArgumentParser(description="Build the demo's shards from Python's own documentation.")
    default = Path(os.environ.get("DATA_PATH", "."), "data", "demo")  # where the trainer looks
    parser.add_argument("folder", nargs="?", default=default, help="where the two shards go (default: %(default)s)")
    paths = build_demo(parser.parse_args(argv).folder)
    train, val = map(read_shard, paths)
    for path, tokens in zip(paths, (train, val)):
        print(f"{path}: {len(tokens):,} tokens, {np.count_nonzero(tokens == BOS_ID):,} documents")
    print(f"bigram-count model: {bigram_baseline(train, val, VOCAB_SIZE):.4f} nats per token on the validation shard")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
