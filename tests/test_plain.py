"""The plain models against numbers from elsewhere: golden vectors in data/, published tables, worked examples.

The golden numbers are fp64 results of an independent implementation of the same formulas. The tests of the trainer lean
on plain_model, plain_optimizer and plain_batches; this file is why they may.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_batches import plain_cu_seqlens, plain_training_batches, plain_validation_batches
from plain_model import (
    POST_GATE,
    PRE_GATE,
    int32,
    lane_count,
    plain_bigram_rows,
    plain_forward,
    plain_logit_gradient,
    plain_sign_rows,
    plain_training_loss,
    plain_yarn,
    rotary_positions,
    rotate,
    to_stream,
)
from plain_optimizer import (
    POLAR_EXPRESS,
    V3_TABLE,
    PlainOptimizer,
    plain_lr_multiplier,
    plain_muon_momentum,
    plain_split_apply,
)

FP64_ROUNDING, FP32_ROUNDING = 2.0**-52, 2.0**-24
# How much the golden model magnifies a relative perturbation of its parameters, as measured by its makers: losses 80
# times; gradients 200 times (fp32 runs were off by 1.2e-5 of a gradient's largest entry).
LOSS_TOLERANCE = 80 * FP64_ROUNDING  # of the largest loss
GRADIENT_TOLERANCE = 200 * FP64_ROUNDING  # of the largest entry
# Polar Express may magnify rounding in the smallest singular values by the product of its linear coefficients (990).
MUON_TOLERANCE = math.prod(a for a, _, _ in POLAR_EXPRESS) * FP64_ROUNDING
ADAM_TOLERANCE = 16 * FP64_ROUNDING  # about as many operations an update

DATA = Path(__file__).parent / "data"
TRAINING_CASES = ("s0_mtp3", "s0_mtp2", "s1_mtp1", "s1_mtp3")
NAMES = [row.name for row in V3_TABLE]


def load(file: str) -> dict[str, torch.Tensor]:
    with np.load(DATA / file) as arrays:  # torch's uint16 is too thin to compute with, so those stay numpy
        return {k: v if v.dtype == np.uint16 else torch.from_numpy(np.asarray(v)) for k, v in arrays.items()}


def assert_close(ours: torch.Tensor, golden: torch.Tensor, tolerance: float, what: str) -> None:
    """Within tolerance x the largest entry, plus each entry's own rounding where golden numbers are stored as fp32."""
    assert ours.shape == golden.shape, what
    allowed = tolerance * golden.double().abs().max() + (golden.dtype == torch.float32) * FP32_ROUNDING * ours.abs()
    worst = ((ours - golden.double()).abs() - allowed).max().item()
    assert worst <= 0, f"{what}: {worst:.3g} beyond the tolerance"


# ----------------------------------------------------------------------------------------------------------------------
# Model


@pytest.fixture(scope="session")
def model_golden():
    return load("model_golden.npz")


def golden_params(z: dict) -> dict[str, torch.Tensor]:
    return {name: z[f"param_{name}"].double() for name in NAMES}


