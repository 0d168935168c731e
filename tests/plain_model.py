"""The v3 model written as plainly as it can be: slow, dense, fp64, one formula a line.

This is what the trainer is checked against, so nothing here is clever: attention builds T x T matrices head by head,
every branch of the layer plan stands where it happens, and gradients come from autograd (but for the loss, which has a
gradient convention of its own). There is no rounding: no bf16, no FP8.

Parameters are a dict of tensors with the trainer's names and layouts. Sizes come from their shapes:
T tokens, D model width, H heads, d = D / H head width, V padded vocabulary. Shape suffixes follow the names (q_THd).
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

RMS_EPS = 2.0**-23  # fp32 machine epsilon, whatever the dtype of the input
DC_RMS_EPS = 1e-6
DC_WINDOW = 112  # keys that a query of the DC correction sees, itself included
XSA_NORM_FLOOR = 1e-4
MUDD_SCALE = 0.1  # constant; the scale of the gates is a parameter
GATE_INPUTS = 12  # width of the smear gate's input; the value-embedding gates read 6 + 6 numbers
SOFTCAP, SOFTCAP_SHIFT, SOFTCAP_WIDTH = 23.0, 5.0, 7.5

# ----------------------------------------------------------------------------------------------------------------------
# The layer plan. Layer 6 has no attention.

LAYERS = 11
NO_ATTENTION = 6
LONG_WINDOW = {3, 10}
PAIRED = {0, 2, 5, 9}
KEY_OFFSET = {3, 10}
VALUE_EMBED = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}  # layer -> table
VALUE_GATE_ROW = {1: 0, 2: 1, 8: 2, 9: 3}  # layer -> row of ve_gate_bank; layer 10 takes its gates from MUDD
CACHED = {3, 7, 9}  # layers whose output is kept for later; cache[0] is the input of the loop instead
FROM_CACHE_7 = {8, 9, 10}  # layers whose attention reads rms(cache[7]) instead of rms(x)

# Gate lanes in the order they are stored, as (what, layer). A per-head lane is H wide, any other lane 1 wide.
PER_HEAD = {"xsa", "attn", "dc_w1", "dc_w2"}
PRE_GATE = (
    ("xsa", 1), ("xsa", 3), ("attn", 3),
    ("x0", 0), ("bigram", 0), ("x0", 1), ("bigram", 1), ("x0", 2), ("bigram", 2), ("x0", 3), ("bigram", 3),
)  # fmt: skip
POST_GATE = (
    ("xsa", 4), ("xsa", 7), ("attn", 10),
    ("x0", 4), ("bigram", 4), ("x0", 5), ("bigram", 5), ("x0", 7), ("bigram", 7),
    ("x0", 8), ("bigram", 8), ("x0", 9), ("bigram", 9),
    ("skip", 6), ("dc_w1", 10), ("dc_w2", 10),
)  # fmt: skip


class Setting(NamedTuple):
    """What a stage fixes: windows in tokens, softmax scale, d rotary frequencies; and the document boundaries."""

    windows_tokens: tuple[int, int]  # (short, long)
    attn_scale: float
    freqs: Tensor  # (d,), each frequency twice, then d / 2 zeros
    cu_seqlens: Tensor


# ----------------------------------------------------------------------------------------------------------------------
# Small pieces


def rms(x: Tensor, eps: float = RMS_EPS) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gate_mlp(x_TD: Tensor, w1: Tensor, w2: Tensor, b2: Tensor, lanes: int, scale: Tensor | float) -> Tensor:
    """The tiny MLP behind gates and MUDD coefficients: T x D to T x lanes."""
    return (gelu(x_TD @ w1.T) @ w2[:lanes].T + b2[:lanes]) * scale


def unpack_lanes(gate_TL: Tensor, layout: tuple, heads: int) -> dict[tuple[str, int], Tensor]:
    """Name the lanes: (what, layer) -> T x H for a per-head lane, T x 1 for any other."""
    named, first = {}, 0
    for what, layer in layout:
        width = heads if what in PER_HEAD else 1
        named[what, layer] = gate_TL[:, first : first + width]
        first += width
    assert first == gate_TL.shape[1], "the lanes fill the gate"
    return named


def lane_count(layout: tuple, heads: int) -> int:
    return sum(heads if what in PER_HEAD else 1 for what, _ in layout)


def gates(p: dict[str, Tensor], which: int, x_TD: Tensor) -> dict[tuple[str, int], Tensor]:
    """Pre-gate (which = 0) or post-gate (which = 1), unpacked."""
    layout, heads = (PRE_GATE, POST_GATE)[which], p["ve_gate_bank"].shape[1]
    w1, w2, b2 = p["mudd_gate_w1"][which], p["mudd_gate_w2"][which], p["mudd_gate_b2"][which]
    gate_TL = gate_mlp(x_TD, w1, w2, b2, lane_count(layout, heads), p["_mudd_gate_scale"])
    return unpack_lanes(gate_TL, layout, heads)


def mudd(p: dict[str, Tensor], which: int, x_TD: Tensor, lanes: int) -> list[Tensor]:
    """MUDD coefficients as a list of T x 1 columns."""
    w1, w2, b2 = p["mudd_w1"][which], p["mudd_w2"][which], p["mudd_b2"][which]
    return list(gate_mlp(x_TD, w1, w2, b2, lanes, MUDD_SCALE).split(1, dim=1))


def previous_row(x: Tensor) -> Tensor:
    """Row t holds x[t - 1]; row 0 holds x[0]. A copy, so that nothing reads what it has already overwritten."""
    return torch.cat([x[:1], x[:-1]])


# ----------------------------------------------------------------------------------------------------------------------
# Rotary and attention


def rotate(x_THd: Tensor, position_TH: Tensor, freqs: Tensor) -> Tensor:
    """Rotate adjacent pairs of dims by position x frequency."""
    out = []
    for i in range(x_THd.shape[2] // 2):
        even, odd = x_THd[:, :, 2 * i], x_THd[:, :, 2 * i + 1]
        angle_even, angle_odd = position_TH * freqs[2 * i], position_TH * freqs[2 * i + 1]
        out.append(torch.cos(angle_even) * even + torch.sin(angle_even) * odd)
        out.append(torch.cos(angle_odd) * odd - torch.sin(angle_odd) * even)
    return torch.stack(out, dim=2)


def rotary_positions(tokens: int, heads: int, paired: bool) -> Tensor:
    """Position whose angle head h of token t gets: t, or 2t + (h mod 2) where heads are paired.

    The paired phase is not the place in the stream (see to_stream): heads 1 and 4 have it the other way round than
    heads 0, 2, 3 and 5. That is how v3 was trained.
    """
    positions = [[2 * t + h % 2 if paired else t for h in range(heads)] for t in range(tokens)]
    return torch.tensor(positions, dtype=torch.float64)


def to_stream(x_THd: Tensor) -> Tensor:
    """T x H x d to 2T x H/2 x d: position 2t holds the first half of token t's heads, 2t + 1 the second half."""
    half = x_THd.shape[1] // 2
    return torch.stack([x_THd[:, :half], x_THd[:, half:]], dim=1).flatten(0, 1)


