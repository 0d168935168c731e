"""The data tools: the demo's text, text to shards, looking at shards, fetching shards; no network, no vocabulary."""

import dataclasses
import errno
import gzip
import hashlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]

import cached_fineweb10B as hub_tool  # noqa: E402
import demo_text  # noqa: E402
import fineweb  # noqa: E402
import verify  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import RunConfig, check_shard, read_shard, stages_by_step, write_shard  # noqa: E402

BYTES = {"vocab_size": 257, "bos_id": 256}
WORDS = ("some", "plain", "English", "words", "that", "make", "a", "text", "of", "which", "nobody", "learns", "much")


def documents_in(path: Path) -> list[bytes]:
    """Documents of a byte-level shard, without their BOS."""
    starts = check_shard(path, **BYTES).bos_positions
    assert starts[0] == 0
    return [bytes(document[1:].astype(np.uint8)) for document in np.split(read_shard(path), starts[1:])]


def sentences(count: int, words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(count)]


def test_no_tool_bears_the_name_of_another_module():
    ours = {ROOT, ROOT / "data", ROOT / "tests"}
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() not in ours]
    for name in [path.stem for path in (ROOT / "data").glob("*.py")]:
        assert name not in sys.stdlib_module_names and PathFinder.find_spec(name, elsewhere) is None, name


# === demo_text ===
@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return demo_text.build_demo(tmp_path_factory.mktemp("demo"))


def test_demo_is_about_a_million_bytes_of_prose_split_by_document(demo):
    train, val = map(documents_in, demo)
    size, val_size = sum(map(len, train + val)), sum(map(len, val))
    assert 700_000 < size < 1_300_000
    assert val_size + len(val) > 65_536 and 0.05 < val_size / size < 0.10
    assert len(set(train + val)) == len(train + val)
    assert sum(chr(byte).isalpha() or byte == ord(" ") for byte in b"".join(val)) > 0.9 * val_size
    assert all(document == document.strip() and b">>>" not in document for document in train + val)


def test_demo_is_the_same_every_time(demo, tmp_path):
    for first, second in zip(demo, demo_text.build_demo(tmp_path), strict=True):
        assert first.name == second.name and first.read_bytes() == second.read_bytes()


def test_demo_reads_the_library_without_running_it(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    topics = {"topic": "\n\n".join(sentences(5000, 20))}
    (tmp_path / "pydoc_data" / "topics.py").write_text(f"topics = {topics!r}\n")
    (tmp_path / "argparse.py").write_text(
        '"""This text is read but the module never runs at all."""\nraise SystemExit\n'
    )
    train, val = map(documents_in, demo_text.build_demo(tmp_path / "out", stdlib=tmp_path))
    assert any(b"the module never runs" in document for document in train + val)


def test_demo_goes_on_without_the_topics(tmp_path, capsys):
    library = Path(sysconfig.get_path("stdlib"))
    for name in {module.split(".")[0] for module in demo_text.MODULES.split()}:
        source = library / name if (library / name).is_dir() else library / f"{name}.py"
        (tmp_path / source.name).symlink_to(source)
    train, val = demo_text.build_demo(tmp_path / "out", stdlib=tmp_path)
    assert len(read_shard(val)) > 65_536
    assert capsys.readouterr().err.count("\n") == 1


def test_demo_says_what_a_bare_library_lacks(tmp_path):
    with pytest.raises(ValueError, match="holds 0: use a Python"):
        demo_text.build_demo(tmp_path / "out", stdlib=tmp_path)
    assert not (tmp_path / "out").exists()


def test_demo_command_writes_where_the_trainer_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    demo_text.main([])
    assert sorted(p.name for p in tmp_path.glob("data/demo/*.bin")) == ["demo_train_000001.bin", "demo_val_000000.bin"]


def test_demo_command_prints_the_bigram_baseline(tmp_path, capsys, demo):
    demo_text.main([str(tmp_path)])
    baseline = demo_text.bigram_baseline(*map(read_shard, demo), vocab_size=257)
    assert f"{baseline:.4f} nats per token" in capsys.readouterr().out
    assert 2.0 < baseline < 3.0  # English text: well below the 4-odd nats of byte frequencies' worst case, ln 257 = 5.5


def test_the_verdict_is_on_the_text_that_validation_serves(tmp_path, demo):
    """Also where it is spread over several shards, of each of which validation takes whole groups of sequences: a pair
    of tokens at the seam is all that differs."""
    cfg = train_gpt.parse_options(["preset=demo", "val_tokens=32768"])
    train, val = (read_shard(path) for path in demo)
    parts = [tmp_path / name for name in ("whole.bin", "first.bin", "second.bin")]
    for path, part in zip(parts, (val[:32769], val[:20000], val[16384:32769])):
        train_gpt.write_shard(path, part)
    shards = [train_gpt.ShardInfo(demo[0], *[None] * (len(train_gpt.ShardInfo._fields) - 1))]
    plans = [train_gpt.DataPlan(shards, paths, {2048: 64}) for paths in (parts[:1], parts[1:])]
    told = [demo_text.verdict(2.0, plan, cfg) for plan in plans]
    numbers = [float(line.split("below the ")[1].split()[0]) for line in told]
    assert numbers[0] == pytest.approx(demo_text.bigram_baseline(train, val[:32769], 257), abs=1e-4)
    assert numbers[1] == pytest.approx(numbers[0], abs=1e-3) and all(line.endswith("nats/byte") for line in told)


def plain_bigram(train: list[int], val: list[int], vocab_size: int) -> float:
    """The baseline's formula, pair by pair."""
    total = 0.0
    for a, b in zip(val, val[1:]):
        followers = [y for x, y in zip(train, train[1:]) if x == a]
        kinds = max(len(set(followers)), 1)
        unigram = (train.count(b) + 1) / (len(train) + vocab_size)
        total -= np.log((followers.count(b) + kinds * unigram) / (len(followers) + kinds))
    return total / (len(val) - 1)


tokens_below_five = st.lists(st.integers(0, 4), min_size=2, max_size=30)


@settings(deadline=None, max_examples=50)
@given(tokens_below_five, tokens_below_five)
def test_bigram_baseline_is_its_formula(train, val):
    assert demo_text.bigram_baseline(np.array(train), np.array(val), 5) == pytest.approx(plain_bigram(train, val, 5))


@settings(deadline=None, max_examples=20)
@given(tokens_below_five, st.integers(0, 4))
def test_bigram_probabilities_sum_to_one(train, last):
    nats = [demo_text.bigram_baseline(np.array(train), np.array([last, after]), 5) for after in range(5)]
    assert np.exp(-np.array(nats)).sum() == pytest.approx(1)


# === fineweb: text to shards ===
class CountingBytes(fineweb.ByteEncoding):
    """Byte tokens that note what they encode, and are interrupted before the text number `stop_at`."""

    def __init__(self, stop_at: int | None = None):
        self.texts, self.stop_at = [], stop_at

    def encode_ordinary(self, text):
        if len(self.texts) == self.stop_at:
            raise KeyboardInterrupt
        self.texts.append(text)
        return super().encode_ordinary(text)


TEXTS = [f"{number}: {text}" for number, text in enumerate(sentences(60, 12))]
SMALL = {"shard_tokens": 1000, "val_fraction": 0.25}


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "CHUNK_CHARS", 500)  # several chunks from a small text
    return write_jsonl(tmp_path / "text.jsonl", TEXTS)


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tokenized(inputs, out: Path, encoding=None, **options) -> tuple[list[str], list[str]]:
    """Texts that come back from the training and validation shards."""
    writers = fineweb.tokenize(inputs, out, encoding or CountingBytes(), **(SMALL | options))
    return tuple(
        [document.decode() for path, _, _ in writers[split].shards for document in documents_in(path)]
        for split in ("train", "val")
    )


