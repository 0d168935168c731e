"""The optimizer written as plainly as it can be: one process, fp64, one matrix and one formula at a time.

NorMuon moves the three weight banks on every step. Adam moves the rest on odd steps, over the sum of the gradients that
have arrived since its last update. Up to the split step the embedding is tied to the head: its gradient joins the
head's, and it is copied from the head; at the split it takes over the head's moments and from then on goes its own way.

This is what the trainer's optimizer is checked against, so there is no rounding here but where it is asked for: with
native=True the Adam parameters and their pending gradients are stored as the trainer stores them (bf16, some fp32)
with fp32 moments; and plain_split_apply computes the trainer's 16 + 16 bit weights bit for bit.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Row(NamedTuple):
    """One parameter. wd_mul and lr_mul multiply the group's defaults; Adam rows have betas."""

    name: str
    lr_mul: float
    wd_mul: float
    betas: tuple[float, float] | None = None  # None: NorMuon
    native_dtype: torch.dtype = torch.bfloat16


V3_TABLE = (  # in the order in which gradients are sent off
    Row("qk_bank", 1, 1),
    Row("vo_bank", 1, 1),
    Row("mlp_bank", 1, 1),
    Row("scalars", 5, 0, (0.9, 0.99), torch.float32),
    Row("smear_gate", 0.01, 0, (0.9, 0.99)),
    Row("ve_gate_bank", 1, 1, (0.9, 0.99)),
    Row("lm_head", 1, 150, (0.5, 0.95)),
    Row("bigram_embed", 75, 5, (0.75, 0.95)),
    Row("post_lambdas", 1, 0, (0.9, 0.95), torch.float32),
    Row("resid_lambdas", 5, 0, (0.9, 0.95), torch.float32),
    Row("value_embeds", 75, 5, (0.75, 0.95)),
    Row("embed", 1, 150, (0.5, 0.95)),
    Row("mudd_w1", 0.25, 1, (0.9, 0.99)),
    Row("mudd_w2", 0.25, 1, (0.9, 0.99)),
    Row("mudd_b2", 0.25, 0, (0.9, 0.99)),
    Row("mudd_gate_w1", 0.1, 1, (0.9, 0.99)),
    Row("mudd_gate_w2", 0.1, 1, (0.9, 0.99)),
    Row("mudd_gate_b2", 0.1, 0, (0.9, 0.99)),
    Row("_mudd_gate_scale", 0.1, 0, (0.9, 0.99), torch.float32),
)

ADAM_LR, ADAM_WD, ADAM_EPS = 0.008, 0.005, 1e-10
MUON_LR, MUON_WD, MUON_BETA2 = 0.023, 1.2, 0.9
V2_FLOOR = SCALE_FLOOR = 1e-10
SPLIT_STEP = 851

