"""ops.py: time each kernel alone, at the sizes of the record preset's stages.

    python bench/ops.py                    every operation
    python bench/ops.py attention head     some of them
    python bench/ops.py --check            only compare them with their references

An operation is timed only where its results and gradients, on fresh random inputs, are as near to the reference in fp64
as twice the reference in the same low precision (plus two units in the last place), which is the tests' rule.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from step_worker import keys_seen
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402
import triton_kernels as kernels  # noqa: E402
from dc_triton_kernels import dc_correction, dc_correction_reference  # noqa: E402

# The public v3 trainer, unchanged in its mathematics, measured on one H200 on 2026-11-30 (torch 2.11.0+cu130, Triton
# 3.6.0, flash-attn-4 4.0.0b36): GPU us in stages 0, 1, 2, forward and then forward + backward, of one attention layer
# (mean of ten), the DC layer, the head with its cross-entropy and transposes, and of the two fused linear + relu^2
# kernels of one MLP, FP8 up and bf16 back (ms a step over 8 micro-batches, and over 11 MLPs).
V3_US = {
    "attention": ((58, 201), (141, 489), (251, 847)),
    "dc": ((375, 975), (788, 2038), (1200, 3125)),
    "head fp8": ((math.nan, 4088), (math.nan, 8425), (math.nan, 12663)),
    "mlp fused kernels": ((243,), (493,), (736,)),
}
MOVED = {  # bytes that an update must move for each element of a bf16 parameter
    "adam_update_": 22,  # weight, gradient, two fp32 moments
    "normuon_momentum_": 12,  # gradient, fp32 momentum, the result
    "normalize_variance_": 6,
    "cautious_update_": 10,  # both halves of the fp32 weight, the update
    "zero": 2,  # the gradient
}
FOLDED = {"fold_": 4, "unfold_": 10}  # likewise, of matrices times their lambdas: gradients are cleared and added to
HEADING = f"{'operation':32}{'stage':>6}{'us':>10}{'achieved':>16}{'ceiling':>9}{'torch':>7}{'v3':>7}"
LEGEND = """\
achieved: bytes that must move, or multiplications and additions, a second. ceiling: the time that these would take at
the rates measured here, over the time taken. torch, v3: our time over torch's best or the eager reference's, and over
the v3 trainer's on an H200; below 1 is faster. + backward: forward and backward together. Times: medians of replayed
CUDA graphs. The measured ceilings are a copy of 1 GiB and products of 8192 x 8192 matrices. What depends on no stage
is timed once, as stage 0. optimizer: a whole step of one GPU over what it must take, Polar Express's products (of a
symmetric one, half) at the rate of torch's batched product of the same bank, and the bytes of all else by copy."""


