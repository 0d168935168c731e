"""Every number of the schedule, the gate lanes and the parameter table, pinned; and the file's table of contents.

The expected values are those of the published runs, written out here rather than computed from the configuration.
"""

import dataclasses
import inspect
import math
import re

import pytest
import torch
from helpers import small_run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_model import plain_yarn

import train_gpt
from train_gpt import (
    GPT,
    MUDD_SCALE,
    OUTPUT_LANES,
    Batch,
    DataPlan,
    NorMuonAndAdam,
    OptimConfig,
    Runtime,
    Trainer,
    initial_parameter,
    is_adam_step,
    lane_bias,
    lane_slices,
    long_windows,
    lr_multiplier,
    mtp_weights,
    muon_momentum,
    parameter_plan,
    parse_options,
    split_step,
    stage_at,
    stage_ends,
    stage_index,
    stages_by_step,
    view_at,
    warmup_steps,
    yarn,
)

V1, V2, V3 = (parse_options([f"variant={name}"]) for name in ("v1", "v2", "v3"))
ULP = 2.0**-52


def short(scheduled: int, extension: int):
    return parse_options([f"scheduled_steps={scheduled}", f"extension_steps={extension}"])


# ----------------------------------------------------------------------------------------------------------------------
# Stages: first and last step; tokens a step; longest document; windows in tokens; learning-rate factor; softmax scale

STAGES = [
    (0, 424, 131072, 896, 128, 384, 1.0, 0.1),
    (425, 849, 262144, 2048, 384, 896, 1.52, 0.116945957),
    (850, 1274, 393216, 2048, 640, 1408, 1.73, 0.127517524),
    (1275, 1289, 393216, 2048, 768, 1664, 1.0, 0.131777988),
]