POLAR_EXPRESS = (  # a, b, c of the five iterations
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# ----------------------------------------------------------------------------------------------------------------------
# Schedule of the v3 run


def plain_lr_multiplier(step: int) -> float:
    stage_multiplier = 1.0 if step < 425 else 1.52 if step < 850 else 1.73 if step < 1275 else 1.0
    if step < 510:
        return stage_multiplier
    t = min(1.0, (step - 510) / 765)
    return stage_multiplier * (1 - t) + 0.15 * t


def plain_muon_momentum(step: int) -> float:
    if step < 300:
        return 0.85 + 0.10 * step / 300
    if step > 1240:
        return 0.95 - 0.10 * (step - 1240) / 50
    return 0.95


# ----------------------------------------------------------------------------------------------------------------------
# Adam


class AdamState:
    def __init__(self, like: Tensor, dtype: torch.dtype):
        self.m, self.v, self.count = torch.zeros_like(like, dtype=dtype), torch.zeros_like(like, dtype=dtype), 0


def adam_update(p: Tensor, g: Tensor, state: AdamState, row: Row, lr: float) -> Tensor:
    """The parameter after one update; moments and count move in place. Computed in the moments' dtype."""
    (beta1, beta2), dtype = row.betas, state.m.dtype
    wide_p, g, lr = p.to(dtype), g.to(dtype), lr * row.lr_mul
    state.count += 1
    state.m = beta1 * state.m + (1 - beta1) * g
    state.v = beta2 * state.v + (1 - beta2) * g * g
    u = state.m / (state.v.sqrt() + ADAM_EPS) * (lr * math.sqrt(1 - beta2**state.count) / (1 - beta1**state.count))
    decay = lr * lr * ADAM_WD * row.wd_mul * wide_p
    u = torch.where(u * wide_p > 0, u + decay, u)  # cautious: decay only where the update shrinks the weight as well
    return (wide_p - u).to(p.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# NorMuon, one matrix at a time


class MuonState:
    def __init__(self, matrix: Tensor):
        rows, cols = matrix.shape
        self.momentum = torch.zeros_like(matrix)
        self.second_moment = matrix.new_zeros((rows, 1) if rows >= cols else (1, cols))


def nesterov(g: Tensor, state: MuonState, momentum: float) -> Tensor:
    state.momentum = state.momentum + (1 - momentum) * (g - state.momentum)
    return g + momentum * (state.momentum - g)


def polar_express(g: Tensor) -> Tensor:
    """Nearly the closest orthogonal matrix: all singular values pulled towards 1 (https://arxiv.org/abs/2505.16932)."""
    x = g / (1.02 * torch.linalg.norm(g) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        if x.shape[0] <= x.shape[1]:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        else:
            gram = x.T @ x
            x = a * x + x @ (b * gram + c * gram @ gram)
    return x


def reduce_variance(x: Tensor, state: MuonState) -> Tensor:
    """Even out rows (or columns of a wide matrix) by their running mean square, keeping the Frobenius norm."""
    dim = 1 if x.shape[0] >= x.shape[1] else 0
    n = x.shape[dim]
    mean_square = (x * x).mean(dim=dim, keepdim=True)
    state.second_moment = state.second_moment + (1 - MUON_BETA2) * (mean_square - state.second_moment)
    s = state.second_moment.clamp(min=V2_FLOOR) ** -0.5
    norm_before = (n * mean_square.sum()).sqrt()
    norm_after = (n * mean_square * s * s).sum().sqrt()
    return x * (s * norm_before / norm_after.clamp(min=SCALE_FLOOR))


def muon_update(w: Tensor, g: Tensor, state: MuonState, row: Row, lr: float, momentum: float, down: bool) -> Tensor:
    """The matrix after one update; down marks the MLP's second matrix of a pair.

    The decay's first lr is bare, its second carries the multipliers, as the update's does.
    """
    x = reduce_variance(polar_express(nesterov(g, state, momentum)), state)
    rows, cols = w.shape
    lr_eff = lr * row.lr_mul * math.sqrt(max(1, rows / cols)) * (2 if down else 1)
    decay = w * (MUON_WD * row.wd_mul * lr) * lr_eff
    return w - torch.where(x * w >= 0, decay, 0.0) - lr_eff * x


# ----------------------------------------------------------------------------------------------------------------------
# The optimizer


class PlainOptimizer:
    """Parameters by name in .params; call step once a training step.

    Adam's states are .adam[name].m, .v and .count; NorMuon's .muon[name][i].momentum and .second_moment, one i for each
    matrix of the bank (mlp_bank counts as up, down, up, down, ...).
    """

    def __init__(self, params: dict[str, Tensor], *, table: tuple = V3_TABLE, split_step=SPLIT_STEP, native=False):
        self.rows = {row.name: row for row in table}
        assert set(self.rows) == set(params), "the table names each parameter exactly once"
        self.split_step, self.tied = split_step, True
        self.pending: dict[str, Tensor] = {}
        self.params, self.adam, self.muon = {}, {}, {}
        for name, row in self.rows.items():
            self.params[name] = p = params[name].to(row.native_dtype if native and row.betas else torch.float64)
            if row.betas:
                self.adam[name] = AdamState(p, torch.float32 if native else torch.float64)
            else:
                self.muon[name] = [MuonState(matrix) for matrix in p.reshape(-1, *p.shape[-2:])]

    def step(self, step: int, grads: dict[str, Tensor], lr_multiplier: float, momentum: float) -> None:
        """One training step: the gradients add to what is pending, then NorMuon and, on odd steps, Adam update."""
        for name, g in grads.items():
            g = g.to(self.params[name].dtype)
            self.pending[name] = self.pending[name] + g if name in self.pending else g
        for name in self.muon:
            if name in self.pending:
                self._step_bank(name, MUON_LR * lr_multiplier, momentum)
        if step % 2 == 1:
            self._step_adam(ADAM_LR * lr_multiplier)
        if step == self.split_step:
            self._split()

    def _step_bank(self, name: str, lr: float, momentum: float) -> None:
        bank, g = self.params[name], self.pending.pop(name)
        matrices = bank.reshape(-1, *bank.shape[-2:])
        g = g.reshape(matrices.shape)
        moved = []
        for i, state in enumerate(self.muon[name]):
            down = name == "mlp_bank" and i % 2 == 1
            moved.append(muon_update(matrices[i], g[i], state, self.rows[name], lr, momentum, down))
        self.params[name] = torch.stack(moved).reshape(bank.shape)

    def _step_adam(self, lr: float) -> None:
        if self.tied and "embed" in self.pending:
            merged = self.pending.pop("embed").T
            self.pending["lm_head"] = self.pending["lm_head"] + merged if "lm_head" in self.pending else merged
        for name, state in self.adam.items():
            if name in self.pending:
                self.params[name] = adam_update(self.params[name], self.pending.pop(name), state, self.rows[name], lr)
        if self.tied:
            self.params["embed"] = self.params["lm_head"].T.clone()

    def _split(self) -> None:
        head, embed = self.adam["lm_head"], self.adam["embed"]
        embed.m, embed.v, embed.count = head.m.T.clone(), head.v.T.clone(), head.count
        self.tied = False


# ----------------------------------------------------------------------------------------------------------------------
# The stored form of NorMuon's weights


def plain_split_apply(high: np.ndarray, low: np.ndarray, update: np.ndarray, lr: float, wd: float):
    """Apply an update to weights stored as bf16 plus the 16 bits that bf16 drops; returns the new (high, low).

    All arrays are uint16: patterns of the bf16 weights, of the low halves, and of the bf16 update. lr and wd are what
    multiplies the update and, besides lr, the decay. Every operation rounds to fp32 on its own.
    """
    lr, wd = np.float32(lr), np.float32(wd)
    new_high, new_low = np.empty_like(high), np.empty_like(low)
    for at in np.ndindex(high.shape):
        w = np.uint32(int(high[at]) << 16 | int(low[at])).view(np.float32)
        x = np.uint32(int(update[at]) << 16).view(np.float32)
        mask = np.float32(1 if x * w >= 0 else 0)
        decay = w * mask * wd * lr
        bits = int((w - decay - x * lr).view(np.uint32))
        new_high[at], new_low[at] = bits >> 16, bits & 0xFFFF
    return new_high, new_low
