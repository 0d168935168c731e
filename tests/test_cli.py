"""Options, tables, the sentences that bad input gets, and a whole tiny run with its log.

A refusal is exit code 2 and one line for each problem on stderr; nothing is printed besides, written or overwritten.
"""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import small_run
from hypothesis import example, given
from hypothesis import strategies as st

import preflight
import train_gpt
from records import runlog
from train_gpt import (
    OPTIONS,
    RunConfig,
    RunLog,
    check_world_size,
    main,
    parse_options,
    project_sources,
    run,
    write_shard,
)

ROOT = Path(train_gpt.__file__).resolve().parent
SMALL = ("preset=demo", "scheduled_steps=3", "extension_steps=0", "val_tokens=16384")  # three steps of 2048, 4096, 6144
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PREFLIGHT_WORLD_SIZE", "DATA_PATH", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """An empty current folder, no launcher, no GPU."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


def documents(count: int, bos: int, length: int = 200) -> np.ndarray:
    """`count` tokens in documents of `length`."""
    return np.where(np.arange(count) % length == 0, bos, np.arange(count) % min(bos, 97))


@pytest.fixture
def data(workplace):
    """Enough demo data for SMALL, where the demo looks for it. Returns the paths of its two shards."""
    folder = workplace / "data" / "demo"
    folder.mkdir(parents=True)
    paths = folder / "demo_train_000001.bin", folder / "demo_val_000000.bin"
    for path, count in zip(paths, (16000, 16385)):
        write_shard(path, documents(count, bos=256))
    return paths


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and what is in it."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def refuse(capfd, workplace):
    """Call main() with bad input and check all that must hold of a refusal. `sentences` are patterns, in any order."""

    def call(argv, *sentences):
        before = contents(workplace)
        assert main(list(argv)) == 2
        printed = capfd.readouterr()
        assert printed.out == ""
        lines = printed.err.splitlines()
        assert len(lines) == len(sentences), printed.err
        for sentence in sentences:
            assert sum(bool(re.fullmatch(f"error: {sentence}", line)) for line in lines) == 1, printed.err
        assert contents(workplace) == before

    return call


# ----------------------------------------------------------------------------------------------------------------------
# Options


def test_the_options():
    names = """preset variant scheduled_steps extension_steps val_every val_tokens train_files val_files seed epochs
        micro_splits vocab_size bos_id fp8 attention checkpoint_every resume run_id show"""
    assert set(OPTIONS) == set(names.split())


def test_no_options_are_the_record():
    cfg = parse_options([])
    assert cfg == RunConfig() == parse_options(["preset=record", "variant=v3"])
    assert (cfg.scheduled_steps, cfg.extension_steps, cfg.val_every, cfg.val_tokens) == (1275, 15, 250, 10_485_760)
    assert (cfg.vocab_size, cfg.bos_id, cfg.seed, cfg.epochs) == (50257, 50256, 0, 1)
    assert cfg.train_files == "data/fineweb10B/fineweb_train_*.bin"
    assert cfg.val_files == "data/fineweb10B/fineweb_val_*.bin"


GIVEN = {
    "preset": "demo",
    "variant": "v2",
    "scheduled_steps": 12,
    "extension_steps": 0,
    "val_every": 3,
    "val_tokens": 16384,
    "train_files": "some/where*.bin",
    "val_files": "/else/where.bin",
    "seed": 7,
    "epochs": 4,
    "micro_splits": 2,
    "vocab_size": 300,
    "bos_id": 299,
    "fp8": "off",
    "attention": "reference",
    "checkpoint_every": 5,
    "resume": "a=b.pt",  # only the first = separates
    "run_id": "try-1",
    "show": "plan",
}


def test_every_option_reaches_the_configuration():
    cfg = parse_options(f"{key}={value}" for key, value in GIVEN.items())
    assert {key: getattr(cfg, key) for key in OPTIONS} == GIVEN
    assert all(type(getattr(cfg, key)) is kind for key, kind in OPTIONS.items())
    assert cfg.model.vocab_size == 300


@pytest.mark.parametrize(("text", "value"), [("1_000", 1000), ("0012", 12), ("16", 16)])
def test_whole_numbers(text, value):
    assert parse_options([f"scheduled_steps={text}"]).scheduled_steps == value