@pytest.mark.parametrize("index", range(4))
def test_stages(index):
    first, last, tokens, max_doc_len, short_window, long_window, lr_mul, scale = STAGES[index]
    for step in (first, (first + last) // 2, last):
        stage, view = stage_at(V3, step), view_at(V3, step)
        assert stage_index(V3, step) == index
        assert (stage.batch_tokens, stage.max_doc_len, stage.lr_mul) == (tokens, max_doc_len, lr_mul)
        assert (view.short, view.long, view.max_len) == (short_window, long_window, max_doc_len)
        assert view.scale == pytest.approx(scale, abs=5e-10)  # printed to nine places


def test_steps_past_the_end_belong_to_the_extension():
    assert V3.total_steps == 1290
    for step in (1290, 1291, 5000):
        assert stage_index(V3, step) == 3
        assert view_at(V3, step) == view_at(V3, 1289)
        assert mtp_weights(V3, step) == [1.0]
        assert lr_multiplier(V3, step) == pytest.approx(0.15, abs=ULP)


def test_total_training_tokens():
    assert sum(stage.batch_tokens for stage in stages_by_step(V3)) == 340_131_840


@pytest.mark.parametrize(
    ("cfg", "ends", "split"),
    [
        (V1, (438, 877, 1315, 1335), 877),
        (V2, (438, 877, 1315, 1325), 877),
        (V3, (425, 850, 1275, 1290), 851),
        (short(1725, 40), (575, 1150, 1725, 1765), 1151),  # record 61
    ],
)
def test_stage_ends_and_the_split_step(cfg, ends, split):
    assert stage_ends(cfg) == ends
    assert split_step(cfg) == split
    assert is_adam_step(split)  # the head has just moved, so the copy starts from the newest moments


def test_sizes_of_micro_batches():
    """Eight pieces of 16384, 32768 and 49152 tokens, whatever the number of GPUs."""
    assert sorted({stage.batch_tokens // 8 for stage in stages_by_step(V3)}) == [16384, 32768, 49152]
    assert all(stage.batch_tokens % (8 * 16) == 0 for stage in stages_by_step(V3))
    for world_size, accum in ((1, 8), (2, 4), (4, 2), (8, 1), (16, 1)):
        assert Runtime(world_size=world_size).accum == accum


# ----------------------------------------------------------------------------------------------------------------------
# Values by step


@pytest.mark.parametrize(
    ("step", "multiplier"),
    [
        (0, 1), (424, 1), (425, 1.52), (510, 1.52), (511, 1.518209), (849, 0.912902), (850, 1.027778),
        (1000, 0.717974), (1274, 0.152065), (1275, 0.15), (1289, 0.15), (1290, 0.15),
    ],
)  # fmt: skip
def test_learning_rate(step, multiplier):
    assert lr_multiplier(V3, step) == pytest.approx(multiplier, abs=5e-7)  # the table has six places


def test_the_learning_rate_floor_is_absolute():
    """stage factor * (1 - t) + 0.15 t with t = (step - 510) / 765: the floor is not multiplied by the factor."""
    for step in range(510, 1275):
        t, peak = (step - 510) / 765, 1.52 if step < 850 else 1.73
        assert lr_multiplier(V3, step) == pytest.approx(peak * (1 - t) + 0.15 * t, abs=4 * ULP)


@pytest.mark.parametrize(
    ("step", "momentum"),
    [
        (0, 0.85), (150, 0.90), (299, 0.85 + 0.1 * 299 / 300), (300, 0.95), (301, 0.95), (1000, 0.95),
        (1239, 0.95), (1240, 0.95), (1241, 0.948), (1265, 0.90), (1289, 0.852),
    ],
)  # fmt: skip
def test_momentum(step, momentum):
    assert muon_momentum(V3, step) == pytest.approx(momentum, abs=4 * ULP)


@pytest.mark.parametrize(
    ("step", "momentum"),
    [
        (0, 0.85), (269, 0.85 + 0.1 * 269 / 300),
        (280, 0.85 + 0.1 * 280 / 300), (299, 0.85 + 0.1 * 299 / 300),  # in both: the warm-up wins
        (300, 0.95 - 0.1 * 30 / 50), (319, 0.95 - 0.1 * 49 / 50),
    ],
)  # fmt: skip
def test_momentum_where_warm_up_and_cooldown_overlap(step, momentum):
    assert muon_momentum(short(300, 20), step) == pytest.approx(momentum, abs=4 * ULP)


def test_momentum_of_a_run_shorter_than_its_cooldown():
    """Every step lies in the warm-up and in the cooldown, so all of them warm up."""
    assert [muon_momentum(short(12, 3), step) for step in range(15)] == pytest.approx(
        [0.85 + 0.1 * step / 300 for step in range(15)], abs=4 * ULP
    )


@pytest.mark.parametrize(
    ("step", "weights"),
    [
        (0, [1, 0.5, 0.25]), (212, [1, 0.5, 0.25 * (1 - 212 / 425)]), (424, [1, 0.5, 0.25 / 425]),
        (425, [1, 0.5]), (637, [1, 0.5 * (1 - 212 / 425)]), (849, [1, 0.5 / 425]),
        (850, [1]), (1062, [1]), (1274, [1]), (1275, [1]), (1282, [1]), (1289, [1]), (1290, [1]),
    ],
)  # fmt: skip
def test_multi_token_weights(step, weights):
    assert mtp_weights(V3, step) == pytest.approx(weights, abs=ULP)


def test_adam_updates_on_odd_steps():
    assert [is_adam_step(step) for step in range(4)] == [False, True, False, True]
    assert sum(map(is_adam_step, range(V3.total_steps))) == 645


def test_warm_up_covers_every_stage_change():
    assert warmup_steps(V3) == [0, 1, 423, 424, 425, 426, 848, 849, 850, 851, 1273, 1274, 1275, 1276]


@settings(max_examples=80, deadline=None)
@given(scheduled=st.integers(3, 1500), extension=st.integers(0, 60))
@example(3, 0)
@example(4, 1)
def test_short_schedules(scheduled, extension):
    """Stages tile the run, warm-up stays inside it, and every value is finite and in range on every step."""
    cfg = short(scheduled, extension)
    ends, total = stage_ends(cfg), scheduled + extension
    assert list(ends) == sorted(ends) and ends[-2:] == (scheduled, total)
    assert [stage_index(cfg, step) for step in range(total)] == [
        i for i, (first, end) in enumerate(zip((0, *ends), ends)) for _ in range(first, end)
    ]
    assert split_step(cfg) % 2 == 1 and ends[1] <= split_step(cfg) <= ends[1] + 1
    steps = warmup_steps(cfg)
    assert steps == sorted(set(steps)) and set(steps) <= set(range(total))
    assert {stage_index(cfg, step) for step in steps} == {stage_index(cfg, step) for step in range(total)}
    for step in (*range(0, total, max(1, total // 40)), *ends, total):
        assert 0.15 - 4 * ULP <= lr_multiplier(cfg, step) <= 1.73
        assert 0.85 - 4 * ULP <= muon_momentum(cfg, step) <= 0.95 + 4 * ULP
        assert all(0 <= w <= 1 for w in mtp_weights(cfg, step))


# ----------------------------------------------------------------------------------------------------------------------
# YaRN

LONG = (384, 896, 1408, 1664)


@pytest.mark.parametrize(("step", "scale"), [(425, 0.116945957), (850, 0.127517524), (1275, 0.131777988)])
def test_softmax_scale_after_each_rescale(step, scale):
    windows = LONG[: stage_index(V3, step) + 1]
    assert tuple(long_windows(V3, step)) == windows
    assert yarn(windows, 128)[1] == pytest.approx(scale, abs=5e-10)


@pytest.mark.parametrize(
    ("index", "frequency"),
    [(0, 1), (5, 0.2545073), (10, 0.0361749), (15, 0.00871741), (20, 0.00263663), (31, 0.000225361)],
)
def test_frequencies_after_three_rescales(index, frequency):
    freqs, _ = yarn(LONG, 128)
    assert freqs.shape == (32,) and freqs.dtype == torch.float64
    half_a_unit = 0.5 * 10 ** -len(str(frequency).partition(".")[2]) if index else ULP
    assert freqs[index].item() == pytest.approx(frequency, abs=half_a_unit)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head_dim", [8, 16, 128])
def test_yarn_against_the_plain_formula(stages, head_dim):
    freqs, scale = yarn(LONG[:stages], head_dim)
    expected, expected_scale = plain_yarn(list(LONG[:stages]), head_dim)
    twice = freqs.repeat_interleave(2)
    torch.testing.assert_close(twice, expected[: head_dim // 2], rtol=16 * ULP, atol=0)
    assert (expected[head_dim // 2 :] == 0).all()
    assert scale == pytest.approx(expected_scale, rel=8 * ULP)


# ----------------------------------------------------------------------------------------------------------------------
# What the trainer does with it: v3's whole schedule on a model that only records what it is told


class Recorder:
    """Stands in for the model: notes the view and the weights of every call and gives four losses."""

    def __init__(self):
        self.leaf, self.calls = torch.ones(4, requires_grad=True), []

    def __call__(self, batch, view, weights=None):
        self.calls.append((view, None if weights is None else weights.clone()))
        return self.leaf * 1.0


@pytest.fixture
def trainer(monkeypatch):
    """A trainer on the record's schedule, with a toy model in place of the real one."""
    cfg = dataclasses.replace(V3, model=small_run().model)
    nothing = Batch(*[torch.zeros(0, dtype=torch.int32)] * 4)
    monkeypatch.setattr(train_gpt, "val_batches", lambda *_: iter([nothing]))
    trainer = Trainer(cfg, DataPlan([], [], {16: 64}), Runtime(), "reference", False)
    trainer.model.forward = Recorder()
    return trainer


def test_the_trainer_follows_the_schedule(trainer, monkeypatch):
    updates, splits = [], []
    monkeypatch.setattr(trainer.optimizer, "step", lambda **told: updates.append(told))
    monkeypatch.setattr(trainer.optimizer, "split_embed", lambda: splits.append(len(updates) - 1))
    for step in range(1290):
        trainer.train_step(step, [None])
    assert [told["do_adam"] for told in updates] == [step % 2 == 1 for step in range(1290)]
    assert [told["lr_mul"] for told in updates] == [lr_multiplier(V3, step) for step in range(1290)]
    assert [told["momentum"] for told in updates] == [muon_momentum(V3, step) for step in range(1290)]
    assert splits == [851]
    for step, (view, weights) in enumerate(trainer.model.forward.calls):
        assert view == view_at(V3, step)._replace(scale=view.scale)
        assert view.scale == pytest.approx(STAGES[stage_index(V3, step)][-1], abs=5e-10)
        assert weights.dtype == torch.float32
        assert weights.tolist() == torch.tensor(mtp_weights(V3, step)).tolist()


def test_each_stage_brings_its_rotary_tables(trainer):
    for step in (0, 424, 425, 849, 850, 1274, 1275, 1290):
        trainer.enter(step)
        freqs, _ = plain_yarn(list(LONG[: stage_index(V3, step) + 1]), 8)
        angles = torch.arange(32, dtype=torch.float64)[:, None] * freqs[:4:2]  # T = 16: 32 positions of paired heads
        for table, expected in ((trainer.model.cos, angles.cos()), (trainer.model.sin, angles.sin())):
            torch.testing.assert_close(table, expected, rtol=0, atol=64 * ULP)


def test_the_final_validation_looks_further(trainer):
    """The last long window is 20 blocks; the softmax scale stays that of 13."""
    for step, windows in ((1000, (640, 1408)), (1289, (768, 1664)), (1290, (768, 2560))):
        trainer.validate(step)
        view, weights = trainer.model.forward.calls[-1]
        assert (view.short, view.long) == windows
        assert view.scale == pytest.approx(0.131777988 if step > 1274 else 0.127517524, abs=5e-10)
        assert weights is None and not view.fp8 and view.max_len == 262144


def test_validation_of_the_record():
    assert V3.val_tokens == 10_485_760 and V3.schedule.val_chunk == 262_144
    assert V3.val_tokens // (8 * V3.schedule.val_chunk) == 5
    steps = [step for step in range(1291) if step % V3.val_every == 0 or step == V3.total_steps]
    assert steps == [0, 250, 500, 750, 1000, 1250, 1290]


# ----------------------------------------------------------------------------------------------------------------------
# Gate lanes: first lane, width, name, layer, stored bias in v2, stored bias in v3

PRE = [
    (0, 6, "xsa", 1, 0, 0), (6, 6, "xsa", 3, 0, 0), (12, 6, "attn", 3, 2.5, 2.5),
    (18, 1, "x0", 0, 0, 0), (19, 1, "bigram", 0, 0.25, 0.5), (20, 1, "x0", 1, 0, 0), (21, 1, "bigram", 1, 0.25, 0.5),
    (22, 1, "x0", 2, 0, 0), (23, 1, "bigram", 2, 0.25, 0.5), (24, 1, "x0", 3, 0, 0), (25, 1, "bigram", 3, 0.25, 0.5),
]  # fmt: skip
POST = [
    (0, 6, "xsa", 4, 0, 0), (6, 6, "xsa", 7, 0, 0), (12, 6, "attn", 10, 2.5, 2.5),
    (18, 1, "x0", 4, 0, 0), (19, 1, "bigram", 4, 0.25, 0.5), (20, 1, "x0", 5, 0, 0), (21, 1, "bigram", 5, 0.25, 0.5),
    (22, 1, "x0", 7, 0, 0), (23, 1, "bigram", 7, 0.25, 0.5), (24, 1, "x0", 8, 0, 0), (25, 1, "bigram", 8, 0.25, 0.5),
    (26, 1, "x0", 9, 0, 0), (27, 1, "bigram", 9, 0.25, 0.5), (28, 1, "skip", 6, 5, 5),
    (29, 6, "dc_w1", 10, 10, 10), (35, 6, "dc_w2", 10, 0, 0),
]  # fmt: skip
V1_PRE = [
    (0, 6, "xsa", 1, 0), (6, 6, "xsa", 3, 0), (12, 6, "xsa", 4, 0), (18, 6, "attn", 3, 5),
    (24, 1, "x0", 0, 0), (25, 1, "bigram", 0, 0.5), (26, 1, "x0", 1, 0), (27, 1, "bigram", 1, 0.5),
    (28, 1, "x0", 2, 0), (29, 1, "bigram", 2, 0.5), (30, 1, "x0", 3, 0), (31, 1, "bigram", 3, 0.5),
    (32, 1, "x0", 4, 0), (33, 1, "bigram", 4, 0.5), (34, 1, "x0", 5, 0), (35, 1, "bigram", 5, 0.5),
]  # fmt: skip
V1_POST = [
    (0, 6, "xsa", 7, 0), (6, 6, "attn", 10, 5), (12, 1, "x0", 7, 0), (13, 1, "bigram", 7, 0.5),
    (14, 1, "x0", 8, 0), (15, 1, "bigram", 8, 0.5), (16, 1, "x0", 9, 0), (17, 1, "bigram", 9, 0.5),
    (18, 1, "x0", 10, 0), (19, 1, "bigram", 10, 0.5), (20, 1, "skip", 6, 10),
]  # fmt: skip
MUDD = [
    (0, 3, "value", 10, 0), (3, 3, "residual", 10, 0), (6, 2, "value_embed", 10, 20),
    (8, 1, "attn_resid", 10, 10 * 1.1**0.5), (9, 1, "attn_out", 10, 10), (10, 1, "x0", 10, 0),
    (11, 1, "bigram", 10, 0.5), (12, 1, "mlp_resid", 10, 10 * 1.1**0.5), (13, 1, "mlp_out", 10, 10),
]  # fmt: skip
OUTPUT = [
    (0, 1, "embed", 11, 0), (1, 1, "mid", 11, -5), (2, 1, "late", 11, 0),
    (3, 1, "value_embed", 11, 0), (4, 1, "early", 11, 0),
]  # fmt: skip


def column(rows, k):
    return [(*row[:4], row[4 + k]) for row in rows]


BLOCKS = {  # name: lanes, scale of the gate, number of lanes, rows
    "v1 pre": (V1.model.gate_lanes(post=False), 0.05, 36, V1_PRE),
    "v1 post": (V1.model.gate_lanes(post=True), 0.05, 21, V1_POST),
    "v2 pre": (V2.model.gate_lanes(post=False), 0.1, 26, column(PRE, 0)),
    "v2 post": (V2.model.gate_lanes(post=True), 0.1, 41, column(POST, 0)),
    "v3 pre": (V3.model.gate_lanes(post=False), 0.1, 26, column(PRE, 1)),
    "v3 post": (V3.model.gate_lanes(post=True), 0.1, 41, column(POST, 1)),
    "mudd": (train_gpt.MUDD_LANES, 0.1, 14, MUDD),
    "output mudd": (OUTPUT_LANES, 0.1, 5, OUTPUT),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_lane_layout(name):
    lanes, _, size, rows = BLOCKS[name]
    expected = {(what, layer): slice(first, first + width) for first, width, what, layer, _ in rows}
    assert list(lane_slices(lanes).items()) == list(expected.items())
    assert sum(lane.width for lane in lanes) == size == rows[-1][0] + rows[-1][1]


@pytest.mark.parametrize("name", BLOCKS)
def test_stored_biases(name):
    """Stored bias times the gate's scale is what the lane starts at; lanes past the block's own are zero."""
    lanes, scale, size, rows = BLOCKS[name]
    stored = [bias for _, width, _, _, bias in rows for _ in range(width)]
    torch.testing.assert_close(
        lane_bias(lanes, size + 3, scale), torch.tensor([*stored, 0, 0, 0], dtype=torch.float64), rtol=2 * ULP, atol=0
    )


def test_gate_scales():
    assert [cfg.model.gate_scale for cfg in (V1, V2, V3)] == [0.05, 0.1, 0.1] and MUDD_SCALE == 0.1
    assert [cfg.model.learned_gate_scale for cfg in (V1, V2, V3)] == [False, False, True]


@pytest.mark.parametrize(
    ("cfg", "width", "pre", "post"), [(V1, 36, "v1 pre", "v1 post"), (V3, 41, "v3 pre", "v3 post")]
)
def test_biases_as_the_model_stores_them(cfg, width, pre, post):
    """bf16, both gates in one tensor as wide as the wider of the two."""
    bias = initial_parameter("mudd_gate_b2", parameter_plan(cfg.model)["mudd_gate_b2"], seed=0)
    expected = torch.zeros(2, width)
    for row, name in enumerate((pre, post)):
        for first, lanes, _, _, stored in BLOCKS[name][3]:
            expected[row, first : first + lanes] = stored
    assert bias.dtype == torch.bfloat16 and torch.equal(bias.float(), expected)


def test_mudd_biases_as_the_model_stores_them():
    bias = initial_parameter("mudd_b2", parameter_plan(V3.model)["mudd_b2"], seed=0)
    layer_10 = [0, 0, 0, 0, 0, 0, 20, 20, 10.5, 10, 0, 0.5, 10.5, 10]  # 10.488 is 10.5 in bf16
    assert bias.tolist() == [layer_10, [0, -5, 0, 0, 0, *[0] * 9]]


@pytest.mark.parametrize(("cfg", "layer"), [(V1, 6), (V2, 4), (V3, 4)])
def test_the_post_gate_is_made_once_and_before_its_lanes_are_read(cfg, layer):
    assert [i for i, spec in enumerate(cfg.model.plan) if spec.gate_from_here] == [layer]
    assert all(lane.layer < layer for lane in cfg.model.gate_lanes(post=False))
    assert all(lane.layer >= layer for lane in cfg.model.gate_lanes(post=True))


# ----------------------------------------------------------------------------------------------------------------------
# Layer plan


def layers(**wanted):
    return {i for i, spec in enumerate(V3.model.plan) if all(getattr(spec, k) == v for k, v in wanted.items())}


def test_layer_plan():
    assert len(V3.model.plan) == 11 and V2.model.plan == V3.model.plan
    assert layers(window="none") == {6} and layers(window="long") == {3, 10}
    assert layers(paired=True) == {0, 2, 5, 9} and layers(key_offset=True) == {3, 10}
    assert [spec.value_embed for spec in V3.model.plan] == [None, 0, 1, None, None, None, None, None, 2, 3, 4]
    assert layers(reads="mid") == {8, 9, 10} and layers(reads="") == set(range(8))
    saved = {spec.save_as: i for i, spec in enumerate(V3.model.plan) if spec.save_as}
    assert saved == {"early": 3, "mid": 7, "late": 9}
    assert {i: spec.skip_from for i, spec in enumerate(V3.model.plan) if spec.skip_from} == {6: "early"}
    assert layers(mudd=True) == {10}
    assert [i for i, spec in enumerate(V1.model.plan) if spec.dc_mlp] == [10] and not layers(dc_mlp=True)


def test_model_sizes():
    m = V3.model
    assert (m.dim, m.heads, m.head_dim, m.vocab_size, m.vocab_padded) == (768, 6, 128, 50257, 50304)
    assert (m.bigram_rows, m.sign_rows, m.dc_window, m.smear_dims, m.gate_hidden) == (377280, 8192, 112, 12, 64)
    assert m.attn_layers == (0, 1, 2, 3, 4, 5, 7, 8, 9, 10) and m.value_planes == 5
    for cfg in (V1, V2):
        assert (cfg.model.bigram_rows, cfg.model.sign_rows, cfg.model.fp8_mlp) == (251520, 0, False)
    assert m.fp8_mlp


# ----------------------------------------------------------------------------------------------------------------------
# Parameter table, in the order in which reductions are launched, at world size 8

BF16, FP32 = torch.bfloat16, torch.float32
NORMUON, SHARDED, SPARSE, REPLICATED = "normuon", "sharded", "sparse", "replicated"
PARAMETERS = [  # label, shape, dtype, optimizer, communication, betas, lr_mul, wd_mul, one rank's part
    ("qk_bank", (64, 256, 768), BF16, NORMUON, SHARDED, None, 1, 1, (8, 256, 768)),
    ("vo_bank", (24, 768, 768), BF16, NORMUON, SHARDED, None, 1, 1, (3, 768, 768)),
    ("mlp_bank", (12, 2, 3072, 768), BF16, NORMUON, SHARDED, None, 1, 1, (3, 3072, 768)),
    ("scalars", (24,), FP32, "adam", REPLICATED, (0.9, 0.99), 5, 0, None),
    ("smear_gate", (1, 12), BF16, "adam", REPLICATED, (0.9, 0.99), 0.01, 0, None),
    ("ve_gate_bank", (5, 6, 12), BF16, "adam", REPLICATED, (0.9, 0.99), 1, 1, None),
    ("lm_head", (768, 50304), BF16, "adam", SHARDED, (0.5, 0.95), 1, 150, (96, 50304)),
    ("bigram_embed", (377280, 768), BF16, "adam", SPARSE, (0.75, 0.95), 75, 5, (47160, 768)),
    ("post_lambdas", (11, 2), FP32, "adam", REPLICATED, (0.9, 0.95), 1, 0, None),
    ("resid_lambdas", (11, 2), FP32, "adam", REPLICATED, (0.9, 0.95), 5, 0, None),
    ("value_embeds", (251520, 768), BF16, "adam", SHARDED, (0.75, 0.95), 75, 5, (31440, 768)),
    ("embed", (50304, 768), BF16, "adam", SHARDED, (0.5, 0.95), 1, 150, (6288, 768)),
    ("mudd_w1", (2, 64, 768), BF16, "adam", REPLICATED, (0.9, 0.99), 0.25, 1, None),
    ("mudd_w2", (2, 14, 64), BF16, "adam", REPLICATED, (0.9, 0.99), 0.25, 1, None),
    ("mudd_b2", (2, 14), BF16, "adam", REPLICATED, (0.9, 0.99), 0.25, 0, None),
    ("mudd_gate_w1", (2, 64, 768), BF16, "adam", REPLICATED, (0.9, 0.99), 0.1, 1, None),
    ("mudd_gate_w2", (2, 41, 64), BF16, "adam", REPLICATED, (0.9, 0.99), 0.1, 1, None),
    ("mudd_gate_b2", (2, 41), BF16, "adam", REPLICATED, (0.9, 0.99), 0.1, 0, None),
    ("_mudd_gate_scale", (), FP32, "adam", REPLICATED, (0.9, 0.99), 0.1, 0, None),
]
WORK_ORDER = [
    "scalars", "smear_gate", "ve_gate_bank", "mudd_b2", "mudd_gate_b2", "_mudd_gate_scale", "post_lambdas",
    "resid_lambdas", "mudd_w2", "mudd_gate_w2", "value_embeds", "bigram_embed", "mudd_w1", "mudd_gate_w1", "lm_head",
    "embed", "qk_bank", "vo_bank", "mlp_bank",
]  # fmt: skip


def specs(cfg):
    return {spec.label: spec for spec in cfg.table}


@pytest.mark.parametrize("row", PARAMETERS, ids=lambda row: row[0])
def test_parameter(row):
    label, shape, dtype, optim, comms, betas, lr_mul, wd_mul, part = row
    spec, planned = specs(V3)[label], parameter_plan(V3.model, world_size=8)[label]
    assert (planned.shape, planned.dtype) == (shape, dtype)
    assert (spec.optim, spec.comms, spec.betas) == (optim, comms, betas)
    assert (spec.lr_mul, spec.wd_mul) == (lr_mul, wd_mul)
    matrices = (math.prod(shape[:-2]), *shape[-2:]) if optim == NORMUON else shape
    assert part is None or (matrices[0] // 8, *matrices[1:]) == part and matrices[0] % 8 == 0


def test_scatter_and_work_order():
    labels = [row[0] for row in PARAMETERS]
    assert [spec.label for spec in V3.table] == labels and sorted(labels) == sorted(WORK_ORDER)
    assert [spec.label for spec in sorted(V3.table, key=lambda spec: spec.work)] == WORK_ORDER
    assert len({spec.work for spec in V3.table}) == len(labels)
    optimizer = NorMuonAndAdam(GPT(small_run().model).named_parameters(), V3.table)
    assert list(optimizer.states) == labels
    assert [state.spec.label for state in optimizer.work_order] == WORK_ORDER


def test_tables_of_the_older_variants():
    """v2 has no learned scale; v1 had an MLP of its own for the DC weights, and its gates learned faster."""
    v1, v2, v3 = map(specs, (V1, V2, V3))
    assert v2 == {label: spec for label, spec in v3.items() if label != "_mudd_gate_scale"}
    assert v1.keys() - v2.keys() == {"dc_w1_bank", "dc_w2_bank"} and v2.keys() <= v1.keys()
    for label in v2:
        faster = label.startswith("mudd_gate_")
        assert v1[label] == (dataclasses.replace(v2[label], lr_mul=0.15) if faster else v2[label])
    for label in ("dc_w1_bank", "dc_w2_bank"):
        spec = v1[label]
        assert (spec.optim, spec.comms, spec.betas) == ("adam", REPLICATED, (0.9, 0.99))
        assert (spec.lr_mul, spec.wd_mul) == (0.25, 0)
    order = WORK_ORDER[:3] + ["dc_w1_bank", "dc_w2_bank"] + [label for label in WORK_ORDER[3:] if label in v2]
    assert [spec.label for spec in sorted(V1.table, key=lambda spec: spec.work)] == order


@pytest.mark.parametrize("cfg", [V1, V2, V3], ids=["v1", "v2", "v3"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_rows_and_parameters_match_one_to_one(cfg, world_size):
    assert parameter_plan(cfg.model, world_size).keys() == specs(cfg).keys()
    assert len(cfg.table) == len(specs(cfg))


@pytest.mark.parametrize(
    ("world_size", "qk", "vo", "mlp", "total"),
    [
        (1, 60, 20, 24, 640_605_607),
        (2, 60, 20, 24, 640_605_607),
        (4, 60, 20, 24, 640_605_607),
        (8, 64, 24, 24, 643_751_335),
        (16, 64, 32, 32, 643_751_335 + 8 * 768 * 768 + 8 * 3072 * 768),
    ],
)
def test_banks_are_padded_to_the_world_size(world_size, qk, vo, mlp, total):
    plan = parameter_plan(V3.model, world_size)
    assert plan["qk_bank"].shape == (qk, 256, 768)
    assert plan["vo_bank"].shape == (vo, 768, 768)
    assert plan["mlp_bank"].shape == (mlp // 2, 2, 3072, 768)
    assert sum(math.prod(row.shape) for row in plan.values()) == total


def test_parameter_totals_of_the_older_variants():
    """Fewer bigram rows and no learned scale; in v1 narrower gates, and two banks of DC weights."""
    totals = [sum(math.prod(row.shape) for row in parameter_plan(cfg.model, 8).values()) for cfg in (V1, V2, V3)]
    assert totals[2] - totals[1] == (377280 - 251520) * 768 + 1
    assert totals[0] - totals[1] == 10 * 12 * 768 + 10 * 12 * 12 - 2 * (41 - 36) * (64 + 1)


def test_first_values_of_scalars_and_lambdas():
    plan = parameter_plan(V3.model)
    first = {label: initial_parameter(label, plan[label], 0) for label in ("scalars", "resid_lambdas", "post_lambdas")}
    assert first["scalars"].tolist() == [0.5, 1.0] * 11 + [0.0, -1.5]
    assert torch.equal(first["resid_lambdas"], torch.full((11, 2), math.sqrt(1.1)))
    assert torch.equal(first["post_lambdas"], torch.ones(11, 2))
    assert initial_parameter("_mudd_gate_scale", plan["_mudd_gate_scale"], 0).item() == torch.tensor(0.1).item()


def test_what_all_rows_share():
    for cfg in (V1, V2, V3):
        assert cfg.optim == OptimConfig(
            adam_lr=0.008, adam_eps=1e-10, adam_wd=0.005, normuon_lr=0.023, normuon_wd=1.2, normuon_beta2=0.9
        )


@pytest.mark.parametrize("world_size", [1, 8])
def test_learning_rates_of_matrices(world_size):
    """1 for qk and vo, 2 for the up and 4 for the down projections, by the index in the whole bank."""
    model, rates = GPT(small_run().model, world_size=world_size), {}
    for rank in range(world_size):
        optimizer = NorMuonAndAdam(model.named_parameters(), V3.table, rank=rank, world_size=world_size)
        for label in ("qk_bank", "vo_bank", "mlp_bank"):
            hyper = optimizer._normuon_hyper(optimizer.states[label], lr_mul=0.5, momentum=0.9)
            assert hyper[:3] == pytest.approx([0.9, 0.9, 0.5 * 0.023 * 1.2], rel=4 * ULP)
            rates[label] = rates.get(label, []) + [rate / (0.5 * 0.023) for rate in hyper[3:]]
    assert rates["qk_bank"] == pytest.approx([1.0] * (60 if world_size == 1 else 64), rel=4 * ULP)
    assert rates["vo_bank"] == pytest.approx([1.0] * (20 if world_size == 1 else 24), rel=4 * ULP)
    assert rates["mlp_bank"] == pytest.approx([2.0, 4.0] * 12, rel=4 * ULP)


# ----------------------------------------------------------------------------------------------------------------------
# The file itself


def test_the_table_of_contents_is_the_banners_in_order():
    contents = re.findall(r"^  (§\d+ \S+)", train_gpt.__doc__, re.M)
    banners = re.findall(r"^# === (§\d+ \S+) ===$", inspect.getsource(train_gpt), re.M)
    assert contents == banners
    assert [name.split()[0] for name in banners] == [f"§{n}" for n in range(1, 10)]