def test_every_document_comes_out_once_whole_and_in_order(source, tmp_path):
    train, val = tokenized([source], tmp_path / "mine")
    assert sorted(train + val) == sorted(TEXTS) and val
    assert train == [text for text in TEXTS if text in train] and val == [text for text in TEXTS if text in val]
    shards = [check_shard(path, **BYTES) for path in sorted((tmp_path / "mine").glob("mine_train_*.bin"))]
    assert [shard.path.name for shard in shards[:2]] == ["mine_train_000001.bin", "mine_train_000002.bin"]
    for shard, following in zip(shards, shards[1:]):  # full: the next document would not have fitted
        first_of_next = len(documents_in(following.path)[0]) + 1
        assert shard.num_tokens <= 1000 < shard.num_tokens + first_of_next


def test_a_document_longer_than_a_shard_stays_whole(tmp_path):
    texts = ["short one", "long " * 300, "another short one"]
    train, _ = tokenized([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "mine", val_fraction=0.0)
    assert train == texts
    assert len(list((tmp_path / "mine").glob("*.bin"))) == 3


def test_a_shard_may_be_exactly_full(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["nine char"] * 25)
    fineweb.tokenize([source], tmp_path / "mine", CountingBytes(), shard_tokens=100, val_fraction=0.0)
    assert [len(read_shard(path)) for path in sorted((tmp_path / "mine").glob("*.bin"))] == [100, 100, 50]


def test_long_documents_are_cut_where_asked(source, tmp_path):
    book = "A title\n\n" + "\n\n".join(sentences(8, 20)) + " " * 300 + "x" * 350
    pieces = list(fineweb.cut_text(book, 100))
    assert "".join(pieces) == book and max(map(len, pieces)) <= 100
    assert all(piece[-1].isspace() for piece in pieces if "x" not in piece)
    assert any(piece.endswith("\n\n") for piece in pieces)
    assert list(fineweb.cut_text("short", 5)) == ["short"]
    write_jsonl(source, [*TEXTS, book])
    options = {"document_chars": 100, "val_fraction": 0.5}
    train, val = tokenized([source], tmp_path / "whole" / "mine", **options)
    wanted = [piece for text in [*TEXTS, book] for piece in fineweb.cut_text(text, 100) if piece.strip()]
    assert sorted(train + val) == sorted(wanted) and len(wanted) > len(TEXTS) + 10
    sides = [set(fineweb.cut_text(book, 100)) & set(side) for side in (train, val)]
    assert sorted(map(bool, sides)) == [False, True]
    with pytest.raises(KeyboardInterrupt):  # an interruption counts pieces, not books
        tokenized([source], tmp_path / "cut" / "mine", CountingBytes(stop_at=len(wanted) - 3), **options)
    tokenized([source], tmp_path / "cut" / "mine", **options)
    assert all_bytes(tmp_path / "cut" / "mine") == all_bytes(tmp_path / "whole" / "mine")


def test_copies_of_a_text_never_fall_on_both_sides(tmp_path):
    train, val = tokenized([write_jsonl(tmp_path / "a.jsonl", TEXTS + TEXTS[::-1])], tmp_path / "mine")
    assert not set(train) & set(val)
    again, _ = tokenized([write_jsonl(tmp_path / "b.jsonl", TEXTS[::-1])], tmp_path / "other")
    assert set(again) == set(train)


def test_val_fraction_bounds(source, tmp_path):
    assert tokenized([source], tmp_path / "none", val_fraction=0.0)[1] == []
    assert tokenized([source], tmp_path / "all", val_fraction=1.0)[0] == []


def test_a_second_run_changes_nothing_and_encodes_nothing(source, tmp_path):
    tokenized([source], tmp_path / "mine")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "mine").glob("*.bin")}
    again = CountingBytes()
    tokenized([source], tmp_path / "mine", again)
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (tmp_path / "mine").glob("*.bin")}
    assert again.texts == []