def from_stream(x_SGd: Tensor) -> Tensor:
    return torch.cat([x_SGd[0::2], x_SGd[1::2]], dim=1)


def allowed_keys(cu_seqlens: Tensor, length: int, window: int) -> Tensor:
    """Boolean length x length: query t may see key s of the same document with 0 <= t - s <= window."""
    document = torch.tensor([sum(1 for start in cu_seqlens.tolist() if start <= t) for t in range(length)])
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return (document[:, None] == document[None, :]) & (distance >= 0) & (distance <= window)


def probabilities(q_Td: Tensor, k_Td: Tensor, allowed_TT: Tensor, scale: float) -> Tensor:
    return torch.softmax((scale * (q_Td @ k_Td.T)).masked_fill(~allowed_TT, -math.inf), dim=1)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Plain attention, one head after the other; q, k, v are length x heads x d."""
    per_head = [probabilities(q[:, h], k[:, h], allowed, scale) @ v[:, h] for h in range(q.shape[1])]
    return torch.stack(per_head, dim=1)


def dc_correction(q: Tensor, k: Tensor, v: Tensor, w1_TH: Tensor, w2_TH: Tensor, cu_seqlens: Tensor, scale: float):
    """What DC adds to the output: all heads' maps over the nearest keys, mixed by w1 into one, given out by w2."""
    heads = range(q.shape[1])
    valid = allowed_keys(cu_seqlens, q.shape[0], DC_WINDOW - 1)
    mixed_TT = sum(w1_TH[:, h : h + 1] * probabilities(q[:, h], k[:, h], valid, scale) for h in heads)
    return torch.stack([w2_TH[:, h : h + 1] * (mixed_TT @ v[:, h]) for h in heads], dim=1)


