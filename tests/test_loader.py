"""Batches against the slow re-implementation: which tokens each rank sees, where documents begin, where the data end.

Tokens are numbered through a shard, so that every value says where it came from; the BOS is 0.
"""

import dataclasses
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_batches import plain_cu_seqlens, plain_training_batches, plain_validation_batches
from plain_model import plain_bigram_rows, plain_sign_rows

import train_gpt
from train_gpt import (
    DataPlan,
    RunConfig,
    Runtime,
    ShardInfo,
    Trainer,
    TrainLoader,
    bigram_hash,
    check_shard,
    cu_length,
    cut_batches,
    data_plan,
    prepare,
    read_shard,
    sign_rows,
    stages_by_step,
    val_batches,
    write_shard,
)

BOS, CHUNK = 0, 4
ROWS = small_run().model.bigram_rows
WORLD_SIZES = (1, 2, 4, 8, 16)


def numbered(lengths, before: int = 0) -> list[int]:
    """Documents of these lengths, BOS included, behind `before` tokens of a document that began elsewhere."""
    fresh = iter(range(1, 65536))
    tokens = [next(fresh) for _ in range(before)]
    for length in lengths:
        tokens += [BOS, *(next(fresh) for _ in range(length - 1))]
    return tokens


def configure(folder: Path, sizes=((32, 5), (64, 9), (96, 3)), scheduled=6, extension=2, **changes) -> RunConfig:
    """A run whose stages take (tokens a step, longest document) from `sizes`; the extension is like the last stage."""
    base = small_run()
    rows = [dataclasses.replace(base.schedule.stages[0], batch_tokens=n, max_doc_len=doc) for n, doc in sizes]
    schedule = dataclasses.replace(base.schedule, stages=tuple(rows), extension=rows[-1], val_chunk=CHUNK)
    values = dict(
        schedule=schedule,
        scheduled_steps=scheduled,
        extension_steps=extension,
        vocab_size=65536,
        bos_id=BOS,
        train_files=str(folder / "train_*.bin"),
        val_files=str(folder / "val_*.bin"),
        val_tokens=8 * CHUNK,
    )
    return dataclasses.replace(base, **(values | changes))


def write_shards(folder: Path, train, val=None) -> None:
    """Training and validation shards; without `val`, one that is just long enough for the smallest validation."""
    for kind, shards in (("train", train), ("val", val or [numbered([8 * CHUNK + 1])])):
        for i, tokens in enumerate(shards):
            write_shard(folder / f"{kind}_{i:03d}.bin", np.array(tokens))


def requests(cfg: RunConfig, pieces: int) -> list[tuple[int, int]]:
    return [(stage.batch_tokens // pieces, stage.max_doc_len) for stage in stages_by_step(cfg)]


def numbers(error: Exception) -> list[int]:
    """The numbers of a sentence, in order."""
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", str(error))]


def load(cfg: RunConfig, plan: DataPlan, rank: int = 0, world_size: int = 1, **which):
    """All steps of one rank's loader."""
    loader = TrainLoader(cfg, plan, Runtime(rank=rank, world_size=world_size), **which)
    steps = []
    while (step := next(loader, None)) is not None:
        steps.append(step)
    loader.close()
    return steps


def assert_batch(batch, tokens: list[int], boundaries: list[int], cu_len: int, rows: int = ROWS) -> None:
    """The batch is that piece, in the dtypes that the model takes."""
    dtypes = [torch.int32, torch.int64, torch.int32, torch.int32]
    expected = (tokens[:-1], tokens[1:], plain_cu_seqlens(boundaries, cu_len), plain_bigram_rows(tokens[:-1], rows))
    assert [tensor.dtype for tensor in batch] == dtypes
    for tensor, values in zip(batch, expected):
        assert tensor.tolist() == values


# Documents shorter and longer than any cut, one-token documents (so runs of BOS, and a shard that ends in one), shards
# that start in the middle of a document, shards too short for a single batch.
LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 6), st.integers(5, 40)), min_size=1, max_size=90)
SHARDS = st.lists(st.builds(numbered, LENGTHS, st.integers(0, 3)), min_size=1, max_size=4)
RICH = numbered([1, 1, 1, 2, 7, 40, 3, 1, 12, 5] * 32 + [1])  # enough for several steps of every size used here