@pytest.mark.parametrize(
    ("variant", "steps", "fields"),
    [
        ("v1", (1315, 20), dict(bigram_rows=251520, sign_rows=0, learned_gate_scale=False, gate_scale=0.05)),
        ("v2", (1315, 10), dict(bigram_rows=251520, sign_rows=0, learned_gate_scale=False, gate_scale=0.1)),
        ("v3", (1275, 15), dict(bigram_rows=377280, sign_rows=8192, learned_gate_scale=True, gate_scale=0.1)),
    ],
)
def test_variants(variant, steps, fields):
    cfg = parse_options([f"variant={variant}"])
    assert (cfg.scheduled_steps, cfg.extension_steps) == steps
    assert {name: getattr(cfg.model, name) for name in fields} == fields
    assert parse_options([f"variant={variant}", "scheduled_steps=9"]).total_steps == 9 + steps[1]
    demo, plain = parse_options(["preset=demo", f"variant={variant}"]), parse_options(["preset=demo"])
    assert demo.total_steps == plain.total_steps and demo.model.dim == plain.model.dim  # toy sizes stay
    assert (demo.table, demo.model.plan, demo.model.sign_rows > 0) == (cfg.table, cfg.model.plan, variant == "v3")


RUN_ID = "run_id= takes up to 100 letters, digits, - _, inner dots, not latest; got "


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["schedule_steps=5"], r"unknown option 'schedule_steps=5'; did you mean scheduled_steps=\?"),
        (["--seed=1"], r"unknown option '--seed=1'; did you mean seed=\?"),
        (["steps=5"], r"unknown option 'steps=5'; did you mean scheduled_steps= or extension_steps=\?"),
        (["valtokens=1"], r"unknown option 'valtokens=1'; did you mean val_tokens=\?"),
        (["zzz=1"], rf"unknown option 'zzz=1'; options are {', '.join(OPTIONS)}\."),
        (["zzz"], rf"unknown option 'zzz'; options are {', '.join(OPTIONS)}\."),
        (["=1"], rf"unknown option '=1'; options are {', '.join(OPTIONS)}\."),
        (["seed"], r"options are key=value; got 'seed' without a value: write seed=\.\.\."),
        (["seed=1", "seed=2"], r"option seed= is given twice \('1' and '2'\): keep one\."),
        (["seed=1", "fp8=on", "seed=1"], r"option seed= is given twice \('1' and '1'\): keep one\."),
        (["seed="], r"seed= takes a whole number; got ''\."),
        (["seed=one"], r"seed= takes a whole number; got 'one'\."),
        (["seed=1.0"], r"seed= takes a whole number; got '1\.0'\."),
        (["seed=1e3"], r"seed= takes a whole number; got '1e3'\."),
        (["seed=-1"], r"seed= must be at least 0; got -1\."),
        (["extension_steps=-5"], r"extension_steps= must be at least 0; got -5\."),
        (["checkpoint_every=-5"], r"checkpoint_every= must be at least 0; got -5\."),
        (["scheduled_steps=2"], r"scheduled_steps= must be at least 3; got 2\."),
        (["val_every=0"], r"val_every= must be at least 1; got 0\."),
        (["val_tokens=0"], r"val_tokens= must be at least 1; got 0\."),
        (["epochs=0"], r"epochs= must be at least 1; got 0\."),
        (["micro_splits=0"], r"micro_splits= must be at least 1; got 0\."),
        (["vocab_size=1"], r"vocab_size= must be at least 2; got 1\."),
        (["preset="], r"preset= takes record\|demo; got ''\."),
        (["preset=Demo"], r"preset= takes record\|demo; got 'Demo'\."),
        (["variant=v4"], r"variant= takes v3\|v2\|v1; got 'v4'\."),
        (["fp8=1"], r"fp8= takes auto\|on\|off; got '1'\."),
        (["attention=fa3"], r"attention= takes auto\|triton\|fa4\|torch\|reference; got 'fa3'\."),
        (["show=all"], r"show= takes plan\|gates\|params\|schedule; got 'all'\."),
        (["vocab_size=70000"], r"vocab_size= must be at most 65536, shards hold 16-bit tokens; got 70000\."),
        (["bos_id=50257"], r"bos_id= must be below vocab_size=50257; got 50257\."),
        (["vocab_size=300"], r"bos_id= must be below vocab_size=300; got 50256\."),
        (["val_tokens=5000000"], r"val_tokens= must be a multiple of 2097152 .* got 5000000: try val_tokens=4194304\."),
        (["val_tokens=5"], r"val_tokens= must be a multiple of 2097152 .*; got 5: try val_tokens=2097152\."),
        (["preset=demo", "val_tokens=65537"], r"val_tokens= must be a multiple of 16384 .*: try val_tokens=65536\."),
        (["run_id=a/b"], RUN_ID + r"'a/b'\."),
        (["run_id=.."], RUN_ID + r"'\.\.'\."),
        (["run_id=.hidden"], RUN_ID + r"'\.hidden'\."),
        (["run_id=a."], RUN_ID + r"'a\.'\."),
        (["run_id=latest"], RUN_ID + r"'latest'\."),
    ],
)  # fmt: skip
def test_bad_options(refuse, words, sentence):
    with pytest.raises(ValueError) as error:
        parse_options(words)
    assert re.fullmatch(sentence, str(error.value)), error.value
    refuse(words, sentence)