@pytest.mark.parametrize("stop_at, keeps_some", [(0, False), (1, False), (30, True), (45, True), (59, True)])
def test_an_interrupted_run_continues_to_the_same_bytes(source, tmp_path, stop_at, keeps_some):
    tokenized([source], tmp_path / "whole" / "mine")
    folder = tmp_path / "cut" / "mine"
    with pytest.raises(KeyboardInterrupt):
        tokenized([source], folder, CountingBytes(stop_at))
    kept = sum(len(documents_in(path)) for path in folder.glob("*.bin"))
    assert (kept > 0) == keeps_some
    rest = CountingBytes()
    tokenized([source], folder, rest)
    assert len(rest.texts) == len(TEXTS) - kept
    assert all_bytes(folder) == all_bytes(tmp_path / "whole" / "mine")


def test_a_shard_damaged_or_lost_meanwhile_is_made_again(source, tmp_path, capsys):
    tokenized([source], tmp_path / "mine")
    whole = all_bytes(tmp_path / "mine")
    second, third = (tmp_path / "mine" / f"mine_train_00000{i}.bin" for i in (2, 3))
    second.write_bytes(bytes([*second.read_bytes()[:1500], 1, *second.read_bytes()[1501:]]))
    third.unlink()
    tokenized([source], tmp_path / "mine")
    assert all_bytes(tmp_path / "mine") == whole
    assert "mine_train_000002.bin is damaged" in capsys.readouterr().err


def test_worker_processes_make_the_same_bytes(source, tmp_path):
    encoding = fineweb.ByteEncoding()
    tokenized([source], tmp_path / "one" / "mine", encoding)
    tokenized([source], tmp_path / "two" / "mine", encoding, workers=2)
    assert all_bytes(tmp_path / "one" / "mine") == all_bytes(tmp_path / "two" / "mine")


def test_a_tiktoken_encoding_makes_its_own_tokens(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([b]): b for b in range(256)} | {b"th": 256, b"the": 257, b" a": 258}
    pattern, special = r"\s?\w+|\s+|[^\s\w]+", {"<|endoftext|>": 259}
    encoding = tiktoken.Encoding("tiny", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    texts = ["the cat and the hat", "a literal <|endoftext|> starts no document", "\ud800 is half a character", "thé ✓"]
    fineweb.tokenize([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "tiny", encoding, val_fraction=0.0)
    info = check_shard(tmp_path / "tiny" / "tiny_train_000001.bin", vocab_size=260, bos_id=259)
    documents = np.split(read_shard(info.path), info.bos_positions[1:])
    assert [encoding.decode(document[1:].tolist()) for document in documents] == [
        *texts[:2],
        "\ufffd is half a character",
        texts[3],
    ]
    assert documents[0][:3].tolist() == [259, 257, ord(" ")]


def test_blank_documents_are_left_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "one", " \n", "two"])
    path.write_text(path.read_text() + "\n\n")
    assert tokenized([path], tmp_path / "mine", val_fraction=0.0)[0] == ["one", "two"]


def test_folders_and_formats_are_read_in_sorted_order(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "from gzip"}\n')
    write_jsonl(folder / "b.jsonl", ["from jsonl", "and more"])
    (folder / "c.txt").write_text("\ufeffa text\nof two lines\n<|endoftext|>\nand the next\n", encoding="utf-8")
    (folder / "deeper" / "d.TXT").write_text("the last")
    (folder / "notes.md").write_text("not an input")
    train, _ = tokenized([folder], tmp_path / "mine", val_fraction=0.0)
    assert train == ["from gzip", "from jsonl", "and more", "a text\nof two lines\n", "and the next\n", "the last"]
    named = tokenized([folder / "b.jsonl", folder / "a.jsonl.gz"], tmp_path / "other", val_fraction=0.0)[0]
    assert named == ["from jsonl", "and more", "from gzip"]