# ----------------------------------------------------------------------------------------------------------------------
# Which tokens make a batch


@settings(max_examples=150, deadline=None)
@given(
    shards=SHARDS,
    schedule=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12)), max_size=6),
    ranks=st.sampled_from([1, 8, 16]),
    epochs=st.integers(1, 3),
)
@example([numbered([5] * 8)], [(4, 9)] * 2, 8, 1)  # exactly one batch
@example([numbered([5] * 7), numbered([3] * 2), numbered([1]), numbered([5] * 8)], [(4, 9)], 8, 1)  # three skipped
@example([numbered([1] * 40)], [(4, 9)], 8, 2)  # nothing but BOS
def test_cut_batches(shards, schedule, ranks, epochs):
    infos = [ShardInfo(Path(), len(tokens), np.flatnonzero(np.array(tokens) == BOS)) for tokens in shards]
    ours = []
    for shard, batch in cut_batches(infos, schedule, max(8, ranks), epochs):
        ours.append([[token for start, end in spans for token in shards[shard][start:end]] for spans in batch])
    plain = list(plain_training_batches(shards * epochs, schedule, bos=BOS, ranks=ranks))
    assert ours == [[tokens for tokens, _ in pieces] for pieces in plain]


@settings(max_examples=25, deadline=None)
@given(shards=SHARDS, world_size=st.sampled_from(WORLD_SIZES), epochs=st.integers(1, 2))
@example([RICH], 1, 1)
@example([RICH], 2, 1)
@example([RICH], 4, 2)
@example([numbered([3]), RICH, RICH], 8, 1)
@example([RICH, numbered([1, 1], before=2), numbered([4]), RICH], 16, 1)
def test_ranks_share_the_pieces_in_order(shards, world_size, epochs):
    """Micro-step m of rank r is piece m * world_size + r; too few tokens are told beforehand, in numbers."""
    with tempfile.TemporaryDirectory() as name:
        cfg = configure(Path(name), scheduled=5, extension=1, epochs=epochs)
        write_shards(Path(name), shards)
        pieces = max(8, world_size)
        wanted = requests(cfg, pieces)
        plain = list(plain_training_batches(shards * epochs, wanted, bos=BOS, ranks=world_size))
        if len(plain) < cfg.total_steps:
            with pytest.raises(ValueError) as error:
                data_plan(cfg, pieces)
            need, usable = (pieces * sum(T for T, _ in part) for part in (wanted, wanted[: len(plain)]))
            assert numbers(error.value)[:6] == [
                need, len(shards), sum(map(len, shards)), usable, len(plain), cfg.total_steps
            ]  # fmt: skip
            return
        plan = data_plan(cfg, pieces)
        ranks = [load(cfg, plan, rank, world_size) for rank in range(world_size)]
        for step, (batch, (T, _)) in enumerate(zip(plain, wanted, strict=True)):
            served = [ranks[rank][step][micro] for micro in range(pieces // world_size) for rank in range(world_size)]
            for got, (tokens, boundaries) in zip(served, batch, strict=True):
                assert_batch(got, tokens, boundaries, plan.cu_lengths[T])
        assert {len(steps) for steps in ranks} == {cfg.total_steps}


def test_up_to_eight_ranks_see_the_same_tokens(tmp_path):
    write_shards(tmp_path, [RICH, RICH])
    cfg = configure(tmp_path)
    plan, seen = data_plan(cfg, 8), set()
    for world_size in (1, 2, 4, 8):
        ranks = [load(cfg, plan, rank, world_size) for rank in range(world_size)]
        micros = [step[m] for steps in zip(*ranks) for m in range(8 // world_size) for step in steps]
        seen.add(tuple(tuple(tensor.tolist()) for batch in micros for tensor in batch))
    assert len(seen) == 1


def test_a_shard_that_starts_inside_a_document(tmp_path):
    """What comes before the first BOS belongs to no document and is never served."""
    write_shards(tmp_path, [numbered([5] * 30, before=17)])
    (step, *_) = load(cfg := configure(tmp_path, sizes=((32, 9),) * 3, scheduled=3, extension=0), data_plan(cfg, 8))
    assert step[0].inputs.tolist() == [BOS, 18, 19, 20]


def test_a_document_of_one_token_at_the_end_of_a_piece(tmp_path):
    """It is a target only, so it leaves an empty document behind: two equal boundaries."""
    write_shards(tmp_path, [numbered([4, 1] * 30)])
    cfg = configure(tmp_path, sizes=((32, 9),) * 3, scheduled=3, extension=0)
    batch = load(cfg, data_plan(cfg, 8))[0][0]
    assert batch.targets.tolist() == [1, 2, 3, BOS]
    assert batch.cu_seqlens.tolist() == [0] + [4] * 127


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_epochs_repeat_the_files_in_order(tmp_path, epochs):
    """One pass gives one batch of each shard, then the shards come again from their starts."""
    shards = [numbered([5] * 10), numbered([5] * 9, before=1), numbered([5] * 8)]
    write_shards(tmp_path, shards)
    cfg = configure(tmp_path, sizes=((32, 9),) * 3, scheduled=3 * epochs, extension=0, epochs=epochs)
    first = [[batch.inputs.tolist() for batch in step] for step in load(cfg, data_plan(cfg, 8))]
    assert len(first) == 3 * epochs and first == first[:3] * epochs
    assert [step[0][:2] for step in first[:3]] == [[BOS, 1], [BOS, 2], [BOS, 1]]
    with pytest.raises(ValueError, match=r"\(3 of 4 steps"):
        data_plan(configure(tmp_path, sizes=((32, 9),) * 3, scheduled=3, extension=1, epochs=1), 8)


@pytest.mark.parametrize("shards", [[RICH], [RICH, numbered([2, 2]), RICH]], ids=["one shard", "three shards"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_loader_that_starts_later_goes_on_like_the_unbroken_one(tmp_path, shards, world_size):
    """At every step, across stage changes, shard changes and the start of a second epoch."""
    write_shards(tmp_path, shards)
    cfg = configure(tmp_path, scheduled=30, extension=2, epochs=4)
    plan = data_plan(cfg, 8)
    used = [shard for shard, _ in cut_batches(plan.train, requests(cfg, 8), 8, 4)]
    assert len(set(used)) == len(shards) - len(shards) // 2 and (len(shards) == 1 or used != sorted(used))
    rank = world_size - 1
    unbroken = [[[t.tolist() for t in batch] for batch in step] for step in load(cfg, plan, rank, world_size)]
    assert len(unbroken) == 32
    for first in range(0, 33, 3):
        rest = load(cfg, plan, rank, world_size, first_step=first)
        assert [[[t.tolist() for t in batch] for batch in step] for step in rest] == unbroken[first:]
    steps = train_gpt.warmup_steps(cfg)
    some = load(cfg, plan, rank, world_size, only=steps)
    assert [[[t.tolist() for t in batch] for batch in step] for step in some] == [unbroken[step] for step in steps]


@settings(max_examples=25, deadline=None)
@given(shards=SHARDS, splits=st.integers(2, 5), world_size=st.sampled_from([1, 4, 16]))
@example([RICH], 2, 1)
@example([RICH], 3, 4)
@example([numbered([1] * 700)], 4, 16)  # as many documents as tokens
@example([numbered([40] * 100)], 5, 1)  # more parts than documents
def test_micro_splits(shards, splits, world_size):
    """Every piece in parts that meet between documents: all tokens and targets once, filled to one size."""
    with tempfile.TemporaryDirectory() as name:
        cfg = configure(Path(name), scheduled=5, extension=1, epochs=2, micro_splits=splits)
        write_shards(Path(name), shards)
        pieces = max(8, world_size)
        wanted = requests(cfg, pieces)
        plain = list(plain_training_batches(shards * 2, wanted, bos=BOS, ranks=world_size))
        if len(plain) < cfg.total_steps:
            return
        steps, sizes = load(cfg, data_plan(cfg, pieces), 0, world_size), {}
        for step, batch, (T, max_len) in zip(steps, plain, wanted, strict=True):
            assert len(step) == splits * (pieces // world_size)
            for micro in range(pieces // world_size):
                tokens, boundaries = batch[micro * world_size]
                inputs, targets, starts = [], [], []
                for part in step[splits * micro : splits * (micro + 1)]:
                    size, used = len(part.inputs), int((part.targets >= 0).sum())
                    cu = part.cu_seqlens.tolist()
                    assert (part.targets[used:] == -1).all() and (part.inputs[used + 1 :] == BOS).all()
                    assert cu[0] == 0 and cu[-1] == size and cu == sorted(cu) and used in cu
                    assert max(b - a for a, b in zip(cu, cu[1:])) <= max_len  # filling included
                    assert part.bigram_rows.tolist() == plain_bigram_rows(part.inputs.tolist(), ROWS)
                    starts += [len(inputs) + start for start in cu if start <= used]
                    inputs += part.inputs[:used].tolist()
                    targets += part.targets[:used].tolist()
                    sizes.setdefault(T, set()).add((size, len(cu)))
                assert (inputs, targets) == (tokens[:-1], tokens[1:])
                assert set(starts) == set(boundaries)
        assert all(len(kinds) == 1 for kinds in sizes.values()), "one shape for every T"


def test_micro_splits_of_stages_that_differ_in_the_longest_document_only(tmp_path):
    """The room that a cut needs is that of the step's own stage."""
    write_shards(tmp_path, [numbered([60] * 900)])
    cfg = configure(tmp_path, sizes=((1024, 60), (1024, 9), (96, 3)), scheduled=6, extension=0, micro_splits=4)
    steps = load(cfg, data_plan(cfg, 8))
    assert [sum(int((part.targets >= 0).sum()) for part in step) for step in steps] == [1024] * 4 + [96] * 2


# ----------------------------------------------------------------------------------------------------------------------
# Length of cu_seqlens


@pytest.mark.parametrize(
    ("tokens", "documents", "length"),
    [
        (16384, 1, 64), (32768, 1, 96), (49152, 1, 128), (262144, 1, 896),  # v3's, where they are enough
        (16384, 62, 64), (16384, 63, 80), (49152, 126, 128), (49152, 127, 144), (262144, 895, 912),
        (256, 1, 128), (38399, 1, 128), (38400, 1, 128), (38700, 1, 256), (16384, 16385, 16400),
    ],
)  # fmt: skip
def test_cu_length(tokens, documents, length):
    assert cu_length(tokens, documents) == length


@given(tokens=st.sampled_from([1, 16, 4096, 16384, 32768, 49152, 262144]), documents=st.integers(1, 3000))
def test_cu_length_has_room_and_is_never_below_v3s(tokens, documents):
    """A piece of n documents has n + 1 boundaries, and validation may add an empty document in front."""
    floor = {16384: 64, 32768: 96, 49152: 128}.get(tokens, max(128, -(-(tokens // 300) // 128) * 128))
    assert cu_length(tokens, documents) >= max(floor, documents + 2)


def test_the_length_of_cu_seqlens_is_settled_from_the_data(tmp_path):
    """Thousands of one-token documents in a training piece and in a validation sequence."""
    chunk = 300
    write_shards(tmp_path, [[BOS] * 8 * 260 * 3], [[BOS] * (8 * chunk + 1)])
    cfg = configure(tmp_path, sizes=((2048, 9),) * 3, scheduled=3, extension=0, val_tokens=8 * chunk)
    cfg = dataclasses.replace(cfg, schedule=dataclasses.replace(cfg.schedule, val_chunk=chunk))
    plan = data_plan(cfg, 8)
    assert plan.cu_lengths == {256: 272, chunk: 304}
    for batch in (batch for step in load(cfg, plan) for batch in step):
        assert_batch(batch, [BOS] * 257, [*range(257), 256], 272)  # the last document is a target only
    for batch in val_batches(cfg, plan, Runtime()):
        assert_batch(batch, [BOS] * 301, [0, *range(300), 300], 304)


def test_every_step_has_the_settled_length(tmp_path):
    """The longest need of all batches with the same T counts, wherever in the run it comes."""
    write_shards(tmp_path, [numbered([129] * 24 + [1] * 129 * 8 * 3)])
    cfg = configure(tmp_path, sizes=((1024, 200),) * 3, scheduled=6, extension=0)
    plan = data_plan(cfg, 8)
    assert plan.cu_lengths[128] == 144
    steps = load(cfg, plan)
    assert {len(batch.cu_seqlens) for step in steps for batch in step} == {144}
    assert steps[0][0].cu_seqlens.tolist() == [0] + [128] * 143
    assert steps[5][0].cu_seqlens.tolist()[:129] == list(range(129))


# ----------------------------------------------------------------------------------------------------------------------
# The end of the data


def test_too_few_tokens_are_told_with_the_right_numbers(tmp_path):
    """Pieces of 5 from documents of 7 cost two tokens each: 8 documents a step."""
    write_shards(tmp_path, [numbered([7] * 20), numbered([7] * 17)])
    cfg = configure(tmp_path, sizes=((32, 9),) * 3, scheduled=5, extension=1)
    with pytest.raises(ValueError) as error:
        data_plan(cfg, 8)
    # needed; shards and their tokens; usable ones; steps of the run that they make
    assert numbers(error.value)[:6] == [192, 2, 259, 128, 4, 6]
    assert str(error.value).count("\n") == 0 and "epochs=2" in str(error.value)
    twice = dataclasses.replace(cfg, epochs=2)
    assert len(load(twice, data_plan(twice, 8))) == 6


@settings(max_examples=40, deadline=None)
@given(shards=SHARDS, sizes=st.permutations([(32, 5), (64, 9), (96, 3)]), epochs=st.integers(1, 2))
@example([numbered([5] * 10)], ((32, 9), (64, 9), (96, 9)), 1)  # the second stage's batches never fit
@example([numbered([5] * 3)], ((32, 9), (64, 9), (96, 9)), 1)  # nothing ever fits
@example([numbered([5] * 26)], ((32, 9), (32, 9), (96, 9)), 1)  # many small batches a pass, one large one
def test_the_epochs_that_an_error_proposes_are_enough(shards, sizes, epochs):
    """Whoever follows the sentence is not refused again, and fewer would not do; where repeating cannot help, it is not
    proposed."""
    with tempfile.TemporaryDirectory() as name:
        write_shards(Path(name), shards)
        cfg = configure(Path(name), sizes=sizes, scheduled=9, extension=1, epochs=epochs)
        try:
            data_plan(cfg, 8)
        except ValueError as error:
            if advice := re.search(r"epochs=(\d+)", str(error)):
                assert int(advice[1]) < 1000, f"no use of ten steps takes so many passes: {error}"
                data_plan(dataclasses.replace(cfg, epochs=int(advice[1])), 8)
                if (fewer := int(advice[1]) - 1) > epochs:
                    with pytest.raises(ValueError):
                        data_plan(dataclasses.replace(cfg, epochs=fewer), 8)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16, 24, 32])
def test_tokens_per_step_do_not_depend_on_the_world_size(tmp_path, world_size, monkeypatch):
    """Where a batch does not divide among so many ranks, the run is refused in one sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_shards(tmp_path, [RICH, RICH])
    cfg = configure(tmp_path, sizes=((32, 5), (64, 9), (128, 3)), scheduled=3, extension=1)
    try:
        plan, _ = prepare(cfg, world_size)
    except ValueError as error:
        assert world_size not in (1, 2, 4, 8, 16), error
        assert str(world_size) in str(error) and "\n" not in str(error)
        return
    tokens = [world_size * sum(len(batch.inputs) for batch in step) for step in load(cfg, plan, 0, world_size)]
    assert tokens == [32, 64, 128, 128]


def test_the_loader_ends_where_the_schedule_does(tmp_path):
    write_shards(tmp_path, [RICH])
    cfg = configure(tmp_path, scheduled=3, extension=1)
    loader = TrainLoader(cfg, data_plan(cfg, 8), Runtime())
    assert len([next(loader) for _ in range(4)]) == 4
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(loader)
    loader.close()


# ----------------------------------------------------------------------------------------------------------------------
# Reading behind the scenes


def test_nothing_is_read_before_the_first_batch_is_asked_for(tmp_path, monkeypatch):
    """The first read belongs on the clock."""
    write_shards(tmp_path, [RICH])
    cfg, reads = configure(tmp_path), []
    plan = data_plan(cfg, 8)
    monkeypatch.setattr(train_gpt, "read_shard", lambda path: reads.append(path) or read_shard(path))
    loader = TrainLoader(cfg, plan, Runtime())
    time.sleep(0.05)
    assert reads == []
    next(loader)
    assert reads == [plan.train[0].path]
    loader.close()


def test_each_shard_is_read_once_per_visit_and_ahead_of_its_use(tmp_path, monkeypatch):
    shards = [numbered([5] * 24), numbered([5] * 24), numbered([5] * 24)]
    write_shards(tmp_path, shards)
    cfg = configure(tmp_path, sizes=((32, 9),) * 3, scheduled=9, extension=0)
    plan, reads = data_plan(cfg, 8), []
    monkeypatch.setattr(train_gpt, "read_shard", lambda path: reads.append(path.name) or read_shard(path))
    loader = TrainLoader(cfg, plan, Runtime())
    next(loader)
    loader.ahead.result()
    while len(reads) < 2:  # the second shard comes although the first has two more batches
        time.sleep(0.001)
    assert sorted(reads) == ["train_000.bin", "train_001.bin"]
    for _ in range(8):
        next(loader)
    loader.close()
    assert sorted(set(reads)) == ["train_000.bin", "train_001.bin", "train_002.bin"]
    assert len(reads) <= 4  # the first shard once more, ahead of an epoch that does not come


def test_a_failing_background_read_raises_the_very_error(tmp_path, monkeypatch):
    write_shards(tmp_path, [numbered([5] * 16), numbered([5] * 16)])
    cfg = configure(tmp_path, sizes=((32, 9),) * 3, scheduled=4, extension=0)
    plan, failure = data_plan(cfg, 8), OSError(5, "Input/output error")

    def flaky(path):
        if path == plan.train[1].path:
            raise failure
        return read_shard(path)

    monkeypatch.setattr(train_gpt, "read_shard", flaky)
    loader = TrainLoader(cfg, plan, Runtime())
    assert len([next(loader) for _ in range(2)]) == 2  # the first shard's batches are good
    for _ in range(2):  # and asking again does not hang
        with pytest.raises(OSError) as raised:
            next(loader)
        assert raised.value is failure
    loader.close()


@pytest.mark.parametrize("damage", ["cut short", "gone"])
def test_a_shard_that_breaks_after_the_check_is_named(tmp_path, damage):
    write_shards(tmp_path, [numbered([5] * 16)])
    cfg = configure(tmp_path, sizes=((32, 9),) * 3, scheduled=2 + 1, extension=0, epochs=2)
    plan, path = data_plan(cfg, 8), tmp_path / "train_000.bin"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    loader = TrainLoader(cfg, plan, Runtime())
    with pytest.raises(ValueError, match=re.escape(str(path)) + (" cannot be read" if damage == "gone" else " is ")):
        next(loader)
    loader.close()


# ----------------------------------------------------------------------------------------------------------------------
# Validation


def with_a_token_to_spare(shards):
    """v3 left a group of sequences unread unless two tokens followed its inputs; one, the last target, is enough."""
    return [[*tokens, 1] for tokens in shards]


@settings(max_examples=40, deadline=None)
@given(
    shards=st.lists(st.builds(numbered, LENGTHS, st.integers(0, 3)), min_size=1, max_size=3),
    groups=st.integers(1, 4),
    world_size=st.sampled_from(WORLD_SIZES),
)
@example([numbered([33])], 1, 1)
@example([numbered([1] * 65), numbered([32]), numbered([33])], 3, 2)
@example([numbered([9] * 20, before=3)], 2, 16)
def test_validation_sequences(shards, groups, world_size):
    """Eight contiguous sequences a group whatever the world size; rank r takes sequences r, r + world_size, ..."""
    with tempfile.TemporaryDirectory() as name:
        cfg = configure(Path(name), scheduled=3, extension=0, val_tokens=groups * 8 * CHUNK)
        write_shards(Path(name), [RICH], shards)
        plain = list(plain_validation_batches(with_a_token_to_spare(shards), CHUNK, groups, bos=BOS))
        if len(plain) < groups or BOS not in set.intersection(*map(set, shards)):
            with pytest.raises(ValueError, match="val_"):
                data_plan(cfg, 8)
            return
        plan = data_plan(cfg, 8)
        ranks = [list(val_batches(cfg, plan, Runtime(rank=r, world_size=world_size))) for r in range(world_size)]
        for group, pieces in enumerate(plain):
            for i, (tokens, boundaries) in enumerate(pieces):
                rank, per_group = i % world_size, len(range(i % world_size, 8, world_size))
                got = ranks[rank][group * per_group + i // world_size]
                assert_batch(got, tokens, boundaries, plan.cu_lengths[CHUNK])
        assert sum(map(len, ranks)) == 8 * groups
        again = list(val_batches(cfg, plan, Runtime(world_size=world_size)))  # always from the start
        assert [b.inputs.tolist() for b in again] == [b.inputs.tolist() for b in ranks[0]]


@pytest.mark.parametrize(("tokens", "groups"), [(32, 0), (33, 1), (34, 1), (64, 1), (65, 2)])
def test_the_last_validation_border(tmp_path, tokens, groups):
    """A final group is served as long as one target follows it. v3 wanted one more token (34 and 66 here)."""
    write_shards(tmp_path, [RICH], [numbered([tokens])])
    cfg = configure(tmp_path, scheduled=3, extension=0, val_tokens=max(1, groups) * 8 * CHUNK)
    if groups == 0:
        with pytest.raises(ValueError, match="holds fewer than .*33 tokens"):
            data_plan(cfg, 8)
        return
    batches = list(val_batches(cfg, data_plan(cfg, 8), Runtime()))
    assert len(batches) == 8 * groups
    assert batches[-1].targets[-1].item() == 32 * groups  # numbered from 0: the token behind the last input
    with pytest.raises(ValueError, match=f"val_tokens={32 * groups}[.]"):
        data_plan(dataclasses.replace(cfg, val_tokens=32 * (groups + 1)), 8)


@pytest.mark.parametrize("rank", [0, 7, 8, 15])
def test_sixteen_ranks_agree_on_the_validation_loss(tmp_path, monkeypatch, rank):
    """A rank without a sequence still takes part: the mean is over all eight sequences of each of the two groups."""
    write_shards(tmp_path, [RICH], [numbered([9] * 20)])
    cfg = configure(tmp_path, val_tokens=2 * 8 * CHUNK)
    trainer = Trainer(cfg, plan := data_plan(cfg, 8), Runtime(), "reference", False)
    trainer.model.forward = lambda batch, view: batch.targets.double()
    expected = trainer.validate(0)
    runtimes = [Runtime(rank=r, world_size=16) for r in range(16)]
    served = [[batch.targets.double().mean() for batch in val_batches(cfg, plan, runtime)] for runtime in runtimes]

    def all_reduce(total):
        own = served[rank]
        rest = [loss for losses in served for loss in losses if losses is not own]
        total += total.new_tensor([sum(rest), len(rest)])

    monkeypatch.setattr(train_gpt.dist, "all_reduce", all_reduce)
    trainer.runtime = runtimes[rank]
    assert trainer.validate(0) == pytest.approx(expected, rel=1e-12)


# ----------------------------------------------------------------------------------------------------------------------
# Index functions


@given(
    tokens=st.lists(st.integers(0, 50256), min_size=1, max_size=40),
    rows=st.sampled_from([2, 97, 16384, 251520, 377280]),
)
@example([50256], 377280)
@example([50256, 50256], 377280)
@example([65535, 65535, 65535], 251520)
def test_bigram_hash(tokens, rows):
    hashed = bigram_hash(np.array(tokens, dtype=np.int32), rows)
    assert hashed.dtype == np.int32 and hashed.tolist() == plain_bigram_rows(tokens, rows)
    assert hashed[0] == rows - 1 and (hashed[1:] < max(1, rows - 1)).all() and (hashed >= 0).all()


@pytest.mark.parametrize(
    ("previous", "current", "row", "sign"),
    [(50256, 11, 139529, 1115), (11, 262, 3813, 269), (464, 50256, 324067, 1408), (262, 262, 19336, 0)],
)
def test_published_bigram_and_sign_rows(previous, current, row, sign):
    assert bigram_hash(np.array([0, previous, current], dtype=np.int32), 377280)[2] == row
    assert sign_rows(torch.tensor([previous, current], dtype=torch.int32), 8192).tolist() == [0, sign]


@pytest.mark.parametrize(("token", "row"), [(0, 330959), (11, 197920), (262, 52729), (50256, 98067)])
@pytest.mark.parametrize("first", [0, 50256])
def test_position_one_does_not_see_the_first_token(first, token, row):
    assert bigram_hash(np.array([first, token, 7], dtype=np.int32), 377280)[:2].tolist() == [377279, row]


@given(tokens=st.lists(st.integers(0, 65535), min_size=1, max_size=40), rows=st.sampled_from([1, 16, 8192]))
def test_sign_rows(tokens, rows):
    assert sign_rows(torch.tensor(tokens, dtype=torch.int32), rows).tolist() == plain_sign_rows(tokens, rows)


# ----------------------------------------------------------------------------------------------------------------------
# Shards


@given(tokens=st.lists(st.integers(0, 65535), min_size=1, max_size=50))
def test_shards_come_back_as_they_were_written(tokens):
    with tempfile.TemporaryDirectory() as name:
        write_shard(Path(name) / "a.bin", np.array(tokens))
        assert [path.name for path in Path(name).iterdir()] == ["a.bin"]
        back = read_shard(Path(name) / "a.bin")
        assert back.tolist() == tokens and back.dtype == np.dtype("<u2")


def test_check_shard_finds_every_document(tmp_path):
    write_shard(tmp_path / "a.bin", np.array(numbered([1, 1, 3, 1], before=2)))
    info = check_shard(tmp_path / "a.bin", vocab_size=65536, bos_id=BOS)
    assert info.num_tokens == 8 and info.bos_positions.tolist() == [2, 3, 4, 7]