@dataclass(frozen=True)
class Sizes:
    """What one micro-batch of a stage looks like to the kernels."""

    stage: int
    model: train_gpt.ModelConfig
    view: train_gpt.View
    mtp: list[float]
    T: int
    device: str = "cuda"
    fp8: bool = True

    @classmethod
    def of(cls, cfg: train_gpt.RunConfig, stage: int, T: int = 0, **more) -> "Sizes":
        step = (0, *train_gpt.stage_ends(cfg))[stage]
        T = T or train_gpt.stage_at(cfg, step).batch_tokens // train_gpt.PIECES
        return cls(stage, cfg.model, train_gpt.view_at(cfg, step), train_gpt.mtp_weights(cfg, step), T, **more)

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (scale * torch.randn(shape, device=self.device)).to(dtype or self.model.dtype)

    def heads(self, *columns: int) -> Tensor:
        """(T, ..., heads, head dim)"""
        return self.randn(self.T, *columns, self.model.heads, self.model.head_dim)

    def normed_heads(self) -> Tensor:
        return F.rms_norm(self.heads(), (self.model.head_dim,))

    def tensor(self, values, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def documents(self) -> np.ndarray:
        """Lengths of log-normal documents (median e^6 tokens) that fill T, cut at the stage's longest."""
        lengths = np.ceil(np.random.default_rng(0).lognormal(6, 1, self.T)).astype(np.int64)
        ends = np.minimum(np.cumsum(np.minimum(lengths, self.view.max_len)), self.T)
        return np.diff(np.unique(ends), prepend=0)

    def boundaries(self) -> Tensor:
        return self.tensor([0, *np.cumsum(self.documents()), self.T, self.T], torch.int32)


@dataclass(frozen=True)
class Case:
    """One operation on inputs of one size. With two costs its inputs want gradients."""

    name: str
    op: Callable  # of the inputs: a tensor or several
    reference: Callable  # what `op` must agree with; in fp64 where it is given fp64
    inputs: Callable[[], list[Tensor]]  # fresh ones
    costs: tuple[dict[str, float], ...]  # bytes ("copy") and FLOPs ("bf16", "fp8"), forward and forward + backward
    exact: Callable | None = None  # in place of `reference` in fp64
    torch: Callable | None = None  # torch's best, in place of the reference
    mutates: bool = False  # its inputs
    bitwise: bool = False  # op and reference agree to the bit
    calls: int = 1  # that `op` makes; what is printed is for one
    sets: int = 1  # of inputs to go round, so that none is found in the L2 cache


def pair(name: str) -> tuple[Callable, Callable]:
    """A kernel's operation and its reference."""
    return getattr(kernels, name), getattr(kernels, f"{name.rstrip('_')}_reference{'_' * name.endswith('_')}")


# === Operations ===


def attention_cases(s: Sizes) -> Iterator[Case]:
    """All attention layers of the model; figures are for one in the mean."""
    lengths, cu_seqlens, m = s.documents(), s.boundaries(), s.model
    windows = {"short": s.view.short, "long": s.view.long}
    layers = [(windows[spec.window], spec.paired) for spec in m.plan if spec.window in windows]
    keys = sum(keys_seen(lengths * (1 + paired), window) / (1 + paired) for window, paired in layers)
    flops = 4 * m.head_dim * m.heads * keys

    def every_layer(attention: Callable, **options) -> Callable:
        def run(*qkv: Tensor) -> list[Tensor]:
            rows = zip(qkv[::3], qkv[1::3], qkv[2::3], layers)
            return [
                attention(q, k, v, cu_seqlens, window=window, scale=s.view.scale, paired=paired, **options)
                for q, k, v, (window, paired) in rows
            ]

        return run

    yield Case(
        "attention",
        every_layer(kernels.attention, max_logit=2**0.5 * m.head_dim * s.view.scale),  # as where nothing is read again
        every_layer(kernels.attention_reference),
        lambda: [x for _ in layers for x in (s.normed_heads(), s.normed_heads(), s.heads())],
        ({"bf16": flops}, {"bf16": 3.5 * flops}),
        torch=every_layer(kernels.flash_attention, max_len=s.view.max_len),
        calls=len(layers),
    )


def dc_cases(s: Sizes) -> Iterator[Case]:
    cu_seqlens, one = s.boundaries(), s.heads().nbytes
    ops = (partial(op, scale=s.view.scale, window=s.model.dc_window) for op in (dc_correction, dc_correction_reference))
    ours, reference = (lambda *x, op=op: op(*x, cu_seqlens) for op in ops)

    def inputs() -> list[Tensor]:
        w1, w2 = (s.randn(s.T, s.model.heads) for _ in range(2))
        return [s.normed_heads(), s.normed_heads(), s.heads(), w1, w2, s.heads()]

    yield Case("dc", ours, reference, inputs, ({"copy": 5 * one}, {"copy": 12 * one}))


def head_cases(s: Sizes) -> Iterator[Case]:
    D, V = s.model.dim, s.model.vocab_padded
    targets = (s.model.vocab_size * torch.rand(s.T, device=s.device) ** 3).long()
    weights, product = s.tensor(s.mtp), 2 * s.T * D * V

    def inputs() -> list[Tensor]:
        return [F.rms_norm(s.randn(s.T, D), (D,)), s.randn(D, V, scale=0.02)]

    def eager(x: Tensor, w: Tensor) -> Tensor:  # one target
        z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
        return F.cross_entropy(z.float(), targets, reduction="none")

    def loss(op: Callable, fp8: bool) -> Callable:
        return lambda x, w: op(x, w, targets, weights.to(torch.promote_types(x.dtype, torch.float32)), fp8=fp8)

    for rate in ("fp8", "bf16") if s.fp8 else ("bf16",):
        ours, reference = (loss(op, rate == "fp8") for op in pair("head_loss"))
        exact = loss(kernels.head_loss_reference, False)
        costs = {rate: product}, {rate: 3 * product}
        yield Case(f"head {rate}", ours, reference, inputs, costs, exact=exact, torch=eager)
    ours, reference = (partial(op, targets=targets) for op in pair("head_cross_entropy"))
    yield Case("head evaluation", ours, reference, inputs, ({"bf16": product},), torch=eager)


def mlp_cases(s: Sizes) -> Iterator[Case]:
    D, hidden = s.model.dim, 4 * s.model.dim
    product = 2 * s.T * D * hidden
    w_fc, w_proj = s.randn(hidden, D, scale=D**-0.5), s.randn(hidden, D, scale=hidden**-0.5)
    mlp, plain = pair("mlp")

    def inputs() -> list[Tensor]:
        return [s.randn(s.T, D), w_fc, w_proj]

    yield Case("mlp bf16", mlp, plain, inputs, ({"bf16": 2 * product}, {"bf16": 6 * product}))
    if not s.fp8:
        return
    fp8 = kernels.QuantizedWeight(*kernels.quantize(w_fc))
    costs = {"fp8": product, "bf16": product}, {"fp8": product, "bf16": 5 * product}
    yield Case("mlp fp8", partial(mlp, fp8=fp8), partial(plain, fp8=fp8), inputs, costs, exact=plain, torch=plain)

    def fused(n: Tensor, g: Tensor) -> list[Tensor]:
        post = kernels.mlp_up(n, w_fc, *fp8)
        return [post, kernels.mlp_dpre(g, w_proj, post)]

    def eager(n: Tensor, g: Tensor) -> list[Tensor]:
        relu = (n @ w_fc.to(n.dtype).T).relu()
        return [relu.square(), 2 * relu * (g @ w_proj.to(g.dtype).T)]

    def emulated(n: Tensor, g: Tensor) -> list[Tensor]:
        n8, scale = kernels.quantize_reference(n)
        relu = ((n8.float() @ fp8.w8.float().T) * (scale * fp8.scale)).to(n.dtype).relu()
        return [relu.square(), 2 * relu * (g @ w_proj.T)]

    costs = ({"fp8": product, "bf16": product},)
    two = lambda: [s.randn(s.T, D), s.randn(s.T, D)]  # noqa: E731
    yield Case("mlp fused kernels", fused, emulated, two, costs, exact=eager, torch=eager)
    costs = ({"copy": 3 * s.T * D},)
    yield Case("quantize activations", *pair("quantize"), lambda: two()[:1], costs, bitwise=True, sets=4)


def products_cases(s: Sizes) -> Iterator[Case]:
    """Queries, keys and values from their input, normed and turned; the gradient of such an input; a deep product."""
    T, D, N, H = s.T, s.model.dim, s.model.heads, s.model.head_dim
    angles, product = 6 * torch.rand(2 * T, H // 4, device=s.device), 2 * T * D * D

    def made(n: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        cos, sin = angles.cos().to(n.dtype), angles.sin().to(n.dtype)
        return kernels.heads(n, w, cos, sin, heads=N, paired=True, key_offset=False)

    def reference(n: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        cos, sin = angles.cos().to(n.dtype), angles.sin().to(n.dtype)
        return kernels.heads_reference(n, w, cos, sin, heads=N, paired=True, key_offset=False)

    weights = lambda depth: s.randn(depth, D, scale=depth**-0.5)  # noqa: E731
    costs = {"bf16": 3 * product}, {"bf16": 9 * product}
    yield Case("heads", made, reference, lambda: [s.randn(T, D), s.randn(3 * D, D, scale=D**-0.5)], costs, sets=2)
    for name, depths in (("product, two terms", (2 * D, D)), ("product, deep", (4 * D,))):

        def inputs(depths: tuple[int, ...] = depths) -> list[Tensor]:
            return [s.randn(T, depth) for depth in depths] + [weights(depth) for depth in depths]

        def ours(*x: Tensor) -> Tensor:
            return kernels.product(list(x[: len(x) // 2]), list(x[len(x) // 2 :]))

        def library(*x: Tensor) -> Tensor:
            out, pairs = None, zip(x[: len(x) // 2], x[len(x) // 2 :])
            for left, right in pairs:
                out = left @ right if out is None else out.addmm_(left, right)
            return out

        yield Case(name, ours, library, inputs, ({"bf16": sum(depths) // D * product},))


def gates_cases(s: Sizes) -> Iterator[Case]:
    """The lanes of the post gate, with a learned scale, and MUDD's, in fp32."""
    T, D, F, item = s.T, s.model.dim, s.model.gate_hidden, s.model.dtype.itemsize
    learned = s.tensor(0.125, s.model.dtype)
    for name, lanes, scale, wide in (
        ("gates", s.model.gate_lanes(post=True), learned, s.model.dtype),
        ("gates, MUDD", train_gpt.MUDD_LANES, train_gpt.MUDD_SCALE, torch.float32),
    ):
        L = sum(lane.width for lane in lanes)

        def inputs(L: int = L, scale: Tensor | float = scale) -> list[Tensor]:
            x, *weights = s.randn(T, D), s.randn(F, D, scale=D**-0.5), s.randn(L, F, scale=F**-0.5), s.randn(L)
            return [x, *weights, *([scale] if isinstance(scale, Tensor) else [])]

        def scaled(op: Callable, scale: Tensor | float = scale, wide: torch.dtype = wide) -> Callable:
            given = () if isinstance(scale, Tensor) else (scale,)
            return lambda *x: op(*x, *given, torch.promote_types(x[0].dtype, wide))

        one, hidden, out = T * D * item, T * F * item, T * L * wide.itemsize
        costs = {"copy": one + hidden + out}, {"copy": 3 * one + 4 * hidden + 2 * out}
        yield Case(name, *map(scaled, pair("gates")), inputs, costs, sets=3)


def pointwise_cases(s: Sizes) -> Iterator[Case]:
    D, N, H = s.model.dim, s.model.heads, s.model.head_dim
    one, lambdas = s.T * D * s.model.dtype.itemsize, s.randn(2, dtype=torch.float32)
    alpha, gate, angles = s.randn(s.T, N), s.randn(s.T, N), 6 * torch.rand(2 * s.T, H // 4, device=s.device)

    def mixed(op: Callable) -> Callable:  # two lambdas, two gates
        return lambda *x: op([*lambdas.to(torch.promote_types(x[0].dtype, torch.float32)), *x[:2]], x[2:], normed=True)

    def left(op: Callable) -> Callable:  # as in most layers: a lambda left to the next sum, no other coefficient
        def two_sums(a: Tensor, b: Tensor, c: Tensor, lam: Tensor) -> tuple[Tensor, ...]:
            return op((None, None), (op((None, None), (a, b), normed=True, leave=lam)[0], c), normed=True)

        return two_sums

    def rotated(op: Callable) -> Callable:
        return lambda qk: op(qk, angles.cos().to(qk.dtype), angles.sin().to(qk.dtype), paired=True, key_offset=False)

    def finished(op: Callable) -> Callable:
        return lambda y, v: op(y, v, alpha, gate)

    def injected(op: Callable) -> Callable:  # six pairs of gates
        return lambda *x: op(list(zip(x[:6], x[6:12])), *x[12:])

    def value_embeds() -> list[Tensor]:
        gated = s.model.smear_dims
        return [s.heads(), s.randn(s.T, D), s.randn(s.T, gated // 2), s.randn(N, gated)]

    gates, same = lambda: [s.randn(s.T), s.randn(s.T)], lambda op: op  # noqa: E731
    for name, wrap, inputs, forward, both in (
        ("mix", mixed, lambda: gates() + [s.randn(s.T, D) for _ in range(4)], 6, 16),
        ("injections", injected, lambda: 6 * gates() + [s.randn(s.T, D) for _ in range(2)], 8, 18),
        ("mix, lambda left", left, lambda: [s.randn(s.T, D) for _ in range(3)] + [s.randn()], 7, 14),
        ("smear", same, lambda: [s.randn(s.T, D), s.randn(1, s.model.smear_dims), s.randn()], 2, 5),
        ("norm_rotary", rotated, lambda: [s.heads(2)], 4, 10),
        ("finish_heads", finished, lambda: [s.heads(), s.heads()], 3, 8),
        ("add_values", same, value_embeds, 3, 6),
    ):
        ops = map(wrap, pair(name.partition(",")[0]))
        yield Case(name, *ops, inputs, ({"copy": forward * one}, {"copy": both * one}), sets=3)


def lookup_cases(s: Sizes) -> Iterator[Case]:
    D, V = s.model.dim, s.model.vocab_padded
    rows = (s.model.vocab_size * torch.rand(s.T, device=s.device) ** 8).int()
    order, costs = kernels.lookup_order(rows), ({"copy": (s.T + 2 * len(rows.unique())) * D * s.model.dtype.itemsize},)

    def ours(grad: Tensor, d: Tensor) -> None:
        kernels.lookup_add_([grad], order, [d])

    def reference(grad: Tensor, d: Tensor) -> None:
        kernels.lookup_add_reference([grad], rows, [d])

    yield Case("lookup_add_", ours, reference, lambda: [s.randn(V, D), s.randn(s.T, D)], costs, mutates=True)
    gather = ({"copy": (s.T + len(rows.unique())) * D * s.model.dtype.itemsize},)
    ops = (lambda table, op=op: op(rows, [table]) for op in (kernels.lookup_gather, kernels.lookup_gather_reference))
    yield Case("lookup_gather", *ops, lambda: [s.randn(V, D)], gather)


def banks(s: Sizes) -> dict[str, tuple[int, int, int]]:
    plan = train_gpt.parameter_plan(s.model)
    shapes = {name: plan[f"{name}_bank"].shape for name in ("qk", "vo", "mlp")}
    return {name: (math.prod(shape[:-2]), *shape[-2:]) for name, shape in shapes.items()}


def symmetric_cases(s: Sizes) -> Iterator[Case]:
    for name, (B, R, C) in banks(s).items():
        gram, size = ("xtx", C) if R > C else ("xxt", R)
        half, step = B * R * C * size, B * size**3  # FLOPs of one triangle
        fresh = lambda shape=(B, R, C): [s.randn(*shape, scale=0.03)]  # noqa: E731
        square = lambda shape=(B, size, size): [x + x.mT for x in [s.randn(*shape, scale=shape[-1] ** -0.5)]]  # noqa: E731
        powers = (partial(op, beta=-2.5, alpha=0.5) for op in pair("ba_plus_caa"))
        yield Case(f"{gram} {name} bank", *pair(gram), fresh, ({"bf16": half},))
        yield Case(f"ba_plus_caa {name} bank", *powers, square, ({"bf16": step},))
        costs = ({"bf16": 5 * (3 * half + step)},)
        yield Case(f"polar_express {name} bank", *pair("polar_express"), fresh, costs)


def update_cases(s: Sizes) -> Iterator[Case]:
    """A table of the head's size for Adam, the MLP bank for NorMuon."""
    (B, R, C), table, fp32 = banks(s)["mlp"], (s.model.vocab_padded, s.model.dim), torch.float32
    new, low = partial(s.randn, B, R, C), torch.zeros(B, R, C, dtype=torch.uint16, device=s.device)
    hyper, number, rates = s.tensor([0.75, 0.95, 1e-2, 1e-10, 1e-3]), s.tensor([0.9]), s.tensor([0.01] * B)

    def adam() -> list[Tensor]:
        moments = s.randn(*table, dtype=fp32, scale=0.1), s.randn(*table, dtype=fp32).square()
        return [s.randn(*table), s.randn(*table), *moments, hyper.clone()]

    for name, inputs, elements in (
        ("adam_update_", adam, math.prod(table)),
        ("normuon_momentum_", lambda: [new(), new(dtype=fp32), number], low.numel()),
        ("normalize_variance_", lambda: [new(), s.randn(B, R, 1, dtype=fp32).square(), number], low.numel()),
        ("cautious_update_", lambda: [new().bfloat16(), low.clone(), new(), rates, number], low.numel()),
        ("fold_", lambda: [new(), new(), rates], low.numel()),
        ("unfold_", lambda: [new(), new(), rates, new()], low.numel()),
    ):
        bitwise = name == "cautious_update_"  # the split weights
        costs = ({"copy": (MOVED | FOLDED)[name] * elements},)
        yield Case(name, *pair(name), inputs, costs, mutates=True, bitwise=bitwise)


def weight_cases(s: Sizes) -> Iterator[Case]:
    """FP8 copies of weights, made once a step."""
    if not s.fp8:
        return
    (B, R, C), D, V = banks(s)["mlp"], s.model.dim, s.model.vocab_padded

    def up_projections() -> list[Tensor]:
        bank = s.randn(B // 2, 2, R, C)[:, 0]
        return [bank, torch.empty(bank.shape, dtype=kernels.E4M3, device=s.device), s.tensor([[0.0] * 4] * len(bank))]

    def one_by_one(bank: Tensor, w8: Tensor, cells: Tensor) -> None:
        for w, into, cell in zip(bank, w8, cells):
            values, cell[0] = kernels.quantize_reference(w)
            into.copy_(values)

    def eager(w: Tensor) -> list[Tensor]:
        w8 = (w.float() / kernels.W_SCALE).clamp(-448, 448).to(kernels.E4M3)
        return [w8, w8.T.contiguous()]

    costs = ({"copy": 3 * (B // 2) * R * C},)
    yield Case("quantize_bank", kernels.quantize_bank, one_by_one, up_projections, costs, mutates=True, bitwise=True)
    head = lambda: [s.randn(D, V, scale=0.02)]  # noqa: E731
    yield Case("quantize_head", kernels.quantize_head, eager, head, ({"copy": 4 * D * V},), bitwise=True)


def transpose_cases(s: Sizes) -> Iterator[Case]:
    D, V = s.model.dim, s.model.vocab_padded
    for name, passes in ("transpose_copy", 2), ("transpose_add", 3):
        costs = ({"copy": passes * D * V * s.model.dtype.itemsize},)
        both = lambda: [s.randn(D, V), s.randn(V, D)]  # noqa: E731
        yield Case(name, *pair(name), both, costs, mutates=True, bitwise=True)


OPS = {  # cases, and whether they depend on the stage
    "attention": (attention_cases, True),
    "dc": (dc_cases, True),
    "head": (head_cases, True),
    "mlp": (mlp_cases, True),
    "products": (products_cases, True),
    "gates": (gates_cases, True),
    "pointwise": (pointwise_cases, True),
    "lookup": (lookup_cases, True),
    "symmetric": (symmetric_cases, False),
    "updates": (update_cases, False),
    "weights": (weight_cases, False),
    "transposes": (transpose_cases, False),
    "optimizer": (lambda s: (), False),  # of the parts above, see optimizer_rows
}


# === Checking ===


def outputs(op: Callable, inputs: list[Tensor]) -> list[Tensor]:
    out = op(*inputs)
    return [out] if isinstance(out, Tensor) else [y for y in out or () if y is not None]


def results(op: Callable, inputs: list[Tensor], case: Case) -> list[Tensor]:
    """What `op` returns, its inputs where it changes them, and all gradients where it has them."""
    if case.mutates:
        inputs = [x.clone() for x in inputs]
        return outputs(op, inputs) + inputs
    if len(case.costs) == 1:
        return outputs(op, inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, generator = outputs(op, leaves), torch.Generator(leaves[0].device).manual_seed(0)
    weights = [torch.randn(y.shape, generator=generator, device=y.device).bfloat16().to(y.dtype) for y in out]
    return [y.detach() for y in out] + list(torch.autograd.grad(out, leaves, weights))


def trial(case: Case) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each result of the op, of the reference in the same precision and, unless bits are compared, in fp64."""
    inputs = case.inputs()
    both = [results(op, inputs, case) for op in (case.op, case.reference)]
    wide = [] if case.bitwise else [results(case.exact or case.reference, [x.double() for x in inputs], case)]
    return list(zip(*both, *wide))


def disagreement(case: Case) -> str:
    """Empty where op and reference agree, else which result errs by how much."""
    trials = [trial(case)]
    if case.bitwise:
        same = [torch.equal(*(y.reshape(-1).view(torch.uint8) for y in ys)) for ys in trials[0]]
        return "" if all(same) else f"result {same.index(False)} is not the reference's to the bit"
    if any(got.numel() == 1 for got, *_ in trials[0]):  # a sum that nearly cancels has no size to compare an error with
        trials += [trial(case) for _ in range(7)]
    for i, same in enumerate(zip(*trials)):
        y, low, exact = map(torch.stack, zip(*same))
        unit, largest = torch.finfo(low.dtype).eps, exact.abs().max().item()
        error, allowed = ((x.double() - exact).abs().max().item() for x in (y, low))
        if not error <= 2 * allowed + 2 * unit * largest:  # nor is a NaN
            return f"result {i} errs by {error:.3g}, the reference in the same precision by {allowed:.3g}"
    return ""


# === Timing ===


def time_us(op: Callable, case: Case, backward: bool = False, replays: int = 12) -> float:
    """Median of CUDA graph replays, us a call; a graph holds one call for each set of inputs."""

    def call() -> Callable:
        inputs = case.inputs()
        if not backward:
            return partial(op, *inputs)
        leaves = [x.detach().requires_grad_() for x in inputs]
        weights = [torch.randn_like(y) for y in outputs(op, leaves)]
        return lambda: torch.autograd.grad(outputs(op, leaves), leaves, weights)

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.set_grad_enabled(backward):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls = [call() for _ in range(case.sets)]
            for run in calls:
                run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for run in calls:
                run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return 1000 * median(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) / case.sets / case.calls


def ceilings(fp8: bool) -> dict[str, float]:
    """Bytes or FLOPs a second of this GPU: a large copy, large products.

    Straight on the stream: as a graph's only node a copy once read 2.6 TB/s on an H200 that copies at 4.2. The products
    come first, so that the clocks are up.
    """
    x, cell = torch.randn(8192, 8192, device="cuda").bfloat16(), torch.ones((), device="cuda")
    big = x.repeat(8, 1)
    ops = {"bf16": (lambda: x @ x, 2 * 8192**3)}
    if fp8:
        x8 = x.to(kernels.E4M3)
        multiply = partial(torch._scaled_mm, x8, x8.T, cell, cell, out_dtype=x.dtype, use_fast_accum=True)
        ops["fp8"] = multiply, 2 * 8192**3
    ops["copy"] = partial(torch.empty_like(big).copy_, big), 2 * big.nbytes
    rates = {}
    for name, (op, amount) in ops.items():
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(81)]
        for mark in marks:
            op()
            mark.record()
        torch.cuda.synchronize()
        rates[name] = amount / median(a.elapsed_time(b) / 1e3 for a, b in zip(marks[30:], marks[31:]))
    return rates


def product_us(s: Sizes) -> tuple[float, float]:
    """(FLOPs, us) of all products of Polar Express, at the rate of torch's X <- step X for each bank."""
    flops = us = 0.0
    for B, R, C in banks(s).values():
        size, other = min(R, C), max(R, C)
        inputs = lambda B=B, size=size, other=other: [s.randn(B, size, size), s.randn(B, size, other)]  # noqa: E731
        once = time_us(torch.bmm, Case("", torch.bmm, torch.bmm, inputs, (), sets=4))
        whole = 2 * B * size * size * other
        needed = len(kernels.POLAR_EXPRESS) * (1.5 * whole + B * size**3)  # X X^T and the step's A A^T: one triangle
        flops, us = flops + needed, us + once * needed / whole
    return flops, us


def update_bytes(optimizer: train_gpt.NorMuonAndAdam, do_adam: bool) -> int:
    """What a step must move besides the products' operands. The few fp32 parameters count like the others."""
    matrices = sum(MOVED.values()) - MOVED["adam_update_"]
    tied, total = do_adam and not optimizer.split, 0
    for label, state in optimizer.states.items():
        updated = (do_adam or not state.is_adam) and not (tied and label == "embed")
        total += updated * state.param.numel() * (MOVED["adam_update_"] + MOVED["zero"] if state.is_adam else matrices)
    embed = optimizer.states["embed"].param
    return total + tied * embed.numel() * (MOVED["zero"] + 5 * embed.element_size())  # transpose_add, transpose_copy


def optimizer_rows(s: Sizes, copy_rate: float) -> Iterator[str]:
    """A whole step of one GPU, without the upload of its numbers."""
    params = {
        label: torch.nn.Parameter(s.randn(*row.shape, scale=0.02, dtype=row.dtype))
        for label, row in train_gpt.parameter_plan(s.model).items()
    }
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer = train_gpt.NorMuonAndAdam(params)
    optimizer.step(do_adam=True)
    optimizer._fill_hyper = lambda *_: None  # a graph would upload what the host no longer holds
    flops, products = product_us(s)
    for kind in ("even", "odd, tied", "odd, split"):
        do_adam = kind != "even"
        if kind == "odd, split":
            optimizer.split_embed()
        us = time_us(partial(optimizer.step, do_adam=do_adam), Case("", outputs, outputs, list, ()))
        moved = update_bytes(optimizer, do_adam)
        copies = 1e6 * moved / copy_rate
        yield (
            f"optimizer, {kind + ' step:':17}{us:8.0f} us is {us / (products + copies):.2f} (at most 1.50) times "
            f"{products:.0f} us, {flops / 1e12:.2f} TFLOP of products, + {copies:.0f} us, {moved / 1e9:.2f} GB"
        )


def timed_rows(case: Case, s: Sizes, peak: dict[str, float]) -> Iterator[str]:
    for backward, cost in enumerate(case.costs):
        us = time_us(case.op, case, bool(backward))
        try:
            against = us / time_us(case.torch or case.reference, case, bool(backward))
        except RuntimeError:  # no memory for it, or no graph can hold it
            against = math.nan
        v3 = us / V3_US[case.name][s.stage][backward] if case.name in V3_US else math.nan
        share = sum(1e6 * amount / peak[rate] for rate, amount in cost.items()) / case.calls / us
        achieved = f"{sum(cost.values()) / case.calls / us / 1e6:.2f} {'TB/s' if 'copy' in cost else 'TFLOP/s'}"
        ratios = "".join(f"{'-' if math.isnan(x) else f'{x:.2f}':>7}" for x in (against, v3))
        yield f"{case.name + ' + backward' * backward:32}{s.stage:>6}{us:>10.1f}{achieved:>16}{share:>9.0%}{ratios}"


# === Command line ===


def check(name: str, s: Sizes) -> bool:
    """Compare every case of an operation with its reference; say what disagrees."""
    problems = {case.name: disagreement(case) for case in OPS[name][0](s)}
    for case, problem in problems.items():
        if problem:
            print(f"{case} is wrong, so {name} is not timed: {problem}.", flush=True)
    return not any(problems.values())


def run(names: list[str], only_check: bool) -> int:
    """Exit code 0, or 1 where an operation is wrong."""
    cfg, fp8 = train_gpt.parse_options([]), torch.cuda.get_device_capability() >= (8, 9)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {kernels.triton.__version__}")
    right = [name for name in names if check(name, Sizes.of(cfg, 0, T=2064, fp8=fp8))]
    print(f"agree with their references: {', '.join(right) or 'none'}", flush=True)
    if right and not only_check:
        peak = ceilings(fp8)
        print(f"ceilings: {', '.join(f'{name} {rate / 1e12:.2f} T/s' for name, rate in peak.items())}\n{HEADING}")
        for name in right:
            cases, per_stage = OPS[name]
            for stage in range(3 if per_stage else 1):
                s = Sizes.of(cfg, stage, fp8=fp8)
                for case in cases(s):
                    print(*timed_rows(case, s, peak), sep="\n", flush=True)
        if "optimizer" in right:
            print(*optimizer_rows(Sizes.of(cfg, 0), peak["copy"]), sep="\n", flush=True)
        print(LEGEND)
    return 0 if right == names else 1


def main(argv: list[str]) -> int:
    """Exit code 2, after one sentence on stderr, where nothing can be measured."""
    parser = argparse.ArgumentParser(prog="ops.py", description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="operation", help=", ".join(OPS))
    parser.add_argument("--check", action="store_true", help="compare with the references, time nothing")
    args, problem = parser.parse_args(argv), ""
    if unknown := [name for name in args.ops if name not in OPS]:
        problem = f"no operation is called {unknown[0]}: choose among {', '.join(OPS)}."
    elif not torch.cuda.is_available():
        problem = "kernels are timed on a GPU and this machine shows none: ./run.sh test interprets them on the CPU."
    elif kernels.REFERENCE_OPS:
        problem = "REFERENCE_OPS=1 leaves no kernel to time: unset it."
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return run(args.ops or list(OPS), args.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