def test_parquet_is_read_where_pyarrow_is(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "id": list(range(len(TEXTS)))}), path, row_group_size=7)
    assert tokenized([path], tmp_path / "mine", val_fraction=0.0)[0] == TEXTS
    with pytest.raises(ValueError, match="no column 'body' among text, id"):
        tokenized([path], tmp_path / "other", text_key="body")


def test_parquet_without_pyarrow_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="pip install pyarrow"):
        tokenized([tmp_path / "a.parquet"], tmp_path / "mine")


def cut_gzip(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)[:-9]  # mtime: the same test name in every process


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cut off\n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"body": "x", "id": 3}\n', r"line 1: .* 'text', but .* fields body, id: .*--text-key"),
        ("a.jsonl", b'{"text": null}\n', r"line 1: .* string 'text'"),
        ("a.jsonl", b'["text"]\n', r"line 1: .* holds list"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', r"line 1 is not JSON"),
        ("a.jsonl.gz", cut_gzip('{"text": "fine"}\n' * 50), r"a\.jsonl\.gz is damaged or cut off"),
        ("a.jsonl.gz", b'{"text": "not gzip"}\n', r"a\.jsonl\.gz is damaged or cut off"),
        ("a.txt", b"caf\xe9\n", r"a\.txt is not UTF-8 .*iconv"),
        ("a.md", b"text", r"a\.md is none"),
    ],
)
def test_inputs_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tokenized([tmp_path / name], tmp_path / "mine")
    assert not list((tmp_path / "mine").glob("*.bin"))


def test_inputs_that_are_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds none"):
        tokenized([tmp_path / "empty"], tmp_path / "mine")
    with pytest.raises(ValueError, match="absent.jsonl does not exist"):
        tokenized([tmp_path / "absent.jsonl"], tmp_path / "mine")


def test_other_settings_are_refused_until_fresh(source, tmp_path):
    folder = tmp_path / "mine"
    tokenized([source], folder)
    before = all_bytes(folder)
    with pytest.raises(ValueError, match=r"other settings \(shard_tokens\): pass --fresh"):
        tokenized([source], folder, shard_tokens=2000)
    write_jsonl(source, TEXTS[:-1])
    with pytest.raises(ValueError, match=r"other settings \(inputs\)"):
        tokenized([source], folder)
    assert all_bytes(folder) == before
    tokenized([source], folder, shard_tokens=2000, fresh=True)
    shards = {path.name for path in folder.glob("*.bin")}
    assert set(verify.recorded_sums(folder)) == shards and len(shards) < len(before) - 2
    assert all(verify.matches_recorded_sum(folder / name) for name in shards)


def test_shards_of_unknown_origin_are_not_continued(source, tmp_path):
    (tmp_path / "mine").mkdir()
    write_shard(tmp_path / "mine" / "mine_train_000001.bin", np.array([256, 1, 2]))
    with pytest.raises(ValueError, match="other settings"):
        tokenized([source], tmp_path / "mine")


def test_the_command_says_that_a_partial_last_shard_is_expected(source, tmp_path, capsys):
    tokens = sum(len(text) + 1 for text in TEXTS)
    limit = round(tokens / 1.54)  # a corpus of about 1.54 shards
    command = [str(source), "--out", str(tmp_path / "mine"), "--encoding", "bytes", "--shard-tokens", str(limit)]
    assert fineweb.main([*command, "--val-fraction", "0", "--workers", "1"]) == 0
    sizes = [check_shard(path, **BYTES).num_tokens for path in sorted((tmp_path / "mine").glob("*.bin"))]
    out = capsys.readouterr().out
    assert len(sizes) == 2 and sum(sizes) == tokens
    assert f"mine_train_000002.bin is {sizes[1] / limit:.1%} full, as it should be" in out
    assert "train_files=" in out and "val_files=" not in out and "vocab_size=257 bos_id=256" in out


def test_an_empty_split_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["a single document"])
    command = [str(path), "--out", str(tmp_path / "mine"), "--encoding", "bytes", "--workers", "1"]
    with pytest.raises(ValueError, match="none of the 1 documents fell to val .* stay together.: choose another"):
        fineweb.main([*command, "--val-fraction", "1e-9"])


def no_network(*_):
    raise ConnectionError("no route")