def subtract_own_value(y_THd: Tensor, v_THd: Tensor, alpha_TH: Tensor) -> Tensor:
    """XSA: remove a share tanh(alpha) of the output's component along the token's own value."""
    unit_THd = v_THd / v_THd.norm(dim=2, keepdim=True).clamp(min=XSA_NORM_FLOOR)
    along_TH1 = (y_THd * unit_THd).sum(dim=2, keepdim=True)
    return y_THd - torch.tanh(alpha_TH)[:, :, None] * along_TH1 * unit_THd


def attention(p: dict[str, Tensor], layer: int, n_TD: Tensor, extra_v_THd: Tensor | None, gate: dict, setting: Setting):
    """Attention of one layer from its normalised input to the output projection."""
    (T, D), H = n_TD.shape, p["ve_gate_bank"].shape[1]
    d = D // H
    index = layer if layer < NO_ATTENTION else layer - 1  # place among the layers that have attention
    groups = p["qk_bank"][H * index : H * (index + 1)]  # H/2 pairs of query heads, then H/2 pairs of key heads
    w_q, w_k = groups.reshape(2, D, D)
    w_v, w_o = p["vo_bank"][2 * index], p["vo_bank"][2 * index + 1]
    qkv_lambda, o_lambda = p["scalars"][2 * layer], p["scalars"][2 * layer + 1]

    q = rms((n_TD @ (qkv_lambda * w_q).T).view(T, H, d))
    k = rms((n_TD @ (qkv_lambda * w_k).T).view(T, H, d))
    v = (n_TD @ (qkv_lambda * w_v).T).view(T, H, d)
    position_TH = rotary_positions(T, H, layer in PAIRED)
    q, k = rotate(q, position_TH, setting.freqs), rotate(k, position_TH, setting.freqs)
    if layer in KEY_OFFSET:  # the stationary half of each key comes from the token before, across documents too
        k = torch.cat([k[:, :, : d // 2], previous_row(k)[:, :, d // 2 :]], dim=2)
    if extra_v_THd is not None:
        v = v + extra_v_THd

    window = setting.windows_tokens[layer in LONG_WINDOW]
    if layer in PAIRED:  # the window counts positions of the stream, so half as many tokens
        allowed = allowed_keys(2 * setting.cu_seqlens, 2 * T, window)
        y = from_stream(softmax_attention(to_stream(q), to_stream(k), to_stream(v), allowed, setting.attn_scale))
    else:
        y = softmax_attention(q, k, v, allowed_keys(setting.cu_seqlens, T, window), setting.attn_scale)

    if ("dc_w1", layer) in gate:
        w1_TH, w2_TH = rms(gate["dc_w1", layer], DC_RMS_EPS), gate["dc_w2", layer]
        y = y + dc_correction(q, k, v, w1_TH, w2_TH, setting.cu_seqlens, setting.attn_scale)
    if ("xsa", layer) in gate:
        y = subtract_own_value(y, v, gate["xsa", layer])
    if ("attn", layer) in gate:
        y = y * gate["attn", layer][:, :, None]
    return y.reshape(T, D) @ (o_lambda * w_o).T


def mlp(p: dict[str, Tensor], layer: int, x_TD: Tensor) -> Tensor:
    w_fc, w_proj = p["mlp_bank"][layer]  # both 4D x D
    return torch.relu(rms(x_TD) @ w_fc.T) ** 2 @ w_proj


# ----------------------------------------------------------------------------------------------------------------------
# The model


def embed_tokens(p: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """x0: embeddings, each smeared with its neighbour on the left (across documents), normalised."""
    e_TD = p["embed"][inputs]
    smear_T1 = p["scalars"][2 * LAYERS] * torch.sigmoid(e_TD[:, :GATE_INPUTS] @ p["smear_gate"].T)
    return rms(torch.cat([e_TD[:1], e_TD[1:] + smear_T1[1:] * e_TD[:-1]]))


def gated_values(p: dict[str, Tensor], layer: int, n_TD: Tensor, ve_THd: Tensor) -> Tensor:
    """Extra V of layers 1, 2, 8 and 9: one gate a head from 6 + 6 numbers."""
    half = GATE_INPUTS // 2
    gate_input = torch.cat([n_TD[:, :half], ve_THd.flatten(1)[:, :half]], dim=1)
    gate_TH = 2 * torch.sigmoid(gate_input @ p["ve_gate_bank"][VALUE_GATE_ROW[layer]].T)
    return gate_TH[:, :, None] * ve_THd


def last_layer(p: dict[str, Tensor], x, bigram, cache: dict, ve_THd: Tensor, gate: dict, setting: Setting) -> Tensor:
    """Layer 10: every coefficient comes from MUDD. x, bigram and the cached values are T x D."""
    layer, (T, H, d) = LAYERS - 1, ve_THd.shape
    mu = mudd(p, 0, x, lanes=14)
    mudd_v_THd = (mu[0] * cache[0] + mu[1] * cache[7] + mu[2] * x).view(T, H, d)  # x before the recombination
    x = (1 + mu[5]) * x + mu[3] * cache[0] + mu[4] * cache[7]
    value_gate_TH = torch.cat([mu[6]] * (H // 2) + [mu[7]] * (H // 2), dim=1)
    extra_v_THd = value_gate_TH[:, :, None] * ve_THd + mudd_v_THd
    x = mu[8] * x + mu[9] * attention(p, layer, rms(cache[7]), extra_v_THd, gate, setting) + mu[10] * cache[0]
    x = x + mu[11] * bigram
    return mu[12] * x + mu[13] * mlp(p, layer, x)


def plain_hidden(p: dict[str, Tensor], inputs, bigram_rows, sign_rows, sign_table, setting: Setting) -> Tensor:
    """The normalised output of the last layer, T x D."""
    (T,), (V, D), H = inputs.shape, p["embed"].shape, p["ve_gate_bank"].shape[1]
    bigram = p["bigram_embed"][bigram_rows] * sign_table[sign_rows]
    value_embeds = [p["value_embeds"].view(5, V, D)[table][inputs].view(T, H, D // H) for table in range(5)]
    skip_lambda = p["scalars"][2 * LAYERS + 1]
    x0 = embed_tokens(p, inputs)
    gate = gates(p, 0, x0)
    x = x0 + bigram * gate["bigram", 0]
    cache = {0: x}

    for layer in range(LAYERS - 1):
        resid_attn, resid_mlp = p["resid_lambdas"][layer]
        post_attn, post_mlp = p["post_lambdas"][layer]
        if layer == 4:
            gate |= gates(p, 1, x)
        if layer == NO_ATTENTION:
            x = x + torch.sigmoid(skip_lambda) * gate["skip", layer] * cache[3]
        else:
            n = rms(cache[7]) if layer in FROM_CACHE_7 else rms(x)
            extra_v = gated_values(p, layer, n, value_embeds[VALUE_EMBED[layer]]) if layer in VALUE_EMBED else None
            y = attention(p, layer, n, extra_v, gate, setting)
            x = resid_attn * x + post_attn * y + x0 * gate["x0", layer]
            if layer > 0:  # layer 0's share went in before the loop
                x = x + bigram * gate["bigram", layer]
        x = resid_mlp * x + post_mlp * mlp(p, layer, x)
        if layer in CACHED:
            cache[layer] = x

    x = last_layer(p, x, bigram, cache, value_embeds[VALUE_EMBED[10]], gate, setting)
    nu = mudd(p, 1, x, lanes=5)
    ve_0 = value_embeds[0].flatten(1)
    return rms(x + nu[0] * cache[0] + nu[1] * cache[7] + nu[2] * cache[9] + nu[3] * ve_0 + nu[4] * cache[3])


# ----------------------------------------------------------------------------------------------------------------------
# Loss


def plain_softcap(logits: Tensor) -> Tensor:
    return SOFTCAP * torch.sigmoid((logits + SOFTCAP_SHIFT) / SOFTCAP_WIDTH)


def plain_training_loss(logits_TV: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
    """Per token: cross entropy with each of the next n targets, weighted and summed; none past the end counts."""
    z_TV = plain_softcap(logits_TV)
    lse_T = torch.logsumexp(z_TV, dim=1)
    T = len(targets)
    loss = []
    for t in range(T):
        terms = [w * (lse_T[t] - z_TV[t, targets[t + k]]) for k, w in enumerate(mtp_weights) if t + k < T]
        loss.append(sum(terms))
    return torch.stack(loss)


def plain_logit_gradient(logits_TV: Tensor, targets: Tensor, mtp_weights: Tensor) -> Tensor:
    """The trainer's gradient of each token's loss with respect to its logits.

    Not quite the derivative of plain_training_loss: in the last n - 1 rows the softmax term keeps the full sum of the
    weights, although the missing targets are dropped from the loss. Equal targets within one row add up.
    """
    sigma_TV = torch.sigmoid((logits_TV + SOFTCAP_SHIFT) / SOFTCAP_WIDTH)
    gradient_TV = sum(mtp_weights) * torch.softmax(SOFTCAP * sigma_TV, dim=1)
    T = len(targets)
    for t in range(T):
        for k, w in enumerate(mtp_weights):
            if t + k < T:
                gradient_TV[t, targets[t + k]] -= w
    return gradient_TV * (SOFTCAP / SOFTCAP_WIDTH) * sigma_TV * (1 - sigma_TV)


class PlainTrainingLoss(torch.autograd.Function):
    """plain_training_loss with plain_logit_gradient as its derivative; scaling the loss scales the gradient."""

    @staticmethod
    def forward(ctx, logits_TV, targets, mtp_weights):
        ctx.save_for_backward(logits_TV, targets, mtp_weights)
        return plain_training_loss(logits_TV, targets, mtp_weights)

    @staticmethod
    def backward(ctx, grad_loss_T):
        return grad_loss_T[:, None] * plain_logit_gradient(*ctx.saved_tensors), None, None


def plain_evaluation_loss(logits_TV: Tensor, targets: Tensor) -> Tensor:
    z_TV = plain_softcap(logits_TV)
    return torch.logsumexp(z_TV, dim=1) - z_TV[torch.arange(len(targets)), targets]


def plain_forward(
    params: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor,
    bigram_rows: Tensor,
    sign_rows: Tensor,
    sign_table: Tensor,
    *,
    windows_tokens: tuple[int, int],
    attn_scale: float,
    freqs: Tensor,
    mtp_weights: Tensor | None = None,
) -> Tensor:
    """Loss per token, (T,) fp64 in nats: the training loss where mtp_weights are given, else the evaluation loss.

    Training losses are neither averaged over tokens nor divided by the sum of the weights. What the trainer accumulates
    for one micro-batch is the gradient of (grad_scale * losses).sum().
    """
    p = {name: value.double() for name, value in params.items()}
    freqs = torch.as_tensor(freqs, dtype=torch.float64)
    setting = Setting(tuple(int(w) for w in windows_tokens), float(attn_scale), freqs, cu_seqlens)
    inputs, targets, bigram_rows, sign_rows = (x.long() for x in (inputs, targets, bigram_rows, sign_rows))
    hidden_TD = plain_hidden(p, inputs, bigram_rows, sign_rows, sign_table.double(), setting)
    logits_TV = hidden_TD @ p["lm_head"]
    if mtp_weights is None:
        return plain_evaluation_loss(logits_TV, targets)
    return PlainTrainingLoss.apply(logits_TV, targets, torch.as_tensor(mtp_weights, dtype=torch.float64))


# ----------------------------------------------------------------------------------------------------------------------
# YaRN, bigram rows, sign rows


def plain_yarn(long_windows_in_order: list[int], head_dim: int) -> tuple[Tensor, float]:
    """Frequencies (d,) and softmax scale after the long window has gone through these sizes, in tokens."""
    count = head_dim // 4
    freqs = [(1 / 1024) ** (i / (count - 1)) for i in range(count)]
    scale = 0.1
    for old, new in itertools.pairwise(long_windows_in_order):
        for i, f in enumerate(freqs):
            rotations = old * f / (2 * math.pi)
            keep = min(max((rotations - 1) / 31, 0.0), 1.0)  # 1: leave this frequency alone; 0: stretch it fully
            freqs[i] = f * (old / new + keep * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    paired = [f for f in freqs for _ in range(2)]
    return torch.tensor(paired + [0.0] * (head_dim - len(paired)), dtype=torch.float64), scale


def int32(value: int) -> int:
    """The value that a 32-bit signed integer holds after wrapping around."""
    return (value + 2**31) % 2**32 - 2**31


def plain_bigram_rows(tokens: list[int], table_rows: int) -> list[int]:
    """Row of the bigram table for each token of one micro-batch; the last row stands for "no token before"."""
    m = table_rows - 1
    rows = [m]
    for t in range(1, len(tokens)):
        before = m if t == 1 else int(tokens[t - 1])  # position 1 finds m, already written, where tokens[0] was
        rows.append((int32(36313 * int(tokens[t])) ^ int32(27191 * before)) % m)  # Python's %: never negative
    return rows


def plain_sign_rows(tokens: list[int], table_rows: int) -> list[int]:
    """Row of the sign table for each token of one micro-batch."""
    return [0] + [(int(tokens[t - 1]) ^ int(tokens[t])) % table_rows for t in range(1, len(tokens))]