@pytest.mark.parametrize("words", [["train_files="], ["val_files="], ["run_id=" + 300 * "x"], ["seed=4294967296"]])
def test_values_that_cannot_work_are_refused_by_name(data, capfd, words):
    """An empty pattern, a name that no file system takes, a seed that torch's generators do not."""
    assert main([*SMALL, *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert words[0].partition("=")[0] + "=" in line


# ----------------------------------------------------------------------------------------------------------------------
# Tables


@pytest.mark.parametrize("table", ["plan", "gates", "params", "schedule"])
@pytest.mark.parametrize(
    "options", [["variant=v1"], ["variant=v2"], [], ["preset=demo"], ["preset=demo", "variant=v1"]]
)
def test_show(capfd, workplace, table, options):
    """A heading, a rule and aligned rows; no GPU, data or log is needed for it."""
    cfg = parse_options(options)
    assert main([*options, f"show={table}"]) == 0
    printed = capfd.readouterr()
    heading, rule, *rows = printed.out.splitlines()
    assert printed.err == "" and contents(workplace) == {}
    assert set(rule) == {"-"} and len(rule) == max(map(len, [heading, *rows]))
    cells = train_gpt.TABLES[table](cfg)
    assert {tuple(row) for row in cells} == {tuple(cells[0])}, "every row has a cell for every heading"
    assert len(rows) == len(cells)
    for line, row in zip(rows, cells):
        at = 0
        for title, value in row.items():
            at = heading.index(title, at)
            assert line[at:].startswith(preflight.cell(value)), f"{value} does not stand under {title}: {line}"
            at += len(title)


def shown(capfd, *options) -> str:
    assert main(list(options)) == 0
    return capfd.readouterr().out


def test_the_tables_hold_what_they_are_for(capfd):
    totals = re.findall(r"total, world size (\d) +- +([\d,]+)", shown(capfd, "show=params"))
    assert dict(totals) == {"8": "643,751,335", "4": "640,605,607", "2": "640,605,607", "1": "640,605,607"}
    plan = shown(capfd, "show=plan")
    assert len(re.findall(r"^\d+ ", plan, re.M)) == 11 and re.search(r"^6 +none .*early", plan, re.M)
    assert len(re.findall(r"^post gate ", shown(capfd, "show=gates"), re.M)) == 16


@pytest.mark.parametrize(("variant", "split"), [("v1", 877), ("v2", 877), ("v3", 851)])
def test_the_schedule_shows_every_event(capfd, variant, split):
    """Also where two events fall on the same step."""
    table = shown(capfd, "show=schedule", f"variant={variant}")
    assert re.search(rf"^{split} .*embed splits", table, re.M)
    assert len(re.findall("stage change", table)) == 2
    for event in ("start", "momentum is warm", "cooldown starts", "momentum falls", "extension"):
        assert event in table
    assert re.search(r"2560 .* last validation$", table, re.M)  # which looks further back than any step


@pytest.mark.parametrize(("steps", "extension", "falls"), [(3, 0, ""), (30, 6, ""), (150, 6, ""), (310, 6, "300")])
def test_the_schedule_of_a_short_run_shows_no_other_steps(capfd, steps, extension, falls):
    """310: momentum's warm-up runs into its cooldown, so that it never is warm, and falls from its last step on."""
    table = shown(capfd, "show=schedule", f"scheduled_steps={steps}", f"extension_steps={extension}")
    rows = [int(row) for row in re.findall(r"^(-?\d+) ", table, re.M)]
    assert rows[0] == 0 and rows[-1] == steps + extension and "momentum is warm" not in table
    assert re.findall(r"^(\d+) .*momentum falls", table, re.M) == [falls] * bool(falls)
    assert ("extension" in table) == bool(extension)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals: the machine and the launcher

NO_GPU = r"no NVIDIA GPU is visible, and preset=record needs one or more: on this machine run \./run\.sh demo\."


def no_shards(kind: str, folder: str = "") -> str:
    """No FineWeb shards, and the command that gets them."""
    pattern = re.escape(f"{folder}data/fineweb10B/fineweb_{kind}_*.bin")
    return rf"no shards match {pattern}: get them with python data/cached_fineweb10B\.py .*DATA_PATH.*\."


def test_the_record_without_data_and_without_a_gpu(refuse):
    refuse([], no_shards("train"), NO_GPU)


def test_the_record_without_a_gpu(refuse, workplace):
    folder = workplace / "data" / "fineweb10B"
    folder.mkdir(parents=True)
    write_shard(folder / "fineweb_train_000001.bin", documents(800_000, bos=50256))
    write_shard(folder / "fineweb_val_000000.bin", documents(2_097_153, bos=50256))
    refuse(["scheduled_steps=3", "extension_steps=0", "val_tokens=2097152"], NO_GPU)


def test_missing_validation_data(refuse, data):
    data[1].unlink()
    refuse(SMALL, r"no shards match data/demo/demo_val_\*\.bin: get them with python data/demo_text\.py .*\.")


def test_an_empty_data_folder(refuse, data):
    for path in data:
        path.unlink()
    refuse(SMALL, r"no shards match data/demo/demo_train_\*\.bin: get them with python data/demo_text\.py .*\.")


def test_data_path(refuse, monkeypatch, data, workplace):
    """Shards are looked for below DATA_PATH, and the sentence says where that was."""
    monkeypatch.setenv("DATA_PATH", "wrong/place")
    refuse([], no_shards("train", "wrong/place/"), NO_GPU)
    (workplace / "elsewhere").mkdir()
    monkeypatch.chdir(workplace / "elsewhere")
    monkeypatch.setenv("DATA_PATH", "..")
    monkeypatch.setenv("PREFLIGHT_WORLD_SIZE", "1")
    assert main(list(SMALL)) == 0
    (workplace / "data").rename(workplace / "elsewhere" / "data")
    (workplace / "elsewhere").rename(workplace / "what*is [this]")  # no pattern itself
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("DATA_PATH", "what*is [this]")
    assert main(list(SMALL)) == 0


@pytest.mark.parametrize("size", [0, 3, 5, 6, 7, 9, 12, -8])
def test_world_sizes_that_cannot_share_a_batch(refuse, monkeypatch, data, size):
    monkeypatch.setenv("PREFLIGHT_WORLD_SIZE", str(size))
    refuse(
        SMALL, rf"the number of GPUs must be one of 1, 2, 4, 8(, [0-9]+)*; got {size}: try NPROC=[1248] \./run\.sh\."
    )


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_world_sizes_that_pass_the_preflight(capfd, monkeypatch, data, workplace, size):
    """It looks at everything and leaves nothing."""
    before = contents(workplace)
    monkeypatch.setenv("PREFLIGHT_WORLD_SIZE", str(size))
    assert check_world_size(parse_options(list(SMALL)), size) == "" and main(list(SMALL)) == 0
    assert capfd.readouterr() == ("", "") and contents(workplace) == before


def launch(monkeypatch, **environment: str) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


THREE = r"the number of GPUs must be one of 1, 2, 4, 8(, [0-9]+)*; got 3: try NPROC=[124] \./run\.sh\."


def test_three_processes_under_the_launcher(refuse, monkeypatch, data):
    launch(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT="1")
    refuse(SMALL, THREE)


def test_another_rank_tells_only_where_the_first_does_not(refuse, monkeypatch, data):
    """The launcher ends it while it waits for rank 0's sentence; one that is still there then has to speak."""
    launch(monkeypatch, RANK="1", LOCAL_RANK="1", WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT="1")
    waited = []
    monkeypatch.setattr(train_gpt.time, "sleep", waited.append)
    refuse(SMALL, THREE)
    assert waited == [5]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "0"}, r"RANK is set but LOCAL_RANK, WORLD_SIZE is not: start with torchrun .*\."),
        ({"WORLD_SIZE": "8"}, r"WORLD_SIZE is set but RANK, LOCAL_RANK is not: start with torchrun .*\."),
        ({"RANK": "0", "WORLD_SIZE": "8"}, r"RANK, WORLD_SIZE is set but LOCAL_RANK is not: start with torchrun .*\."),
        ({"LOCAL_RANK": "0", "RANK": "", "WORLD_SIZE": "8"}, r"LOCAL_RANK, WORLD_SIZE is set but RANK is not: .*\."),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost"},
            r"RANK=0, LOCAL_RANK=0, WORLD_SIZE=8 need MASTER_ADDR and MASTER_PORT .*: start with torchrun\.",
        ),
    ],
)
def test_a_launcher_that_tells_only_half(refuse, monkeypatch, data, environment, sentence):
    launch(monkeypatch, **environment)
    refuse(SMALL, sentence)