def test_a_missing_vocabulary_is_named_file_by_file(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(ValueError) as error:
        fineweb.load_gpt2()
    for part in (*fineweb.GPT2_FILES, *fineweb.GPT2_FILES.values(), str(tmp_path), "TIKTOKEN_CACHE_DIR"):
        assert part in str(error.value)


def test_the_vocabulary_is_found_where_tiktoken_looks_for_it(tmp_path, monkeypatch):
    public = pytest.importorskip("tiktoken_ext.openai_public")
    addresses = {}
    monkeypatch.setattr(public, "data_gym_to_mergeable_bpe_ranks", lambda **asked: addresses.update(asked) or {})
    public.gpt2()
    for key in ("vocab_bpe_file", "encoder_json_file"):
        name = fineweb.GPT2_FILES[addresses[key].split("/")[-1]]
        assert name == hashlib.sha1(addresses[key].encode()).hexdigest()
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        assert not fineweb.gpt2_is_cached()
        (tmp_path / name).touch()
    assert fineweb.gpt2_is_cached()


SLOW_RUN = """
import sys, time
sys.path.insert(0, {data!r})
import fineweb
fineweb.CHUNK_CHARS = 500
class SlowBytes(fineweb.ByteEncoding):
    def encode_ordinary(self, text):
        open({mark!r}, "w").close()
        time.sleep(1)
        return super().encode_ordinary(text)
if __name__ == "__main__":
    fineweb.run_tool(lambda: fineweb.tokenize([{source!r}], {out!r}, SlowBytes(), workers=2) and 0)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("stop", ["SIGKILL", "SIGINT"])
def test_workers_leave_with_a_parent_that_is_stopped(source, tmp_path, stop):
    mark, script = tmp_path / "working", tmp_path / "slow_run.py"
    script.write_text(
        SLOW_RUN.format(data=str(ROOT / "data"), mark=str(mark), source=str(source), out=str(tmp_path / "mine"))
    )
    command = [sys.executable, str(script)]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731 - a shell's background jobs ignore it
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, **pipes, start_new_session=True, text=True, preexec_fn=heard)
    while not mark.exists() and process.poll() is None:
        time.sleep(0.02)
    if stop == "SIGINT":  # as Ctrl+C does: to the whole group
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.kill()
    _, err = process.communicate(timeout=60)  # ends once no worker holds the pipes
    assert process.returncode == (130 if stop == "SIGINT" else -signal.SIGKILL)
    assert "Traceback" not in err
    assert (err.strip().splitlines()[-1] == "interrupted: what was finished is kept.") == (stop == "SIGINT")


def test_the_line_to_train_with_can_be_pasted(tmp_path, capsys):
    """Whatever the folder is called: a shell reads the words that the trainer then finds the shards with."""
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {i}" for i in range(40)])
    fineweb.main([str(path), "--out", str(tmp_path / "it's [mine] ?"), "--encoding", "bytes", "--val-fraction", "0.5"])
    line = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(line.removeprefix("train with:"))
    cfg = train_gpt.parse_options(["preset=demo", *words])
    for split in "train", "val":
        [shard] = train_gpt.find_shards(getattr(cfg, f"{split}_files"), cfg)
        assert shard.name.startswith(f"it's [mine] ?_{split}_")


# === verify ===
def byte_shard(path: Path, documents: list[bytes]) -> Path:
    write_shard(path, demo_text.to_tokens(documents))
    return path


def damaged_header(index: int, value: int):
    def damage(good: bytes) -> bytes:
        header = np.frombuffer(good[:1024], dtype="<i4").copy()
        header[index] = value
        return header.tobytes() + good[1024:]

    return damage


def with_token(position: int, token: int):
    def damage(good: bytes) -> bytes:
        tokens = np.frombuffer(good[1024:], dtype="<u2").copy()
        tokens[position] = token
        return good[:1024] + tokens.tobytes()

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (damaged_header(0, 12345), "12345"),
        (damaged_header(1, 2), "version 2"),
        (damaged_header(2, 0), "no tokens"),
        (damaged_header(2, -5), "-5"),
        (damaged_header(2, 1001), "1001"),
        (lambda good: good[:-1], "3023 bytes"),
        (lambda good: good + b"\0\0", "3026 bytes"),
        (lambda good: good[:1000], "1000 bytes"),
        (lambda good: b"", "0 bytes"),
        (with_token(0, 7), "no document start"),
        (with_token(777, 50257), "50257 at position 777"),
        (with_token(778, 50300), "50300 at position 778"),
        (with_token(999, 65535), "65535 at position 999"),
    ],
)
def test_verify_names_what_is_wrong(tmp_path, capsys, damage, message):
    good, bad = tmp_path / "good.bin", tmp_path / "bad.bin"
    tokens = np.arange(1000) % 500 + 3
    tokens[0] = 50256
    write_shard(good, tokens)
    bad.write_bytes(damage(good.read_bytes()))
    assert verify.main([str(bad), str(good)]) == 2
    out, err = capsys.readouterr()
    assert str(good) in out and str(bad) not in out
    assert err.count("\n") == 1 and str(bad) in err and message in err


def test_verify_names_paths_that_cannot_be_read(tmp_path, capsys):
    locked = byte_shard(tmp_path / "locked.bin", [b"text"])
    locked.chmod(0)
    paths = [tmp_path / "absent.bin", tmp_path, *([locked] if not os.access(locked, os.R_OK) else [])]
    assert verify.main(list(map(str, paths))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(paths) and all(str(path) in line for path, line in zip(paths, lines))


def test_verify_finds_a_changed_byte(tmp_path, capsys):
    path = byte_shard(tmp_path / "a.bin", [b"some text"] * 9)
    verify.record_sums(tmp_path, {"a.bin": verify.sha256(path)})
    assert verify.main(["--preset", "demo", str(path)]) == 0
    assert "as recorded in SHA256SUMS" in capsys.readouterr().out
    path.write_bytes(path.read_bytes().replace(b"s\0o\0m\0e", b"s\0o\0n\0e", 1))
    assert verify.main(["--preset", "demo", str(path)]) == 2
    assert "has changed since it was made" in capsys.readouterr().err


def test_sums_are_written_as_sha256sum_reads_them(tmp_path):
    (tmp_path / "b").write_bytes(b"abc")
    verify.record_sums(tmp_path, {"b": verify.sha256(tmp_path / "b"), "a": "0" * 64})
    verify.record_sums(tmp_path, {"a": None})
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of b"abc", from FIPS 180-4
    assert (tmp_path / verify.SUMS_FILE).read_text() == f"{known}  b\n"


def test_verify_shows_what_is_in_a_shard(tmp_path, capsys):
    documents = [b"The first line of all.", b"", b"x" * 300]
    path = tmp_path / "a.bin"
    write_shard(path, np.concatenate(([65, 66], demo_text.to_tokens(documents))))
    assert verify.main(["--preset", "demo", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"version 1, {2 + 23 + 1 + 301} tokens" in out
    assert "documents 3, mean 108 tokens" in out
    assert "5% <= 3, 25% <= 12, 50% <= 23, 75% <= 162, 95% <= 273, 100% <= 301" in out
    assert "the 2 tokens before the first BOS" in out and "1 documents are empty" in out
    assert "The first line of all." in out
    assert "too few documents for one batch" in out


def test_verify_counts_what_cutting_discards(tmp_path):
    """200 documents of 10 tokens, at most 8 used, in sequences of 16: each takes 8 + 8 + 1 tokens of 3 documents."""
    info = check_shard(byte_shard(tmp_path / "a.bin", [b"123456789"] * 200), **BYTES)
    served, used = verify.stage_use(info, 16, 8)
    assert (served, used) == (8 * 8 * 16, 8 * 8 * 30)  # 8 batches of 8 sequences; the documents left make no ninth
    base = RunConfig()
    stage = dataclasses.replace(base.schedule.stages[0], batch_tokens=128, max_doc_len=8)
    schedule = dataclasses.replace(base.schedule, stages=(stage,), extension=stage)
    cfg = dataclasses.replace(base, schedule=schedule, scheduled_steps=3, extension_steps=1)
    lines = list(verify.describe_cuts(info, cfg))
    assert lines[0].endswith("discards 46.7%")
    assert lines[1] == "a record run trains on 512 tokens and uses up 960 of text like this"


def test_verify_decodes_only_with_a_vocabulary_at_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fineweb, "load_gpt2", no_network)
    assert verify.decoder(50257, 50256) is None
    assert verify.decoder(257, 256)([72, 105, 256]) == "Hi"
    assert verify.decoder(32000, 1) is None


@pytest.mark.parametrize("tool", ["verify.py", "fineweb.py"])
def test_tools_run_from_anywhere_and_fail_in_one_sentence(tmp_path, tool):
    command = [sys.executable, str(ROOT / "data" / tool), "absent.txt"]
    command += ["--encoding", "bytes", "--out", "mine"] if tool == "fineweb.py" else []
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "absent.txt" in result.stderr


@pytest.mark.parametrize(
    "options",
    [["--val-fraction", "2"], ["--shard-tokens", "0"], ["--workers", "x"], ["--what"], ["--document-chars", "-1"]],
)
def test_bad_options_are_one_sentence(tmp_path, capsys, options):
    with pytest.raises(SystemExit) as stop:
        fineweb.main(["a.txt", "--out", str(tmp_path), *options])
    assert stop.value.code == 2
    assert re.fullmatch(r"error: .*\n", capsys.readouterr().err)


def test_a_full_disk_is_a_sentence_with_the_remedy(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x.bin"))
    assert re.fullmatch(r"the disk is full \(.*x\.bin\): make room .* again\.", verify.explain(full))


# === cached_fineweb10B ===
class FakeHub:
    """Stands for hf_hub_download: serves shards of SHARD_TOKENS tokens, or what faults[name] lists, attempt by attempt.

    A fault is an exception to raise or a function of the good bytes; None, and the end of the list, leave them alone.
    """

    def __init__(self):
        self.faults, self.calls = {}, []
        self.held = threading.Event()  # a stalled download waits for this

    def content(self, name: str) -> bytes:
        tokens = np.random.default_rng(list(name.encode())).integers(0, 50256, hub_tool.SHARD_TOKENS, dtype=np.uint16)
        tokens[0] = 50256
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(tokens)
        return header.tobytes() + tokens.tobytes()

    def download(self, repo_id, filename, *, repo_type, local_dir, force_download):
        attempt = sum(name == filename for name, _ in self.calls)
        self.calls.append((filename, force_download))
        assert (repo_id, repo_type) == ("kjj0/fineweb10B-gpt2", "dataset")
        faults = self.faults.get(filename, self.faults.get("*", []))
        fault = faults[attempt] if attempt < len(faults) else None
        path = Path(local_dir) / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(fault, Exception):
            raise fault
        path.write_bytes(fault(self.content(filename)) if fault else self.content(filename))
        return str(path)

    def stall(self, good: bytes) -> bytes:
        self.held.wait(60)
        raise ConnectionError("released when the test is over")

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.content(name)).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    fake = FakeHub()
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    for name, value in {
        "SHARD_TOKENS": 2000,
        "SHARD_BYTES": 5024,
        "RETRY_SECONDS": (0, 0),
        "POLL_SECONDS": 0.01,
    }.items():
        monkeypatch.setattr(hub_tool, name, value)
    monkeypatch.setattr(hub_tool, "hf_hub_download", fake.download)
    monkeypatch.setattr(hub_tool, "published_sha256", fake.sha256)
    fake.folder = tmp_path / "data" / "fineweb10B"
    yield fake
    fake.held.set()


VAL, FIRST, SECOND, THIRD = "fineweb_val_000000.bin", *(f"fineweb_train_00000{i}.bin" for i in (1, 2, 3))


def shards_there(hub: FakeHub) -> list[str]:
    """Names of the shards in the folder, each of which must be exactly what the hub serves; no draft may be left."""
    names = sorted(path.name for path in hub.folder.glob("*.bin"))
    assert all((hub.folder / name).read_bytes() == hub.content(name) for name in names)
    assert not (hub.folder / ".download").exists()
    return names


def failure(argv: list[str]) -> str:
    with pytest.raises(ValueError) as error:
        hub_tool.main(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_fetching_and_then_only_verifying(hub, capsys):
    assert hub_tool.main(["2"]) == 0
    assert shards_there(hub) == [FIRST, SECOND, VAL]
    assert sorted(hub.calls) == [(FIRST, False), (SECOND, False), (VAL, False)]
    assert "3 of 3 shards" in capsys.readouterr().out
    assert hub_tool.main(["2"]) == 0
    assert len(hub.calls) == 3 and "(0 fetched now)" in capsys.readouterr().out
    assert verify.recorded_sums(hub.folder) == {name: hub.sha256(name) for name in (VAL, FIRST, SECOND)}


@pytest.mark.parametrize("count", ["0", "-1", "104", "abc", "1.5", ""])
def test_bad_counts_are_refused_before_any_download(hub, capsys, count):
    with pytest.raises(SystemExit) as stop:
        hub_tool.main([count])
    assert stop.value.code == 2 and hub.calls == [] and not hub.folder.exists()
    assert re.fullmatch(r"error: .*1 to 103.*\n", capsys.readouterr().err)


def test_good_counts_name_the_published_files():
    assert [hub_tool.shard_count(text) for text in ("1", "103")] == [1, 103]
    assert hub_tool.train_shard(103) == "fineweb_train_000103.bin"


def test_default_count_serves_the_schedule_where_half_of_the_text_is_discarded():
    tokens = sum(stage.batch_tokens for stage in stages_by_step(RunConfig()))
    assert 2 * tokens < hub_tool.DEFAULT_SHARDS * hub_tool.SHARD_TOKENS


TRUNCATE, LENGTHEN = (lambda good: good[:-100]), (lambda good: good + b"\0\0")
FLIP = lambda good: good[:3000] + bytes([good[3000] ^ 1]) + good[3001:]  # noqa: E731
SIZE_CHECK = OSError("Consistency check failed: file should be of size 5024 but has size 4000")


@pytest.mark.parametrize(
    "fault", [TRUNCATE, LENGTHEN, FLIP, damaged_header(1, 2), SIZE_CHECK, ConnectionError("reset")]
)
def test_a_bad_transfer_is_fetched_anew(hub, fault):
    hub.faults[SECOND] = [fault]
    assert hub_tool.main(["3"]) == 0
    assert shards_there(hub) == [FIRST, SECOND, THIRD, VAL]
    assert [force for name, force in hub.calls if name == SECOND] == [False, True]


@pytest.mark.parametrize("fault", [TRUNCATE, FLIP, SIZE_CHECK, ConnectionError("reset")])
def test_a_file_that_never_comes_whole_is_given_up(hub, fault):
    hub.faults[THIRD] = [fault] * 9
    message = failure(["3"])
    assert f"so {THIRD} did not come (3 of 4 shards are good and stay in {hub.folder})" in message
    assert "run the same command again" in message
    assert len([name for name, _ in hub.calls if name == THIRD]) == 3
    assert shards_there(hub) == [FIRST, SECOND, VAL]
    hub.faults.clear()
    hub.calls.clear()
    assert hub_tool.main(["3"]) == 0
    assert hub.calls == [(THIRD, False)]


def test_a_stalled_download_is_given_up(hub, monkeypatch):
    monkeypatch.setattr(hub_tool, "STALL_SECONDS", 0.5)
    hub.faults[FIRST] = [hub.stall]
    message = failure(["2"])
    assert message.startswith(f"no byte arrived for 0.5 s, so {FIRST} did not come (2 of 3 shards are good")
    assert "check the network" in message
    assert shards_there(hub) == [SECOND, VAL]


def http_error(status: int) -> Exception:
    """As huggingface_hub raises it: the telling error wrapped in one that only says that the file is not there."""
    cause = OSError(f"{status} Client Error")
    cause.response = SimpleNamespace(status_code=status, headers={})
    error = FileNotFoundError("An error happened while trying to locate the file on the Hub")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "fault, what, remedy",
    [
        (http_error(401), "HTTP 401", "hf auth login"),
        (http_error(403), "HTTP 403", "hf auth login"),
        (http_error(404), "HTTP 404", "data/fineweb.py"),
        (http_error(429), "HTTP 429", "wait some minutes"),
        (hub_tool.OfflineModeIsEnabled("offline"), "offline mode", "unset HF_HUB_OFFLINE"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full", "DATA_PATH"),
    ],
)
def test_what_trying_again_cannot_mend_stops_at_once(hub, fault, what, remedy):
    hub.faults["*"] = [fault] * 9
    message = failure(["9"])
    assert what in message and remedy in message
    assert f"so {VAL}, {FIRST}, {SECOND}, {THIRD} and 6 more did not come (0 of 10 shards" in message
    assert len(hub.calls) == len(set(hub.calls)) <= hub_tool.JOBS  # no file twice, and those not begun never
    assert shards_there(hub) == []


def test_no_network_is_said_once(hub, capsys):
    hub.faults["*"] = [ConnectionError("Name or service not known")] * 9
    message = failure(["2"])
    assert message.startswith("the hub does not answer (ConnectionError: Name or service not known)")
    assert capsys.readouterr().err.count("trying again") == 1


def test_too_small_a_disk_is_said_before_any_download(hub, monkeypatch):
    monkeypatch.setattr(hub_tool.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 5024 - 1))
    assert "3 shards need" in failure(["2"]) and hub.calls == []


def test_a_killed_run_is_taken_up(hub):
    hub.folder.mkdir(parents=True)
    for name in (VAL, FIRST):
        (hub.folder / name).write_bytes(hub.content(name))
    before = {name: (hub.folder / name).stat().st_mtime_ns for name in (VAL, FIRST)}
    (hub.folder / ".download").mkdir()
    (hub.folder / ".download" / SECOND).write_bytes(hub.content(SECOND)[:700])
    assert hub_tool.main(["2"]) == 0
    assert hub.calls == [(SECOND, False)] and shards_there(hub) == [FIRST, SECOND, VAL]
    assert before == {name: (hub.folder / name).stat().st_mtime_ns for name in (VAL, FIRST)}
    assert set(verify.recorded_sums(hub.folder)) == {VAL, FIRST, SECOND}


@pytest.mark.parametrize("damage", [TRUNCATE, FLIP, damaged_header(0, 1)])
def test_a_shard_damaged_later_is_set_aside_and_fetched_again(hub, capsys, damage):
    hub_tool.main(["2"])
    (hub.folder / FIRST).write_bytes(damage(hub.content(FIRST)))
    hub.faults[FIRST] = [None, http_error(429)]
    failure(["2"])
    assert shards_there(hub) == [SECOND, VAL]
    assert (hub.folder / f"{FIRST}.damaged").read_bytes() == damage(hub.content(FIRST))
    assert hub_tool.main(["2"]) == 0
    assert shards_there(hub) == [FIRST, SECOND, VAL]
    assert f"{FIRST} is damaged" in capsys.readouterr().err


def test_only_the_last_shard_may_be_short(hub, tmp_path):
    for name, fine in (("fineweb_train_000103.bin", True), ("fineweb_train_000102.bin", False)):
        write_shard(tmp_path / name, np.full(1500, 50256))
        if fine:
            hub_tool.check_arrived(tmp_path / name)
        else:
            with pytest.raises(ValueError, match="holds 1,500 tokens"):
                hub_tool.check_arrived(tmp_path / name)


def test_folders_are_no_progress(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert hub_tool.bytes_in(tmp_path) == 0
    (tmp_path / "a" / "b" / "c").write_bytes(b"123")
    assert hub_tool.bytes_in(tmp_path) == 3


def test_runs_at_the_same_time_fetch_once(hub):
    runs = [threading.Thread(target=hub_tool.main, args=(["2"],)) for _ in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert len(hub.calls) == 3 and shards_there(hub) == [FIRST, SECOND, VAL]


def test_every_place_names_the_same_number_of_shards():
    if not (ROOT / "README.md").exists():
        pytest.skip("a checkout without README.md")
    places = [path for name in ("README.md", "run.sh", "Dockerfile") if (path := ROOT / name).exists()]
    mentions = [
        (path.name, int(count or hub_tool.DEFAULT_SHARDS))
        for path in places
        for count in re.findall(r"cached_fineweb10B\.py(?:[ \t]+(\d+))?", path.read_text())
    ]
    assert mentions, "README.md tells how to get the data"
    assert {count for _, count in mentions} == {hub_tool.DEFAULT_SHARDS}, mentions