def golden_forward(z: dict, params: dict, stage: str, cu_seqlens: torch.Tensor, mtp_weights=None) -> torch.Tensor:
    return plain_forward(
        params, z["input_tokens"], z["targets"], cu_seqlens, z["bigram_rows"], z["sign_rows"], z["sign_table"],
        windows_tokens=z[f"{stage}_windows"], attn_scale=z[f"{stage}_attn_scale"], freqs=z[f"{stage}_yarn_freqs"],
        mtp_weights=mtp_weights,
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(model_golden):
    """Losses and gradients of each training case."""
    z, results = model_golden, {}
    for case in TRAINING_CASES:
        leaves = {name: p.requires_grad_() for name, p in golden_params(z).items()}
        losses = golden_forward(z, leaves, case[:2], z["cu_seqlens_train"], z[f"{case}_mtp_weights"])
        (z["meta_grad_scale"] * losses).sum().backward()
        results[case] = losses.detach(), {name: leaf.grad for name, leaf in leaves.items()}
    return results


@pytest.mark.parametrize("boundaries", ["cu_train", "cu_eval"])
@pytest.mark.parametrize("stage", ["s0", "s1"])
def test_evaluation_losses(model_golden, stage, boundaries):
    z, golden = model_golden, model_golden[f"{stage}_eval_loss_{boundaries}"]
    with torch.no_grad():
        losses = golden_forward(z, golden_params(z), stage, z[boundaries.replace("cu", "cu_seqlens")])
    assert_close(losses, golden, LOSS_TOLERANCE, "evaluation loss")


@pytest.mark.parametrize("case", TRAINING_CASES)
def test_training_losses(model_golden, trained, case):
    assert_close(trained[case][0], model_golden[f"{case}_loss"], LOSS_TOLERANCE, "training loss")


@pytest.mark.parametrize("case", TRAINING_CASES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(model_golden, trained, case, name):
    z, gradient = model_golden, trained[case][1][name]
    if f"{case}_grad_{name}" in z:
        assert_close(gradient, z[f"{case}_grad_{name}"], GRADIENT_TOLERANCE, name)
        return
    flat = gradient.flatten()
    norm = z[f"{case}_gradnorm_{name}"]
    probe = (flat * torch.cos(torch.arange(flat.numel()).double())).sum()
    assert abs(flat.norm() - norm) <= GRADIENT_TOLERANCE * norm
    assert abs(probe - z[f"{case}_gradprobe_{name}"]) <= GRADIENT_TOLERANCE * norm


@pytest.mark.parametrize("case", TRAINING_CASES)
def test_parameters_without_effect_get_zero_gradients(trained, case):
    gradient = trained[case][1]
    dead = [
        gradient["ve_gate_bank"][4],
        gradient["resid_lambdas"][10], gradient["post_lambdas"][10],
        gradient["resid_lambdas"][6, 0], gradient["post_lambdas"][6, 0],
        gradient["scalars"][12:14],
        gradient["mudd_w2"][1, 5:], gradient["mudd_b2"][1, 5:],
        gradient["mudd_gate_w2"][0, 26:], gradient["mudd_gate_b2"][0, 26:],
        gradient["mlp_bank"][11],
    ]  # fmt: skip
    assert all((g == 0).all() for g in dead)


def test_gate_lanes_of_six_heads():
    assert (lane_count(PRE_GATE, 6), lane_count(POST_GATE, 6)) == (26, 41)


def test_logit_gradient_is_the_derivative_but_for_the_last_rows():
    """Rows that miss targets keep the whole softmax weight; all others have the true derivative."""
    torch.manual_seed(0)
    logits = torch.randn(9, 12, dtype=torch.float64).requires_grad_()
    targets, weights = torch.tensor([3, 3, 3, 1, 0, 11, 11, 5, 5]), torch.tensor([1.0, 0.5, 0.25]).double()
    (true,) = torch.autograd.grad(plain_training_loss(logits, targets, weights).sum(), logits)
    ours = plain_logit_gradient(logits.detach(), targets, weights)
    torch.testing.assert_close(ours[:-2], true[:-2], rtol=1e-12, atol=1e-14)
    assert ((ours[-2:] - true[-2:]) > 0).all()  # the softmax term of the missing targets, over every column


def test_paired_heads_are_views_of_one_wide_row():
    """The literal reading: rows of 3 x 2d numbers, a table 2d wide for positions 2t and 2t + 1, then (2T) x 3 x d."""
    T, H, d = 5, 6, 8
    torch.manual_seed(0)
    x, freqs = torch.randn(T, H, d, dtype=torch.float64), plain_yarn([384, 896], d)[0]
    wide = x.reshape(T, H // 2, 2 * d).clone()
    for t in range(T):
        angle = torch.cat([2 * t * freqs, (2 * t + 1) * freqs])
        for g in range(H // 2):
            row = x.reshape(T, H // 2, 2 * d)[t, g]
            for i in range(0, 2 * d, 2):
                wide[t, g, i] = math.cos(angle[i]) * row[i] + math.sin(angle[i]) * row[i + 1]
                wide[t, g, i + 1] = math.cos(angle[i + 1]) * row[i + 1] - math.sin(angle[i + 1]) * row[i]
    ours = to_stream(rotate(x, rotary_positions(T, H, paired=True), freqs))
    torch.testing.assert_close(ours, wide.reshape(2 * T, H // 2, d), rtol=1e-14, atol=1e-14)


# ----------------------------------------------------------------------------------------------------------------------
# YaRN, bigram rows, sign rows


@pytest.mark.parametrize("stage", [0, 1])
def test_yarn_against_golden(model_golden, stage):
    z = model_golden
    long_windows = [int(z[f"s{i}_windows"][1]) for i in range(stage + 1)]
    freqs, scale = plain_yarn(long_windows, int(z["meta_head_dim"]))
    assert_close(freqs, z[f"s{stage}_yarn_freqs"], 4 * FP64_ROUNDING, "frequencies")
    assert scale == pytest.approx(float(z[f"s{stage}_attn_scale"]), rel=4 * FP64_ROUNDING)


def test_yarn_of_the_record_run():
    windows, scales = (384, 896, 1408, 1664), (0.1, 0.116945957, 0.127517524, 0.131777988)
    for stage in range(4):
        freqs, scale = plain_yarn(windows[: stage + 1], 128)
        assert scale == pytest.approx(scales[stage], abs=5e-10)
    base = freqs[:64:2]
    assert (base == freqs[1:64:2]).all() and (freqs[64:] == 0).all()
    published = {0: 1, 5: 0.2545073, 10: 0.0361749, 15: 0.00871741, 20: 0.00263663, 31: 0.000225361}
    for i, value in published.items():
        assert base[i].item() == pytest.approx(value, rel=2e-6)


def test_rows_against_golden(model_golden):
    z = model_golden
    assert plain_bigram_rows(z["input_tokens"].tolist(), len(z["param_bigram_embed"])) == z["bigram_rows"].tolist()
    assert plain_sign_rows(z["input_tokens"].tolist(), len(z["sign_table"])) == z["sign_rows"].tolist()
    assert plain_bigram_rows(z["hash_tokens"].tolist(), 377280) == z["hash_bigram_rows"].tolist()
    assert plain_sign_rows(z["hash_tokens"].tolist(), 8192) == z["hash_sign_rows"].tolist()


@pytest.mark.parametrize(
    "previous, current, bigram_row, sign_row",
    [(50256, 11, 139529, 1115), (11, 262, 3813, 269), (464, 50256, 324067, 1408), (262, 262, 19336, 0)],
)
def test_rows_of_the_published_pairs(previous, current, bigram_row, sign_row):
    assert plain_bigram_rows([7, previous, current], 377280)[2] == bigram_row
    assert plain_sign_rows([7, previous, current], 8192)[2] == sign_row


@pytest.mark.parametrize("token, row", [(0, 330959), (11, 197920), (262, 52729), (50256, 98067)])
@pytest.mark.parametrize("first", [0, 50256])
def test_bigram_row_of_position_one_does_not_see_the_first_token(first, token, row):
    assert plain_bigram_rows([first, token], 377280) == [377279, row]


def test_bigram_products_wrap_to_int32():
    assert int32(27191 * 377279) == 1668658697
    assert int32(27191 * 251519) == -1750881463
    assert int32(36313 * 50256) == 36313 * 50256
    assert 0 <= plain_bigram_rows([0, 5], 251520)[1] < 251519


# ----------------------------------------------------------------------------------------------------------------------
# Optimizer


@pytest.fixture(scope="session")
def optimizer_golden():
    return load("optimizer_golden.npz")


def drive(z: dict, native: bool):
    """Yield (j, optimizer) after each of the golden steps."""
    optimizer = PlainOptimizer({name: z[f"before_{name}"] for name in NAMES}, native=native)
    for j, step in enumerate(z["steps"].tolist()):
        grads = {name: z[f"grad{j}_{name}"] for name in NAMES}
        optimizer.step(step, grads, float(z["lr_multiplier"][j]), float(z["muon_momentum"][j]))
        yield j, optimizer


def test_optimizer_steps_and_states(optimizer_golden):
    z = optimizer_golden
    for j, optimizer in drive(z, native=False):
        for name in NAMES:
            tolerance = MUON_TOLERANCE if name in optimizer.muon else ADAM_TOLERANCE
            assert_close(optimizer.params[name], z[f"after{j}_{name}"], tolerance, f"{name} after step {j}")
    for name, states in optimizer.muon.items():
        for field in ("momentum", "second_moment"):
            ours = torch.stack([getattr(state, field) for state in states])
            assert_close(ours, z[f"state_{field}_{name}"], MUON_TOLERANCE, f"{field} of {name}")
    for name in ("lm_head", "embed", "bigram_embed", "scalars"):
        state = optimizer.adam[name]
        assert_close(state.m, z[f"state_m_{name}"], ADAM_TOLERANCE, f"m of {name}")
        assert_close(state.v, z[f"state_v_{name}"], ADAM_TOLERANCE, f"v of {name}")
        assert state.count == z[f"state_count_{name}"]


def test_adam_waits_for_odd_steps_and_the_tie_ends_at_the_split(optimizer_golden):
    z = optimizer_golden
    before = {name: z[f"before_{name}"].double() for name in NAMES}
    for j, optimizer in drive(z, native=False):
        step = int(z["steps"][j])
        for name in NAMES:
            moved = not torch.equal(optimizer.params[name], before[name])
            assert moved == (name in optimizer.muon or step % 2 == 1), f"{name} at step {step}"
        assert torch.equal(optimizer.params["embed"], optimizer.params["lm_head"].T) == (step < 853)
        before = dict(optimizer.params)


def test_adam_in_the_trainers_own_storage(optimizer_golden):
    """bf16 parameters and pending gradients, fp32 moments: the last bit may fall the other way, and seldom does."""
    z, entries, flips = optimizer_golden, 0, 0
    for j, optimizer in drive(z, native=True):
        for name in optimizer.adam:
            ours = optimizer.params[name].contiguous()
            golden = z[f"native_after{j}_{name}"].to(ours.dtype).contiguous()
            bits = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
            distance = (ours.view(bits).long() - golden.view(bits).long()).abs()
            assert distance.max() <= 1, f"{name} after step {j}"
            entries, flips = entries + distance.numel(), flips + distance.sum().item()
    # fp32 arithmetic is good to a few 2^-24, a bf16 rounding interval is 2^-8 wide: one entry in 2^12 at the very most
    assert flips <= entries / 2**12


def test_split_weights_bit_for_bit(optimizer_golden):
    z = optimizer_golden
    before = z["bits_param_before"], z["bits_low_before"], z["bits_update"]
    high, low = plain_split_apply(*before, float(z["bits_lr_eff"]), float(z["bits_wd_eff"]))
    assert (high == z["bits_param_after"]).all() and (low == z["bits_low_after"]).all()


def test_schedule_values(optimizer_golden):
    z = optimizer_golden
    for j, step in enumerate(z["steps"].tolist()):
        assert plain_lr_multiplier(step) == pytest.approx(float(z["lr_multiplier"][j]), rel=4 * FP64_ROUNDING)
        assert plain_muon_momentum(step) == pytest.approx(float(z["muon_momentum"][j]), rel=4 * FP64_ROUNDING)
    published = {0: 1, 424: 1, 425: 1.52, 510: 1.52, 511: 1.518209, 849: 0.912902, 850: 1.027778, 1000: 0.717974}
    published |= {1274: 0.152065, 1275: 0.15, 1290: 0.15}
    for step, value in published.items():
        assert plain_lr_multiplier(step) == pytest.approx(value, abs=5e-7)
    for step, value in {0: 0.85, 150: 0.90, 300: 0.95, 1240: 0.95, 1241: 0.948, 1289: 0.852}.items():
        assert plain_muon_momentum(step) == pytest.approx(value, abs=1e-12)


def test_zero_gradients_are_safe(optimizer_golden):
    z = optimizer_golden
    params = {name: z[f"before_{name}"] for name in NAMES}
    optimizer = PlainOptimizer(params)
    optimizer.step(1, {name: torch.zeros_like(p) for name, p in params.items()}, 1.0, 0.9)
    for name, p in params.items():
        if name in optimizer.muon:  # a zero update still decays, by lr x wd x lr x multipliers
            factor = torch.tensor([2.0, 4.0]).double()[:, None, None] if name == "mlp_bank" else 1.0
            expected = p.double() * (1 - 0.023 * 1.2 * 0.023 * factor)
        else:  # Adam decays only where the update itself shrinks the weight
            expected = params["lm_head"].T.double() if name == "embed" else p.double()
        torch.testing.assert_close(optimizer.params[name], expected, rtol=1e-15, atol=0)


# ----------------------------------------------------------------------------------------------------------------------
# Batches. B is the BOS; pieces hold T + 1 tokens.

B = 0
WHOLE = [B, 1, 2, 3, 4]  # fills a piece of T = 4 exactly


def test_training_pieces_by_hand():
    shard = [9, 9]  # before the first BOS: never seen
    shard += [B, 1] + [B, 2, 3]  # two documents that fill a piece of T = 4
    shard += [B, 4, 5, 6, 7, 8] + [B, 9]  # cut to max_len 4; then room for a BOS alone, which is a target only
    shard += [B, 1] + [B, 2, 3, 4, 5]  # the second is cut to the room left
    shard += WHOLE[:4] * 10
    (batch,) = plain_training_batches([shard], [(4, 4)], bos=B)
    assert batch[:3] == [
        ([B, 1, B, 2, 3], [0, 2, 4]),
        ([B, 4, 5, 6, B], [0, 4, 4]),
        ([B, 1, B, 2, 3], [0, 2, 4]),
    ]
    assert batch[3:] == [([B, 1, 2, 3, B], [0, 4, 4])] * 5


def test_a_partial_batch_is_dropped_whole():
    first, second = WHOLE * 10, [B, 5, 6, 7, 8] * 8
    batches = list(plain_training_batches([first, second], [(4, 9)] * 3, bos=B))
    assert batches == [[(WHOLE, [0, 4])] * 8, [([B, 5, 6, 7, 8], [0, 4])] * 8]


def test_length_and_max_len_change_from_batch_to_batch():
    batches = list(plain_training_batches([WHOLE * 24], [(4, 9), (4, 3)], bos=B))
    assert batches[1] == [([B, 1, 2, B, 1], [0, 3, 4])] * 8


def test_pieces_follow_the_ranks_beyond_eight():
    for ranks, pieces in ((1, 8), (2, 8), (4, 8), (8, 8), (16, 16), (24, 24)):
        (batch,) = plain_training_batches([WHOLE * 30], [(4, 9)], bos=B, ranks=ranks)
        assert len(batch) == pieces


@settings(max_examples=60, deadline=None)
@given(
    document_lengths=st.lists(st.lists(st.integers(1, 12), max_size=60), min_size=1, max_size=3),
    schedule=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), max_size=4),
)
def test_training_pieces_hold_beginnings_of_documents_in_order(document_lengths, schedule):
    """Tokens are numbered, so each piece tells where it came from."""
    fresh, shards = iter(range(1, 10**6)), []
    for lengths in document_lengths:
        shards.append([token for n in lengths for token in [B] + [next(fresh) for _ in range(n - 1)]])
    latest = 0
    for (T, max_len), batch in zip(schedule, plain_training_batches(shards, schedule, bos=B)):
        assert len(batch) == 8
        for tokens, boundaries in batch:
            assert len(tokens) == T + 1 and boundaries[0] == 0 and boundaries[-1] == T
            assert boundaries[:-1] == [i for i, token in enumerate(tokens) if token == B]
            for start, end in zip(boundaries, boundaries[1:-1] + [T + 1]):
                document = tokens[start + 1 : end]
                assert end - start <= max_len
                assert document == list(range(document[0], document[0] + len(document))) if document else True
                assert all(token > latest for token in document)
                latest = max([latest, *document])


def test_validation_pieces_by_hand():
    shard = [B] + list(range(1, 8)) + [B] + list(range(9, 19))
    (batch,) = plain_validation_batches([shard], 2, 1, bos=B)
    assert batch[0] == ([B, 1, 2], [0, 0, 2])
    assert batch[3] == ([6, 7, B], [0, 2])
    assert batch[4] == ([B, 9, 10], [0, 0, 2])
    assert [tokens[0] for tokens, _ in batch] == shard[:16:2]


def test_validation_moves_to_the_next_shard_with_a_token_to_spare():
    short, enough = list(range(1, 18)), list(range(1, 19))  # 8 pieces of T = 2 read 17 tokens
    assert len(list(plain_validation_batches([short], 2, 1, bos=B))) == 0
    assert len(list(plain_validation_batches([enough, short, enough], 2, 5, bos=B))) == 2


def test_cu_seqlens_padding():
    assert plain_cu_seqlens([0, 2, 4, 4], 6) == [0, 2, 4, 4, 4, 4]
    with pytest.raises(AssertionError):
        plain_cu_seqlens([0, 2, 4], 2)