def test_everything_that_is_wrong_is_told_at_once(refuse, monkeypatch, workplace):
    (workplace / "logs").mkdir()
    (workplace / "logs" / "mine.txt").write_text("dear results\n")
    monkeypatch.setenv("PREFLIGHT_WORLD_SIZE", "3")
    refuse(["run_id=mine"], THREE, r"run_id=mine already has the log .*", no_shards("train"), NO_GPU)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("fp8=on", r"fp8=on needs a GPU of compute capability 8\.9 or newer .*: use fp8=auto\."),
        ("attention=triton", r"attention=triton needs a GPU: use attention=auto or attention=reference on the CPU\."),
        ("attention=torch", r"attention=torch needs a GPU: use attention=auto or attention=reference on the CPU\."),
        ("attention=fa4", r"attention=fa4 needs a GPU: use attention=auto or attention=reference on the CPU\."),
    ],
)
def test_choices_that_need_a_gpu(refuse, data, word, sentence):
    refuse([*SMALL, word], sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("preset=demo fp8=on", "fp8=on takes bfloat16 models, which preset=demo is not: use fp8=auto."),
        ("preset=demo attention=torch", "attention=torch takes 16-bit models, which preset=demo is not: use auto."),
        ("preset=demo attention=fa4", "attention=fa4 takes 16-bit models, which preset=demo is not: use auto."),
        ("attention=fa4", "attention=fa4 needs the package flash-attn-4 (pip install flash-attn-4), or use auto."),
        ("attention=torch", ""),
    ],
)
def test_choices_that_need_more_than_a_gpu(monkeypatch, words, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if not installed, wherever this runs
    assert preflight.check_choices(parse_options(words.split())) == sentence


def test_what_is_chosen_and_why(monkeypatch):
    cpu, record = torch.device("cpu"), parse_options([])
    assert train_gpt.choose_fp8(parse_options(["fp8=off"]), cpu) == (False, "as asked")
    assert train_gpt.choose_fp8(parse_options(["preset=demo"]), cpu) == (False, "float32 models train without it")
    assert record.fp8 == "auto" and train_gpt.choose_fp8(record, cpu) == (False, "this device has no FP8")
    assert train_gpt.choose_attention("auto", cpu, 16, torch.float32) == ("reference", "no GPU")
    monkeypatch.setattr(train_gpt.kernels, "REFERENCE_OPS", True)
    for word in "auto", "triton", "torch":
        assert train_gpt.choose_attention(word, cpu, 16, torch.float32) == ("reference", "REFERENCE_OPS=1")


# ----------------------------------------------------------------------------------------------------------------------
# Refusals: data


def change_header(path: Path, index: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[4 * index : 4 * index + 4] = np.int32(value).tobytes()
    path.write_bytes(data)


def change_token(path: Path, index: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[1024 + 2 * index : 1026 + 2 * index] = np.uint16(value).tobytes()
    path.write_bytes(data)


# what is done to a shard (of 16000 tokens: 33024 bytes), and what is said about it
DAMAGES = {
    "empty file": (lambda p: p.write_bytes(b""), r"is 0 bytes, shorter than a shard's header of 1024: .+\."),
    "half a header": (lambda p: p.write_bytes(p.read_bytes()[:500]), r"is 500 bytes, shorter than .* 1024: .+\."),
    "magic": (lambda p: change_header(p, 0, 7), r"is no token shard, its first number is 7, not 20240520: .+\."),
    "version": (lambda p: change_header(p, 1, 2), r"has shard version 2, and only 1 is read: .+\."),
    "too short": (lambda p: p.write_bytes(p.read_bytes()[:-2]), r"is 33022 bytes but .* 33024 \(16000 tokens\): .+\."),
    "too long": (lambda p: p.write_bytes(p.read_bytes() + b"\0"), r"is 33025 bytes but .* 33024 \(16000 .*\): .+\."),
    "count": (lambda p: change_header(p, 2, 15999), r"is 33024 bytes but .* 33022 \(15999 tokens\): .+\."),
    "no tokens": (lambda p: change_header(p, 2, 0), r"holds no tokens \(its header says 0\): .+\."),
    "negative count": (lambda p: change_header(p, 2, -5), r"holds no tokens \(its header says -5\): .+\."),
    "no BOS": (
        lambda p: write_shard(p, np.full(16000, 5)),
        r"holds no document start \(token 256\): .*bos_id=.*\.",
    ),
    "id beyond the vocabulary": (
        lambda p: change_token(p, 4321, 257),
        r"holds token id 257 at position 4321, but vocab_size=257 allows ids up to 256: .*vocab_size=.*\.",
    ),
    "largest id": (lambda p: change_token(p, 0, 65535), r"holds token id 65535 at position 0, but vocab_size=257 .*\."),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_shard(refuse, data, damage):
    spoil, sentence = DAMAGES[damage]
    spoil(data[0])
    refuse(SMALL, rf"data/demo/demo_train_000001\.bin {sentence}")


def test_a_bad_shard_among_good_ones(refuse, data):
    second = data[0].with_name("demo_train_000002.bin")
    second.write_bytes(data[0].read_bytes())
    change_header(second, 1, 3)
    refuse(SMALL, r"data/demo/demo_train_000002\.bin has shard version 3, .*\.")


def test_a_bad_validation_shard(refuse, data):
    change_token(data[1], 16384, 300)  # the very last target
    refuse(SMALL, r"data/demo/demo_val_000000\.bin holds token id 300 at position 16384, .*\.")


def test_ids_beyond_the_vocabulary_of_the_record(refuse, workplace):
    """Between the vocabulary and its padding there is nothing either."""
    (workplace / "a.bin").parent.mkdir(exist_ok=True)
    for token in (50257, 50300, 65535):
        write_shard(workplace / "a.bin", np.array([50256, 1, 2, token, 3]))
        refuse(["train_files=a.bin"], rf"a\.bin holds token id {token} at position 3, .*ids up to 50256: .*\.", NO_GPU)


def test_too_few_training_tokens(refuse, data):
    """16,000 tokens in documents of 200 give the three steps of SMALL, and no fourth."""
    sentence = (
        r"the schedule needs 18,432 tokens.* 1 training shards? of 16,000 .* 12,288 usable .*\(3 of 4 steps; .*\."
    )
    refuse([*SMALL[:2], "extension_steps=1", "val_tokens=16384", "epochs=1"], sentence)


def test_too_few_validation_tokens(refuse, data):
    needs = (
        r"val_tokens=32768 needs as many tokens, and data/demo/demo_val_\*\.bin gives 16384 .*: set val_tokens=16384\."
    )
    refuse([*SMALL[:3], "val_tokens=32768"], needs)
    write_shard(data[1], documents(16384, bos=256))
    refuse(SMALL, r"data/demo/demo_val_\*\.bin holds fewer than .*16385 tokens.*: .+\.")


# ----------------------------------------------------------------------------------------------------------------------
# Refusals: the log


@pytest.mark.parametrize("words", [[], ["run_id=mine"]])
def test_a_log_folder_that_cannot_be_made(refuse, data, workplace, words):
    """A file is in the way; that stops even a superuser."""
    (workplace / "logs").write_text("not a folder\n")
    refuse([*SMALL, *words], r"the log folder logs cannot be written \(.+\): free it or run in another folder\.")


def test_a_log_folder_that_cannot_be_written(refuse, data, workplace, monkeypatch):
    (workplace / "logs").mkdir()

    def write(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", write)
    refuse(SMALL, r"the log folder logs cannot be written \(Permission denied\): free it or run in another folder\.")
    assert os.listdir(workplace / "logs") == []


def test_a_file_where_checkpoints_would_be(refuse, data, workplace):
    (workplace / "logs").mkdir()
    (workplace / "logs" / "mine").write_text("not a folder\n")
    refuse([*SMALL, "run_id=mine"], r"logs/mine is a file where run_id=mine would keep .*: choose another run_id=\.")


def test_an_existing_run_id(refuse, data, workplace):
    (workplace / "logs").mkdir()
    (workplace / "logs" / "mine.txt").write_text("dear results\n")
    refuse([*SMALL, "run_id=mine"], r"run_id=mine already has the log logs/mine\.txt: choose another run_id=\.")
    assert os.listdir(workplace / "logs") == ["mine.txt"]


# ----------------------------------------------------------------------------------------------------------------------
# As a process


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter with nearly nothing in its environment."""
    bare = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=bare | environment, capture_output=True, text=True, timeout=120
    )


def test_the_program_ends_with_code_2_and_no_traceback(workplace):
    done = python(str(ROOT / "train_gpt.py"), "epochs=2", cwd=workplace)
    assert (done.returncode, done.stdout) == (2, "")
    lines = sorted(done.stderr.splitlines())
    assert len(lines) == 2, done.stderr
    assert re.fullmatch(f"error: {NO_GPU}", lines[0]) and re.fullmatch(f"error: {no_shards('train')}", lines[1])
    assert contents(workplace) == {}


def test_import_is_inert(workplace):
    """No file, network, thread, process group, CUDA, random number or output; and the tables can be read."""
    code = f"""
import socket, sys, threading
sys.path.insert(0, {str(ROOT)!r})
import torch
def refuse(*_): raise AssertionError("import reached for the network")
socket.socket.connect = socket.getaddrinfo = refuse
threads, state = threading.active_count(), torch.get_rng_state()
import train_gpt
assert threading.active_count() == threads
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert len(train_gpt.PARAM_TABLE) == 19 and len(train_gpt.parameter_plan(train_gpt.ModelConfig())) == 19
assert torch.equal(torch.get_rng_state(), state)
"""
    done = python("-c", code, cwd=workplace)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert contents(workplace) == {}


# ----------------------------------------------------------------------------------------------------------------------
# A whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of five tiny steps: its folder, its log as bytes, what it printed, the source as it was at the start."""
    folder = tmp_path_factory.mktemp("run")
    write_shard(folder / "train_000001.bin", documents(6000, bos=49, length=50))
    write_shard(folder / "val_000000.bin", documents(1025, bos=49, length=50))
    cfg = small_run(
        scheduled_steps=4, extension_steps=1, val_every=2, val_tokens=1024, run_id="tiny",
        train_files=str(folder / "train_*.bin"), val_files=str(folder / "val_*.bin"),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in LAUNCHER:
            patch.delenv(name, raising=False)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        printed = []
        source = {p.relative_to(ROOT).as_posix(): p.read_bytes() for p in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py"))}
        patch.setattr("builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words))))
        run(cfg)
    log = (folder / "logs" / "tiny.txt").read_bytes()
    return SimpleNamespace(folder=folder, cfg=cfg, log=log, printed=printed, source=source)


def test_a_run_leaves_its_log_and_nothing_else(finished):
    assert set(contents(finished.folder)) == {"train_000001.bin", "val_000000.bin", "logs/tiny.txt"}
    assert finished.printed[-1] == f"log: {Path('logs') / 'tiny.txt'}"


def test_the_log_holds_its_source_byte_for_byte(finished):
    sources = runlog.extract_sources(finished.log)
    names = list(sources)
    assert names[:3] == ["train_gpt.py", "triton_kernels.py", "dc_triton_kernels.py"] and "data/demo_text.py" in names
    for name, text in sources.items():
        assert text.encode() == finished.source[name], name


SOURCE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
HOSTILE = "step:1/5 train_time:1ms step_avg:1.00ms\n##### END a.py #####\n##### BEGIN b.py bytes=1 sha256=0 #####\n"


@given(first=SOURCE, second=SOURCE)
@example("", "\n")
@example("\n\n x = 1 \n\n\n", "no line end")
@example("windows\r\nlines\r\n", "a lone \r, \u2028 and \N{GREEK SMALL LETTER SIGMA}\n")
@example(HOSTILE, HOSTILE.strip())
def test_any_source_comes_back_from_the_log(first, second):
    """Whatever a file holds, line ends and look-alikes of the log's own lines included."""
    with tempfile.TemporaryDirectory() as name:
        log = RunLog(Path(name) / "log.txt")
        log.embed("a.py", first)
        log.embed("data/b.py", second)
        log.write(log.RULE)
        log.file.close()
        assert runlog.extract_sources(log.path) == {"a.py": first, "data/b.py": second}


def test_a_log_never_opens_a_file_that_exists(tmp_path):
    """Also where it appeared after the checks."""
    (tmp_path / "log.txt").write_text("dear results\n")
    with pytest.raises(FileExistsError):
        RunLog(tmp_path / "log.txt")
    assert (tmp_path / "log.txt").read_text() == "dear results\n"


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, capfd):
    log = RunLog(tmp_path / "log.txt")
    log.say("before")
    log.file.stream = open("/dev/full", "w")
    log.say("in vain")
    log.write("not shown")
    log.say("after")
    told, warned = capfd.readouterr()
    assert told == "before\nin vain\nafter\n" and (tmp_path / "log.txt").read_text() == "before\n"
    assert warned == (
        f"warning: {tmp_path / 'log.txt'} cannot be written any more (No space left on device): the run goes on "
        "without it.\n"
    )


@pytest.mark.parametrize(
    ("reader", "streams"),
    [("a full disk", ["stdout"]), ("a closed pipe", ["stdout", "stderr"]), ("none", ["stdout", "stderr"])],
)
def test_a_run_goes_on_where_nobody_reads_it(data, workplace, reader, streams):
    """A whole run of the demo, with its progress bar; none: it is started without the streams."""
    command = [sys.executable, preflight.__file__.replace("preflight", "train_gpt"), *SMALL, "run_id=a"]
    with contextlib.ExitStack() as files:
        if reader == "a closed pipe":
            closed, end = os.pipe()
            os.close(closed)
        elif reader == "none":
            command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        broken = files.enter_context(open(end if reader == "a closed pipe" else "/dev/full", "w"))
        out = {name: broken if name in streams else subprocess.PIPE for name in ("stdout", "stderr")}
        done = subprocess.run(command, cwd=workplace, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, **out)
    assert done.returncode == 0, done.stderr
    assert "step:3/3 val_loss:" in (workplace / "logs" / "a.txt").read_text()
    if streams == ["stdout"]:
        assert done.stderr.count("warning: standard output cannot be written any more (No space left on device): ") == 1


def test_a_log_that_was_removed_is_not_named_as_there(tmp_path, capfd):
    log = RunLog(tmp_path / "log.txt")
    log.end()
    log.path.unlink()
    log.end()
    assert capfd.readouterr().out.splitlines() == [
        f"log: {log.path}", f"warning: the log {log.path} was removed meanwhile."
    ]  # fmt: skip


def test_other_ranks_keep_no_log(capfd):
    log = RunLog(None)
    log.say("said")
    log.write("written")
    log.embed("a.py", "x = 1\n")
    assert capfd.readouterr() == ("", "")


VAL = r"step:{n}/5 val_loss:\d+\.\d{{4}} train_time:\d+ms step_avg:\d+\.\d\dms"
TRAIN = r"step:{n}/5 train_time:\d+ms step_avg:\d+\.\d\dms"


def test_step_lines(finished):
    """The field's own: training lines count from 1, validation lines from 0 and at the end; both in order."""
    lines = [line for line in runlog.split_log(finished.log)[1].splitlines() if line.startswith("step:")]
    expected = [VAL.format(n=0)]
    for n in range(1, 6):
        expected += [TRAIN.format(n=n)] + ([VAL.format(n=n)] if n in (2, 4, 5) else [])
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected):
        assert re.fullmatch(pattern, line, re.ASCII), line
    said = [line for line in finished.printed if line.startswith("step:")]
    assert said == [line for line in lines if "val_loss" in line]  # the bar stands for the others


def test_times_and_averages_agree(finished):
    lines = re.findall(rb"^step:(\d+)/5.* train_time:(\d+)ms step_avg:([\d.]+)ms$", finished.log, re.M)
    times = [int(ms) for _, ms, _ in lines]
    assert len(lines) == 9 and times == sorted(times)
    for step, ms, average in lines:  # both are rounded: to half a millisecond, and to half a hundredth
        steps = max(int(step), 1)
        assert abs(int(ms) / steps - float(average)) <= 0.5 / steps + 0.005 + 1e-9


def test_the_log_is_read_as_a_complete_run(finished):
    parsed = runlog.parse_log(finished.folder / "logs" / "tiny.txt")
    assert parsed.steps == 5 and [step for step, *_ in parsed.val] == [0, 2, 4, 5]
    assert [step for step, _ in parsed.train] == [1, 2, 3, 4, 5]
    assert parsed.run_id == "tiny" and parsed.info["world_size"] == "1"
    assert parsed.config == {name: getattr(finished.cfg, name) for name in OPTIONS}
    assert parsed.info["torch"] == torch.__version__ and parsed.info["hardware"].startswith("cpu (")
    assert parsed.info["packages"]["numpy"] == np.__version__


def test_header(finished):
    """Between two rules: the run, the commit, the options, the versions, the hardware; then what was chosen."""
    rule = "=" * 100
    header, _, body = runlog.split_log(finished.log)[1].removeprefix(rule + "\n").partition(f"\n{rule}\n")
    starts = ["run_id: tiny", "commit: ", "config: {", "Running Python ", "Running PyTorch ", "Running Triton version "]
    starts += ["packages: {", "hardware: cpu (", "world_size: 1"]
    lines = header.splitlines()
    assert len(lines) == len(starts) and all(line.startswith(start) for line, start in zip(lines, starts))
    assert re.fullmatch(r"commit: (unknown|[0-9a-f]{40,64}( \(dirty\))?)", lines[1])
    chosen, tokens, first, *_ = body.splitlines()
    assert chosen == "attention: reference (no GPU); fp8: off (float64 models train without it)"
    assert tokens.startswith("tokens per step: 512 / 768 / 1024 / 1024")
    assert first.startswith("step:0/5 val_loss:")


def test_losses(finished):
    """The first is that of 128 equal guesses, nearly; and counting pairs of bytes stands beside the last."""
    losses = [float(loss) for loss in re.findall(rb"^step:\d+/5 val_loss:([\d.]+) ", finished.log, re.M)]
    assert abs(losses[0] - np.log(128)) < 0.02 and losses[-1] < losses[0]
    report = finished.log.decode().splitlines()[-1]
    beside = re.fullmatch(r"final val_loss ([\d.]+), (not )?below the ([\d.]+) of a bigram-count model .*", report)
    assert float(beside[1]) == losses[-1] and bool(beside[2]) == (losses[-1] >= float(beside[3]))
    assert report in finished.printed


def test_a_second_run_of_that_name_is_refused_and_the_log_is_kept(finished, monkeypatch):
    monkeypatch.chdir(finished.folder)
    with pytest.raises(ValueError, match="run_id=tiny already has the log"):
        run(finished.cfg)
    assert (finished.folder / "logs" / "tiny.txt").read_bytes() == finished.log


def test_only_project_files_count_as_sources(tmp_path, monkeypatch):
    """What an environment inside the project's folder has installed is not the project's, whatever its name is."""
    ours = [*train_gpt.SOURCES, "data/ours.py"]
    others = ["venv/lib/python3.12/site-packages/theirs.py", "env/lib/python3.12/site-packages/binary.so"]
    for name in ours + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\xff\xfe\x00" if name.endswith(".so") else f"# {name}\r\n".encode())
    for name in ours[-1:] + others:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(tmp_path / name)))
    monkeypatch.setattr(train_gpt, "ROOT", tmp_path)
    assert project_sources() == {name: f"# {name}\r\n" for name in ours}


# ----------------------------------------------------------------------------------------------------------------------
# FP8 by variant


@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
def test_only_v3_quantizes_its_mlps(variant):
    """v1 and v2 had an FP8 head alone."""
    chosen, small = parse_options(["preset=demo", f"variant={variant}"]), small_run()
    model = dataclasses.replace(chosen.model, head_dim=8, bigram_rows=small.model.bigram_rows, dtype=torch.float32)
    cfg = dataclasses.replace(chosen, model=model)
    trainer = train_gpt.Trainer(cfg, train_gpt.DataPlan([], [], {16: 64}), train_gpt.Runtime(), "reference", fp8=True)
    assert (trainer.model.quantized is not None) == (variant == "v3")
