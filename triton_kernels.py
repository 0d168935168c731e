"""triton_kernels.py: the trainer's GPU kernels. Every operation is a triple, but for `product` and `linear`, whose
reference is torch's own product, `quantize_head`, whose reference is two lines of it, `flash_attention`, which hands on
to others' kernels, and `fan` and `leading`, which only route gradients:

    op_reference  eager torch, on any device, in its inputs' dtype up to fp64; fp32 or better inside for 16-bit inputs
    _op_kernel    Triton
    op            checks its inputs (ValueError with rule, value and remedy) and hands CUDA tensors to the kernel, all
                  others to the reference; REFERENCE_OPS=1 asks for the references everywhere

Sums are fp32 and rounded once; nothing is atomic, so the same inputs give the same bits. Launches that the model
reaches are custom operations (speedrun::...), into which torch.compile does not look. Numbers that change from step to
step are run-time arguments or device tensors: nothing recompiles, captured graphs stay valid. Launch settings stand in
tables named *_TILES, keyed by what decides them, with their source. dc_triton_kernels.py holds the DC correction.

Jump with: grep -n '^# === ' triton_kernels.py
  Common                               Triton where there is one, dispatch, checks, cards, alignment
  Attention                            causal, sliding window, packed documents; paired heads; torch's own; a probe
  Pointwise                            residual mixing with its norm, injections, smear, norm and rotary, XSA, values
  Lookup                               rows of tables, gradients added in place
  Symmetric products                   X X^T, X^T X, b A + c A A^T, Polar Express
  Linear + relu2 and FP8 quantization  quantized weights and activations, products, attention's heads, the MLP
  Gates                                per-token coefficients of two small layers, forward and backward
  Optimizer updates                    Adam, NorMuon's momentum, variance normalization, cautious update, folded lambdas
  Head                                 softcapped multi-token cross-entropy in FP8 or not, evaluation loss
  Transposes                           transpose_copy, transpose_add

Shape letters: T packed tokens, D model dim, N heads, H head dim, F mlp dim, V vocabulary, S document boundaries, K
multi-token weights or mixed streams, B matrices in a bank, R rows, C columns.
"""

import itertools
import math
import os
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
except ImportError:  # macOS and bare CPU installs: the references still work
    triton, tl, TensorDescriptor, jit = None, SimpleNamespace(constexpr=int), None, lambda fn: fn

# === Common ===

REFERENCE_OPS = os.environ.get("REFERENCE_OPS", "0").lower() not in ("", "0", "false", "off")
FORCE_KERNELS = False  # tests set it to run the kernels on CPU tensors under TRITON_INTERPRET=1
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def use_kernel(*tensors: Tensor) -> bool:
    """True where the Triton kernel should run: CUDA tensors, unless REFERENCE_OPS=1 asks for the references."""
    return FORCE_KERNELS or (not REFERENCE_OPS and all(t.is_cuda for t in tensors))


def require(condition: bool, message: str) -> None:
    """Raise ValueError(message) unless `condition`; the message gives rule, value and remedy in one sentence."""
    if not condition:
        raise ValueError(message)


def _kind(x) -> str:
    """For messages: a tensor's shape and dtype (its numbers would cost a sync), anything else as it is."""
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)


def _is_number(x) -> bool:
    """A floating-point tensor of one element, which adds no dimension to a (T, D) that it multiplies."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.numel() == 1 and x.dim() <= 2


def _require_one_device(*inputs) -> None:
    """One device for all inputs that are tensors: a launch follows their pointers there."""
    devices = [x.device for x in inputs if isinstance(x, Tensor)]
    require(all(device == devices[0] for device in devices),
            f"all inputs must be on {devices[0]}, not {[str(device) for device in devices]}: move them there")


@lru_cache
def card_of(device: torch.device) -> tuple[str, int]:
    """("large" or "small", multiprocessors). Large: Hopper and B200, with over 200 KB of shared memory for a block and
    a copy engine that fetches tiles by descriptor."""
    if device.type != "cuda":
        return "large", 2  # interpreted: two programs walk all tiles
    card = torch.cuda.get_device_properties(device)
    return "large" if card.shared_memory_per_block_optin > 200 << 10 else "small", card.multi_processor_count


def round_up(size: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit


def aligned_empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, on `like`'s device; every row starts at a 16-byte boundary, as the copy engine wants it."""
    dtype, columns = dtype or like.dtype, shape[-1]
    return like.new_empty(*shape[:-1], round_up(columns, 16 // dtype.itemsize), dtype=dtype)[..., :columns]


def aligned(x: Tensor) -> Tensor:
    """x itself where its rows are dense and start at 16-byte boundaries, else such a copy of it."""
    unit = 16 // x.element_size()
    *outer, inner = x.stride()
    if inner == 1 and x.data_ptr() % 16 == 0 and all(s and s % unit == 0 for s in outer):
        return x
    return aligned_empty(x, *x.shape).copy_(x)


@jit
def _to_fp8(x, LIMIT: tl.constexpr):
    """Saturating cast (NaN stays NaN) of fp32 to e4m3 or e5m2, told apart by their largest values."""
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(tl.float8e4nv if LIMIT == 448.0 else tl.float8e5)


# === Attention ===
# Packed stream of L positions (L = T, or 2T when paired) · N heads of the stream · H head dim · S document boundaries.
# A query at t may look at the keys first[t] <= s <= t, first[t] = max(start of its document, t - window). `first` never
# decreases, so one number per query is the whole mask, and a tile's bounds are those of its first and last row.


def _attention_first_key(cu_seqlens, length, window, streams=1):
    """(length,) int: the first key that each stream position may look at; a token is `streams` positions."""
    t = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    bounds = cu_seqlens * streams
    start = bounds[torch.searchsorted(bounds, t, right=True) - 1]  # the last of equal boundaries: empty documents
    return torch.maximum(start, t - window)


def attention_reference(q, k, v, cu_seqlens, *, window, scale, paired=False, share=False):
    """What `attention` computes, in eager torch (fp32 inside for 16-bit inputs): blocks of queries, each against the
    blocks of keys that its window can reach, so memory is O(T x (window + block)). Differentiable by plain autograd."""
    T, N, H = q.shape
    length, heads = (2 * T, N // 2) if paired else (T, N)
    window = min(window, length)
    block = min(max(32, 1 << (window // 4).bit_length()), length)
    blocks, back = -(-length // block), -(-window // block)
    inner = torch.promote_types(q.dtype, torch.float32)

    def cut(x, before):  # (T, N, H) -> (before + blocks, heads, block, H), with zeros before and after the stream
        x = x.to(inner).reshape(length, heads, H)
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, before * block, blocks * block - length))
        return x.view(before + blocks, block, heads, H).transpose(1, 2)

    def band(x):  # every block behind the `back` blocks before it: (blocks, heads, (back + 1) * block, H)
        x = cut(x, back)
        return torch.cat([x[i:i + blocks] for i in range(back + 1)], 2)

    t = torch.arange(blocks * block, device=q.device, dtype=cu_seqlens.dtype).view(blocks, 1, block, 1)
    first = _attention_first_key(cu_seqlens, blocks * block, window, 2 if paired else 1).view_as(t)
    s = t[:, :, :1] + torch.arange(-back * block, block, device=q.device, dtype=cu_seqlens.dtype)
    mask = torch.where((s < first) | (s > t), -math.inf, 0.0)
    y = torch.softmax((cut(q, 0) * scale) @ band(k).mT + mask, -1) @ band(v)
    y = y.transpose(1, 2).reshape(blocks * block, heads, H)[:length].reshape(T, N, H).to(q.dtype)
    return (y, q, k, v) if share else y


@jit
def _attention_bounds_kernel(cu_ptr, first_ptr, after_ptr, window, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """One document. first[t]: the first key that query t may look at; after[t]: one past the last query that may look
    at key t."""
    start = tl.load(cu_ptr + tl.program_id(0)) * STREAMS
    end = tl.load(cu_ptr + tl.program_id(0) + 1) * STREAMS
    for t0 in range(start, end, BLOCK):
        t = t0 + tl.arange(0, BLOCK)
        tl.store(first_ptr + t, tl.maximum(start, t - window), mask=t < end)
        tl.store(after_ptr + t, tl.minimum(end, t + window + 1), mask=t < end)


@jit
def _attention_inside(start, low, high, BLOCK: tl.constexpr):
    """(rows, BLOCK): low <= start + column <= high as one comparison, what lies below `low` being a large unsigned
    number. (Rows past the end have high < low, see everything, and are never stored.)"""
    above = (start + tl.arange(0, BLOCK))[None, :] - low[:, None]
    return above.to(tl.uint32) <= (high - low).to(tl.uint32)[:, None]


@jit
def _attention_held(x, ROWS: tl.constexpr, H: tl.constexpr):
    """x itself, (ROWS, H), laid out over the registers as a product's result is: as the left operand of products in a
    loop it then stays there. From shared memory every product would read it again, with 32 keys twice the bytes of the
    keys: a fifth of dq's time on an H200. The product that gives the layout is of zeros, a quarter of what an iteration
    of the forward pass multiplies. Not for narrow heads: ptxas 12.8 overwrites registers held so (seen at 32)."""
    if H < 64:
        return x
    zero = tl.dot(tl.zeros((ROWS, 16), x.dtype), tl.zeros((16, H), x.dtype), input_precision="ieee")
    return (x.to(tl.float32) + zero).to(x.dtype)


@jit
def _attention_forward_kernel(
    q_desc, k_desc, v_desc, y_desc, lse_ptr, first_ptr, length, scale,
    H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, RUNNING_MAX: tl.constexpr,
):
    """One tile of queries of one head. Writes y and lse (base 2, of the scaled logits)."""
    head, t0 = tl.program_id(0), tl.program_id(1) * BLOCK_T
    pitch = tl.cdiv(length, 4) * 4  # of the rows of lse and delta
    t = t0 + tl.arange(0, BLOCK_T)
    q = _attention_held(q_desc.load([t0, head * H]), BLOCK_T, H)
    first = tl.load(first_ptr + t, mask=t < length, other=0)
    scale *= 1.4426950408889634  # log2(e): exponentials are powers of two
    # Finite, so that a row none of whose keys has come yet gives exp2(-inf - finite) = 0 rather than NaN.
    largest = tl.full((BLOCK_T,), -1e30 if RUNNING_MAX else 0.0, tl.float32)
    total = tl.zeros((BLOCK_T, BLOCK_S), tl.float32)  # summed along the keys once, at the end
    y = tl.zeros((BLOCK_T, H), tl.float32)
    common = tl.load(first_ptr + tl.minimum(t0 + BLOCK_T, length) - 1)  # from here to t0 every query sees every key
    begin, end = tl.load(first_ptr + t0) // BLOCK_S * BLOCK_S, tl.minimum(t0 + BLOCK_T, length)
    for s0 in range(begin, end, BLOCK_S):
        logit = tl.dot(q, k_desc.load([s0, head * H]).T, input_precision="ieee")
        if RUNNING_MAX:
            logit = tl.where(_attention_inside(s0, first, t, BLOCK_S), logit, float("-inf"))
            larger = tl.maximum(largest, tl.max(logit, 1) * scale)
            shrink = tl.exp2(largest - larger)[:, None]
            largest, total, y = larger, total * shrink, y * shrink
            p = tl.exp2(logit * scale - larger[:, None])
        else:
            p = tl.exp2(logit * scale)
            if (s0 < common) | (s0 + BLOCK_S > t0 + 1):
                p = tl.where(_attention_inside(s0, first, t, BLOCK_S), p, 0.0)
        total += p
        v = v_desc.load([s0, head * H])
        y = tl.dot(p.to(v.dtype), v, y, input_precision="ieee")
    total = tl.sum(total, 1)
    y_desc.store([t0, head * H], (y * (1 / total)[:, None]).to(y_desc.dtype))
    tl.store(lse_ptr + head * pitch + t, largest + tl.log2(total), mask=t < pitch)


@jit
def _attention_dq_kernel(
    q_desc, k_desc, v_desc, y_desc, dy_desc, dq_desc, dq_more_desc, lse_ptr, delta_ptr, first_ptr, length, scale,
    H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """dq of one tile of queries of one head; leaves delta = sum of y * dy per row for the kernel below. dq_more, unless
    None, is where the sum starts."""
    head, t0 = tl.program_id(0), tl.program_id(1) * BLOCK_T
    pitch = tl.cdiv(length, 4) * 4
    t = t0 + tl.arange(0, BLOCK_T)
    q, dy = _attention_held(q_desc.load([t0, head * H]), BLOCK_T, H), dy_desc.load([t0, head * H])
    delta = tl.sum(y_desc.load([t0, head * H]).to(tl.float32) * dy.to(tl.float32), 1)
    tl.store(delta_ptr + head * pitch + t, delta, mask=t < pitch)
    lse = tl.load(lse_ptr + head * pitch + t, mask=t < length, other=0.0)
    first = tl.load(first_ptr + t, mask=t < length, other=0)
    dq = tl.zeros((BLOCK_T, H), tl.float32)
    if dq_more_desc is not None:
        dq += dq_more_desc.load([t0, head * H]).to(tl.float32) / scale
    common = tl.load(first_ptr + tl.minimum(t0 + BLOCK_T, length) - 1)  # from here to t0 every query sees every key
    begin, end = tl.load(first_ptr + t0) // BLOCK_S * BLOCK_S, tl.minimum(t0 + BLOCK_T, length)
    for s0 in range(begin, end, BLOCK_S):
        k, v = k_desc.load([s0, head * H]), v_desc.load([s0, head * H])
        logit = tl.dot(q, k.T, input_precision="ieee")
        dp = tl.dot(dy, v.T, input_precision="ieee")
        p = tl.exp2(logit * (scale * 1.4426950408889634) - lse[:, None])
        if (s0 < common) | (s0 + BLOCK_S > t0 + 1):
            p = tl.where(_attention_inside(s0, first, t, BLOCK_S), p, 0.0)
        dq = tl.dot((p * (dp - delta[:, None])).to(k.dtype), k, dq, input_precision="ieee")
    dq_desc.store([t0, head * H], (dq * scale).to(dq_desc.dtype))


@jit
def _attention_dkv_kernel(
    q_desc, k_desc, v_desc, dy_desc, dk_desc, dv_desc, dk_more_desc, dv_more_desc, lse_desc,
    delta_desc, after_ptr, length, scale,
    H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):
    """dk and dv of one tile of keys of one head. Scores are kept transposed, (keys, queries), so that every product
    takes its left operand from registers or from the resident tile. lse and delta come through the copy engine like
    the tiles do, which is a tenth faster; past the end they are another head's, finite and masked. dk_more and
    dv_more, unless None, are where the sums start."""
    head, s0 = tl.program_id(0), tl.program_id(1) * BLOCK_S
    pitch = tl.cdiv(length, 4) * 4
    s = s0 + tl.arange(0, BLOCK_S)
    k, v = k_desc.load([s0, head * H]), v_desc.load([s0, head * H])
    after = tl.load(after_ptr + s, mask=s < length, other=0)
    dk = tl.zeros((BLOCK_S, H), tl.float32)
    dv = tl.zeros((BLOCK_S, H), tl.float32)
    if dk_more_desc is not None:
        dk += dk_more_desc.load([s0, head * H]).to(tl.float32) / scale
    if dv_more_desc is not None:
        dv += dv_more_desc.load([s0, head * H]).to(tl.float32)
    common = tl.load(after_ptr + s0)  # queries between the tile and this one see all of its keys
    begin, end = s0 // BLOCK_T * BLOCK_T, tl.load(after_ptr + tl.minimum(s0 + BLOCK_S, length) - 1)
    for t0 in range(begin, end, BLOCK_T):
        lse, delta = lse_desc.load([head * pitch + t0]), delta_desc.load([head * pitch + t0])
        q = q_desc.load([t0, head * H])
        p = tl.exp2(tl.dot(k, q.T, input_precision="ieee") * (scale * 1.4426950408889634) - lse[None, :])
        if (t0 + 1 < s0 + BLOCK_S) | (t0 + BLOCK_T > common):
            p = tl.where(_attention_inside(t0, s, after - 1, BLOCK_T), p, 0.0)
        dy = dy_desc.load([t0, head * H])
        dv = tl.dot(p.to(dy.dtype), dy, dv, input_precision="ieee")
        dp = tl.dot(v, dy.T, input_precision="ieee")
        dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk, input_precision="ieee")
    dk_desc.store([s0, head * H], (dk * scale).to(dk_desc.dtype))
    dv_desc.store([s0, head * H], dv.to(dv_desc.dtype))


# Logits within +-60 need no maximum taken off: e^60 times any number of keys fits fp32, and e^-60 keeps its relative
# precision in fp32 and bf16. fp16 overflows at e^11, so there the running maximum always stays.
ATTENTION_SAFE_LOGIT = 60.0
# By card and kernel; BLOCK_T queries, BLOCK_S keys. "large": the best of some twenty settings each on an H200 at
# T = 16384 .. 49152, heads of 128, windows 128 .. 1408 (2026-11-30, torch 2.11, Triton 3.6), where small blocks, two
# or three to a multiprocessor, hide each other's waits. "small": what fits 99 KB and 255 registers; not timed.
ATTENTION_TILES = {
    ("large", "forward"): dict(BLOCK_T=64, BLOCK_S=32, num_warps=4, num_stages=3),
    ("large", "dq"): dict(BLOCK_T=64, BLOCK_S=32, num_warps=4, num_stages=3),
    ("large", "dkv"): dict(BLOCK_T=64, BLOCK_S=64, num_warps=4, num_stages=2),
    ("small", "forward"): dict(BLOCK_T=32, BLOCK_S=32, num_warps=4, num_stages=2),
    ("small", "dq"): dict(BLOCK_T=64, BLOCK_S=32, num_warps=4, num_stages=2),
    ("small", "dkv"): dict(BLOCK_T=32, BLOCK_S=64, num_warps=8, num_stages=2),
} | {("wide", name): dict(BLOCK_T=32, BLOCK_S=32, num_warps=4, num_stages=1) for name in ("forward", "dq", "dkv")}


def _attention_tiles(q, name):
    """A row of ATTENTION_TILES; "wide" is for heads of more than 256 bytes."""
    if q.shape[2] * q.element_size() > 256:
        return ATTENTION_TILES["wide", name]
    return ATTENTION_TILES[card_of(q.device)[0] if q.is_cuda and q.element_size() == 2 else "small", name]


def _launch_attention(kernel, tiles, matrices, arrays, H, scale, **options):
    """Launch one program for each head and tile: tiles of queries, or of keys where the kernel is the one for dk, dv.
    `matrices`: (matrix or vector, "t" or "s" for the rows of its tiles) in the order of the kernel's descriptors; a
    missing one is None."""
    rows = {"t": tiles["BLOCK_T"], "s": tiles["BLOCK_S"]}
    length, width = matrices[0][0].shape
    grid = width // H, triton.cdiv(length, rows["s" if kernel is _attention_dkv_kernel else "t"])
    descriptors = [x if x is None else TensorDescriptor.from_tensor(x, [rows[kind], H][:x.dim()])
                   for x, kind in matrices]
    kernel[grid](*descriptors, *arrays, length, scale, H=H, **tiles, **options)


@torch.library.custom_op("speedrun::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, window: int, scale: float, paired: bool, running_max: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y (T, N, H), and what the backward pass wants: lse (heads, L rounded up to the copy engine's 4 numbers) and
    bounds (2, L) of the stream's positions."""
    y, lse, bounds = _attention_empty_results(q, k, v, cu_seqlens, window, scale, paired, running_max)
    H, length, (first, after) = q.shape[2], bounds.shape[1], bounds
    _attention_bounds_kernel[(len(cu_seqlens) - 1,)](
        cu_seqlens.contiguous(), first, after, min(window, length), STREAMS=1 + paired, BLOCK=1024)
    tiles = _attention_tiles(q, "forward")
    q, k, v = (aligned(x.reshape(length, -1)) for x in (q, k, v))
    _launch_attention(_attention_forward_kernel, tiles,
                      [(q, "t"), (k, "s"), (v, "s"), (y.view(length, -1), "t")], [lse, first], H, scale,
                      RUNNING_MAX=running_max)
    return y, lse, bounds


@attention_forward.register_fake
def _attention_empty_results(q, k, v, cu_seqlens, window, scale, paired, running_max):
    T, N, H = q.shape
    heads, length = N // (1 + paired), T * (1 + paired)
    lse = q.new_empty(heads, round_up(length, 4), dtype=torch.float32)
    return q.new_empty(T, N, H), lse, lse.new_empty(2, length, dtype=torch.int32)


@torch.library.custom_op("speedrun::attention_backward", mutates_args=())
def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, bounds: Tensor, scale: float, paired: bool,
    dq_more: Tensor | None = None, dk_more: Tensor | None = None, dv_more: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv (T, N, H), each with what more there is of it. Two kernels, no atomics: same inputs, same bits."""
    grads = _attention_empty_gradients(dy, q, k, v, y, lse, bounds, scale, paired)
    H, length, (first, after), delta = q.shape[2], bounds.shape[1], bounds, torch.empty_like(lse)
    dq_tiles, dkv_tiles = (_attention_tiles(q, name) for name in ("dq", "dkv"))
    q, k, v, y, dy, dq_more, dk_more, dv_more = (
        x if x is None else aligned(x.reshape(length, -1)) for x in (q, k, v, y, dy, dq_more, dk_more, dv_more))
    dq, dk, dv = (x.view(length, -1) for x in grads)
    _launch_attention(_attention_dq_kernel, dq_tiles,
                      [(q, "t"), (k, "s"), (v, "s"), (y, "t"), (dy, "t"), (dq, "t"), (dq_more, "t")],
                      [lse, delta, first], H, scale)
    _launch_attention(_attention_dkv_kernel, dkv_tiles,
                      [(q, "t"), (k, "s"), (v, "s"), (dy, "t"), (dk, "s"), (dv, "s"), (dk_more, "s"),
                       (dv_more, "s"), (lse.view(-1), "t"), (delta.view(-1), "t")], [after], H, scale)
    return grads


@attention_backward.register_fake
def _attention_empty_gradients(dy, q, k, v, y, lse, bounds, scale, paired, dq_more=None, dk_more=None,
                               dv_more=None):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, window, scale, paired, running_max, share):
        ctx.set_materialize_grads(False)
        y, lse, bounds = attention_forward(q, k, v, cu_seqlens, window, scale, paired, running_max)
        ctx.save_for_backward(q, k, v, y, lse, bounds)
        ctx.scale, ctx.paired = scale, paired
        return (y, *(x.view_as(x) for x in (q, k, v))) if share else y

    @staticmethod
    def backward(ctx, dy, *more):
        grads = more or (None, None, None)
        if dy is not None:
            grads = attention_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.paired, *more)
        return *grads, None, None, None, None, None, None


def attention(q, k, v, cu_seqlens, *, window: int, scale: float, paired: bool = False, max_logit: float = math.inf,
              share: bool = False):
    """Causal attention inside packed documents: each query looks at itself and at most `window` keys before it.

    q, k, v    (T, N, H), one floating-point dtype; the kernels want bf16, fp16 or fp32 and H a power of two, 16 to 256
    cu_seqlens (S,) int32, token positions where documents begin: [0] is 0, never decreasing, padded with T at the end;
               equal boundaries are empty documents. Its contents are not checked, which would cost a device sync.
    window     in stream positions: key s is allowed to query t iff in the same document and 0 <= t - s <= window
    scale      of the logits, positive
    paired     token i becomes the stream positions 2i (heads 0 .. N/2-1) and 2i + 1 (heads N/2 .. N-1), which look at
               each other as N/2 heads of a stream of 2T positions; documents stretch with it, `window` does not
    max_logit  a promise that |scale * q . k| is never larger: up to 60 (ATTENTION_SAFE_LOGIT) the kernel takes the
               exponentials as they are, with no running maximum: a forward pass 8 to 16% faster. A broken promise gives
               infinities. RMS-normed q and k without gains have at most scale * H (times sqrt(2) with the key offset)
    share      also return q, k and v, to be read instead of them from there on: the backward pass then adds their
               gradients to its own before the one rounding, where autograd would add the two with a pass of its own

    Returns y (T, N, H), contiguous, in q's dtype, or (y, q, k, v). Gradients reach q, k, v and are bitwise repeatable.
    Inputs whose rows are not H-contiguous, or paired ones whose tokens are not N*H-contiguous, are copied first. Raises
    ValueError.
    """
    T, N, H = q.shape if q.dim() == 3 else (0, 0, 0)
    require(T > 0 and q.shape == k.shape == v.shape,
            f"q, k and v must share one non-empty shape (T, N, H), not {[tuple(x.shape) for x in (q, k, v)]}: reshape")
    require(q.dtype == k.dtype == v.dtype and q.is_floating_point(),
            f"q, k and v must share one floating-point dtype, not {[str(x.dtype) for x in (q, k, v)]}: cast them alike")
    require(cu_seqlens.dim() == 1 and len(cu_seqlens) >= 2 and cu_seqlens.dtype == torch.int32,
            f"cu_seqlens must be (S,) int32 with S >= 2, not {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}: cast it")
    _require_one_device(q, k, v, cu_seqlens)
    require(isinstance(window, int) and window >= 0,
            f"window must be an int of at least 0, not {_kind(window)}: 0 lets each query see only itself")
    require(scale > 0, f"scale must be positive, not {scale}: negate q instead")
    require(not paired or N % 2 == 0, f"paired attention needs an even number of heads, not {N}: pass paired=False")
    if not use_kernel(q, k, v):
        return attention_reference(q, k, v, cu_seqlens, window=window, scale=scale, paired=paired, share=share)
    require(16 <= H <= 256 and H & (H - 1) == 0 and q.element_size() <= 4,
            f"the kernels take fp32, bf16 or fp16 heads of 16, 32, 64, 128 or 256, not {q.dtype} heads of {H}: "
            "use attention_reference (REFERENCE_OPS=1)")
    running_max = max_logit > ATTENTION_SAFE_LOGIT or q.dtype == torch.float16
    return _Attention.apply(q, k, v, cu_seqlens, window, scale, paired, running_max, share)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, window: int, scale: float, paired: bool, max_len: int,
    by: str = "torch",
) -> Tensor:
    """Others' kernels behind the signature of `attention`, for 16-bit q, k, v on a GPU: torch's variable-length
    FlashAttention-2 or, by="fa4", the package flash-attn-4, which must be installed. max_len: tokens of the longest
    document, at least. Raises ValueError for another `by`; shapes are theirs to check."""
    require(by in ("torch", "fa4"), f"by= is torch or fa4, not {by!r}: choose one")
    T, N, H = q.shape
    if paired:
        q, k, v = (x.reshape(2 * T, N // 2, H) for x in (q, k, v))
        cu_seqlens, max_len = 2 * cu_seqlens, 2 * max_len
    if by == "fa4":
        from flash_attn.cute import flash_attn_varlen_func

        y = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_len, max_seqlen_k=max_len,
            softmax_scale=scale, causal=True, window_size=(window, 0),
        )[0]
    else:
        y = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, max_len, max_len, 0.0, True, False,
            scale=scale, window_size_left=window, window_size_right=0,
        )[0]
    return y.view(T, N, H)


def probe_attention(device: torch.device, head_dim: int, dtype: torch.dtype) -> float:
    """Largest difference between kernel and reference, outputs and gradients, relative to the largest value; infinite
    where either gives what is no number. It runs the kernels that training does, those of bounded logits, where nothing
    of q, k and v is read again, where v is, and where all are."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(384, 6, head_dim, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    cu_seqlens = torch.tensor([0, 1, 130, 130, 384, 384], dtype=torch.int32, device=device)
    errors = []
    for paired, read in (True, slice(1)), (True, slice(0, None, 3)), (False, slice(None)):
        results = []
        for op in (partial(attention, max_logit=ATTENTION_SAFE_LOGIT), attention_reference):
            y, *again = op(*qkv, cu_seqlens, window=64, scale=0.1, paired=paired, share=True)
            loss = sum(x.float().square().sum() for x in (y, *again)[read])
            results.append([y.detach(), *torch.autograd.grad(loss, qkv)])
        errors += [(ours - exact).float().abs().max() / exact.float().abs().max() for ours, exact in zip(*results)]
    worst = torch.stack(errors).max().item()  # unlike Python's max, torch's hands a NaN on
    return worst if math.isfinite(worst) else math.inf


# === Pointwise ===
# T tokens · D model dim · N heads · H head dim · K streams. Everything is computed in fp32 and rounded once, on the way
# out. A program takes a few rows, whole, so most numbers are read once, and all are written once.

NORM_EPS = torch.finfo(torch.float32).eps  # 2**-23, for every dtype
# Rows of a program: the best of seven to ten tries on an H200 at D = 768, H = 128 (2026-11-30, Triton 3.6). A row
# within one warp needs no shared memory. A mix takes rows of BLOCK numbers together at once, in at most WAVES programs
# a multiprocessor, which walk them; STAGES: of a pipelined walk; HOLD: up to so many streams stay in registers.
POINTWISE_TILES = {
    "mix forward": dict(BLOCK=1024, WAVES=4096, STAGES=1, num_warps=1),
    "mix forward, peaks": dict(BLOCK=1024, WAVES=32, STAGES=1, num_warps=1),
    "mix backward": dict(BLOCK=1024, WAVES=16, STAGES=1, HOLD=3, num_warps=1),
    "injections forward": dict(ROWS=1, num_warps=1),
    "injections backward": dict(ROWS=1, CHUNK=256, num_warps=1),
    "smear forward": dict(BLOCK=1024, WAVES=4096, STAGES=1, num_warps=1),
    "smear backward": dict(BLOCK=1024, WAVES=8, STAGES=2, num_warps=1),
    "norm_rotary forward": dict(ROWS=16, num_warps=4),  # rows are heads from here on
    "norm_rotary backward": dict(ROWS=4, num_warps=1),
    "finish_heads forward": dict(ROWS=4, num_warps=1),
    "finish_heads backward": dict(ROWS=16, num_warps=4),
    "add_values forward": dict(BLOCK=1024, WAVES=4096, num_warps=1),  # tokens, as in a mix
    "add_values backward": dict(BLOCK=1024, WAVES=16, num_warps=1),
}
MIX_SCALARS_TILES = dict(BLOCK=4096, num_warps=8)
# Gates are columns of wider tensors: one kernel serves every column, whatever its alignment and the tensor's width.
_any_gate_jit = jit if triton is None else triton.jit(
    do_not_specialize=["coef_steps", "alpha_step", "gate_step"],
    do_not_specialize_on_alignment=["coefs", "alpha_ptr", "gate_ptr"])


@jit
def _pointwise_rms_scale(x, width):
    """1 / root mean square of each row."""
    return tl.rsqrt(tl.sum(x * x, 1) / width + 1.1920928955078125e-07)


def _pointwise_rows(x):
    """x where every token's numbers are contiguous, else a copy."""
    return x if x[0].is_contiguous() else x.contiguous()


# --- mix ---

class Scaled(NamedTuple):
    """A stream times a number, the multiplication left to the reader: `mix` makes it, `mix` reads it.

    Its gradient is the product's. From that the maker, who reads the stream in backward anyway, makes the number's. So
    only `mix` can make one (leave=): made by hand, it gets other gradients from the kernels than from the reference.
    """

    stream: Tensor  # the sum or, by the kernels, its norm where there is one: then the sum itself is never written
    by: Tensor  # one element or, with a norm, for each token the sum's root mean square times the number


def _mix_parts(coefs, streams):
    """Coefficients and streams, every Scaled taken apart."""
    return zip(*((s.by, s.stream) if isinstance(s, Scaled) else (c, s) for c, s in zip(coefs, streams)))


def mix_reference(coefs, streams, *, normed, keep_x=True, peaks=False, leave=None):
    """What `mix` computes, in eager torch (fp32 inside for 16-bit streams); n comes from the unrounded x."""
    coefs, streams = _mix_parts(coefs, streams)
    dtype = streams[0].dtype
    inner = torch.promote_types(dtype, torch.float32)
    x = None
    for c, s in zip(coefs, streams):
        c, s = s.new_ones((), dtype=inner) if c is None else c.to(inner), s.to(inner)
        c = c[:, None] if c.dim() == 1 else c
        x = c * s if x is None else torch.addcmul(x, c, s)
    n = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS).to(dtype) if normed else None
    x = x.to(dtype) if keep_x else None
    results = x if leave is None else Scaled(x, leave), n
    return (*results, n.detach().abs().amax().float()[None]) if peaks else results


@jit
def _mix_sum(coefs, streams, coef_steps, stream_steps, t, d, inside, T, K: tl.constexpr):
    """(rows, columns) fp32, the sum of every stream times its coefficient; and the streams' rows as they are stored. A
    scalar is a gate whose step is 0."""
    x = tl.zeros(inside.shape, tl.float32)
    rows = ()
    for k in tl.static_range(K):
        s = tl.load(streams[k] + t[:, None] * stream_steps[k] + d, mask=inside, other=0.0)
        rows = rows + (s,)
        if coefs[k] is None:
            x += s.to(tl.float32)
        else:
            c = tl.load(coefs[k] + t * coef_steps[k], mask=t < T, other=0.0).to(tl.float32)
            x += c[:, None] * s.to(tl.float32)
    return x, rows


@_any_gate_jit
def _mix_forward_kernel(
    x_ptr, n_ptr, peaks_ptr, scales_ptr, leave_ptr, coefs, streams, coef_steps, stream_steps, T,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Programs walk the rows together, ROWS at a time each; a missing (None) result is unwanted."""
    d = tl.arange(0, COLUMNS)[None, :]
    peak = tl.zeros((ROWS,), tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        t = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (t < T)[:, None] & (d < D)
        x, _ = _mix_sum(coefs, streams, coef_steps, stream_steps, t, d, inside, T, K)
        if x_ptr is not None:
            tl.store(x_ptr + t[:, None] * D + d, x.to(x_ptr.dtype.element_ty), mask=inside)
        if n_ptr is not None:
            scale = _pointwise_rms_scale(x, D)
            n = (x * scale[:, None]).to(n_ptr.dtype.element_ty)
            if scales_ptr is not None:
                tl.store(scales_ptr + t, 1.0 / scale, mask=t < T)
                tl.store(scales_ptr + T + t, tl.load(leave_ptr).to(tl.float32) / scale, mask=t < T)
            tl.store(n_ptr + t[:, None] * D + d, n, mask=inside)
            if peaks_ptr is not None:
                peak = tl.maximum(peak, tl.max(tl.abs(n.to(tl.float32)), 1))
    if peaks_ptr is not None:
        tl.store(peaks_ptr + tl.program_id(0), tl.max(peak, 0))


@_any_gate_jit
def _mix_backward_kernel(
    dx_ptr, dn_ptr, partials_ptr, coefs, streams, dcoefs, dstreams, coef_steps, stream_steps, T,
    K: tl.constexpr, D: tl.constexpr, SCALARS: tl.constexpr, BY_NORM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HOLD: tl.constexpr,
):
    """A missing (None) dx or dn is zero, a missing dcoef or dstream unwanted. Index K stands for the sum itself: where
    coefs has a number there, dx is the gradient of the sum times that number; dstreams[K] is the sum's gradient. Bit k
    of SCALARS: coefficient k is a scalar that wants a gradient; each program sums its rows' share of it into partials
    (K + 1, programs). BY_NORM: the one stream is n itself, its coefficient the root mean square of every row."""
    d = tl.arange(0, COLUMNS)[None, :]
    slot = tl.arange(0, 8)
    sums = tl.zeros((8,), tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        t = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        inside = (t < T)[:, None] & (d < D)
        at = t[:, None] * D + d
        x, rows = _mix_sum(coefs, streams, coef_steps, stream_steps, t, d, inside, T, K)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if dn_ptr is not None:
            if BY_NORM:
                scale, n = 1.0 / tl.load(coefs[0] + t, mask=t < T, other=1.0)[:, None], rows[0].to(tl.float32)
            else:
                scale = _pointwise_rms_scale(x, D)[:, None]
                n = x * scale
            dn = tl.load(dn_ptr + at, mask=inside, other=0.0).to(tl.float32)
            total = scale * (dn - n * (tl.sum(dn * n, 1) / D)[:, None])
        if dx_ptr is not None:
            dx = tl.load(dx_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if SCALARS >> K & 1:
                sums += tl.where(slot == K, tl.sum(tl.sum(dx * x, 1), 0), 0.0)
            if coefs[K] is not None:
                dx *= tl.load(coefs[K]).to(tl.float32)
            total += dx
        if dstreams[K] is not None:
            tl.store(dstreams[K] + at, total.to(dstreams[K].dtype.element_ty), mask=inside)
        for k in tl.static_range(K):
            if dcoefs[k] is not None or SCALARS >> k & 1:
                s = rows[k]
                if K > HOLD:
                    s = tl.load(streams[k] + t[:, None] * stream_steps[k] + d, mask=inside, other=0.0)
                dc = tl.sum(total * s.to(tl.float32), 1)
                if dcoefs[k] is not None:
                    tl.store(dcoefs[k] + t, dc.to(dcoefs[k].dtype.element_ty), mask=t < T)
                else:
                    sums += tl.where(slot == k, tl.sum(dc, 0), 0.0)
            if dstreams[k] is not None:
                c = tl.load(coefs[k] + t * coef_steps[k], mask=t < T, other=0.0).to(tl.float32)
                tl.store(dstreams[k] + at, (c[:, None] * total).to(dstreams[k].dtype.element_ty), mask=inside)
    if SCALARS:
        tl.store(partials_ptr + slot * tl.num_programs(0) + tl.program_id(0), sums, mask=slot <= K)


@jit
def _mix_scalars_kernel(partials_ptr, sums_ptr, parts, BLOCK: tl.constexpr):
    """The sum of each row of partials (rows, parts): what the programs of a backward kernel left."""
    k, total = tl.program_id(0), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partials_ptr + k * parts + at, mask=at < parts, other=0.0)
    tl.store(sums_ptr + k, tl.sum(total, 0))


def _steps(coefs):
    """From one token's coefficient to the next one's: 0 for scalars."""
    return tuple(0 if c is None or c.numel() == 1 else c.stride(0) for c in coefs)


def _mix_settings(name, s):
    """Programs and constants for streams like s."""
    (T, D), tiles = s.shape, dict(POINTWISE_TILES[name])
    columns = triton.next_power_of_2(D)
    rows = max(1, tiles.pop("BLOCK") // columns)
    programs = min(triton.cdiv(T, rows), card_of(s.device)[1] * tiles.pop("WAVES"))
    return programs, dict(tiles, ROWS=rows, COLUMNS=columns, D=D)


def _launch_mix(kernel, launch, pointers, coefs, streams, *gradients, **constants):
    streams = [_pointwise_rows(s) for s in streams]
    kernel[launch[0],](*pointers, tuple(coefs), tuple(streams), *gradients, _steps(coefs),
                       tuple(s.stride(0) for s in streams), len(streams[0]), K=len(streams), **launch[1], **constants)


@torch.library.custom_op("speedrun::mix_forward", mutates_args=())
def mix_forward(
    coefs: list[Tensor | None], streams: list[Tensor], normed: bool, keep_x: bool = True, peaks: bool = False,
    leave: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and n, (T, D) each; every program's maximum of |n|; (2, T) fp32, x's root mean square and `leave` times that.
    Empty where unwanted, the last without `leave`."""
    results = _mix_empty_results(coefs, streams, normed, keep_x, peaks, leave)
    launch = _mix_settings("mix forward, peaks" if peaks else "mix forward", streams[0])
    _launch_mix(_mix_forward_kernel, launch, [*(r if r.numel() else None for r in results), leave], coefs, streams)
    return results


@mix_forward.register_fake
def _mix_empty_results(coefs, streams, normed, keep_x=True, peaks=False, leave=None):
    s = streams[0]
    programs = _mix_settings("mix forward, peaks", s)[0] if peaks else 0
    x, n = (s.new_empty(s.shape if want else (0,)) for want in (keep_x, normed))
    return x, n, *(s.new_empty(shape, dtype=torch.float32) for shape in (programs, (2 * (leave is not None), len(s))))


@torch.library.custom_op("speedrun::mix_backward", mutates_args=())
def mix_backward(
    dx: Tensor | None, dn: Tensor | None, coefs: list[Tensor | None], streams: list[Tensor], needs: list[bool],
    by_norm: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """coefs: the streams' K, then the number by which the sum's reader multiplies it (dx is the product's gradient).
    by_norm: the one stream is the norm, its coefficient every row's root mean square.
    needs: of which of the coefs, the streams that have one, and the sum itself a gradient is wanted.

    (K + 1,) fp32, the gradients of the scalar coefficients in `needs` (0 for other coefficients, empty without such);
    then those of all else in the order of `needs`, empty where it does not ask for them."""
    C, scalars = len(coefs), _mix_scalars(coefs, needs)
    sums, grads = _mix_empty_gradients(dx, dn, coefs, streams, needs, by_norm)
    dx, dn = (g if g is None else g.contiguous() for g in (dx, dn))
    targets = tuple(g if g.numel() else None for g in grads)
    launch = _mix_settings("mix backward", streams[0])
    partials = sums.new_empty(C, launch[0]) if any(scalars) else None
    _launch_mix(_mix_backward_kernel, launch, (dx, dn, partials), coefs, streams, targets[:C], targets[C:],
                SCALARS=sum(scalar << k for k, scalar in enumerate(scalars)), BY_NORM=by_norm)
    if any(scalars):
        _mix_scalars_kernel[C,](partials, sums, launch[0], **MIX_SCALARS_TILES)
    return sums, grads


@mix_backward.register_fake
def _mix_empty_gradients(dx, dn, coefs, streams, needs, by_norm=False):
    scalars, s = _mix_scalars(coefs, needs), streams[0]
    own = [need and not scalar for scalar, need in zip(scalars, needs)]
    grads = [like.new_empty(like.shape if mine else (0,))
             for like, mine in zip([s if c is None else c for c in coefs] + [*streams, s], own)]
    return s.new_empty(len(coefs) * any(scalars), dtype=torch.float32), grads


def _mix_scalars(coefs, needs):
    """Which of `needs` are scalar coefficients: their gradients are summed over all tokens, in a second kernel."""
    scalars = [c is not None and c.numel() == 1 and need for c, need in zip(coefs, needs)]
    return scalars + [False] * (len(needs) - len(coefs))


class _Mix(torch.autograd.Function):
    """inputs: coefs, then leave, then streams. shares: which streams share the sum's gradient, being without a
    coefficient, or Scaled, whose coefficients are constants here."""

    @staticmethod
    def forward(ctx, wanted, shares, *inputs):
        K, (normed, keep_x, peaks) = len(shares), wanted
        by_norm = inputs[K] if normed else None  # leaves this number, and n stands for x
        written = normed, keep_x and by_norm is None, peaks, by_norm
        results = mix_forward(list(inputs[:K]), list(inputs[K + 1:]), *written)
        x, n, peaks, (rms, by) = *results[:3], (None, None) if by_norm is None else results[3]
        x = x if by_norm is None else n.detach()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r in (peaks, by) if r is not None))
        # Where all share it, backward reads one stream, the sum as it was rounded.
        ctx.shares, ctx.as_one = shares, all(shares) and keep_x
        ctx.save_for_backward(*((rms, inputs[K], x) if ctx.as_one else inputs))
        return x, n, peaks, by

    @staticmethod
    def backward(ctx, dx, dn, *_):
        K, needs, saved = len(ctx.shares), ctx.needs_input_grad[2:], ctx.saved_tensors
        dx, dn = (g if g is not None and g.numel() else None for g in (dx, dn))  # compiled graphs give empty ones
        if dx is None and dn is None:
            return (None,) * (2 + len(needs))
        C = 2 if ctx.as_one else K + 1
        coefs, streams = list(saved[:C]), list(saved[C:])
        own, shared = ([need and s == which for need, s in zip(needs[K + 1:], ctx.shares)] for which in (False, True))
        at_hand = dn is None and coefs[-1] is None  # the sum's gradient is dx
        asks = [*needs[:C - 1], needs[K] and dx is not None, *own[:C - 1], any(shared) and not at_hand]
        dcoefs, grads = [None] * (K + 1), [None]
        if any(asks):
            dscalars, grads = mix_backward(dx, dn, coefs, streams, asks, ctx.as_one and coefs[0] is not None)
            dcoefs[-C:] = [dscalars[k].to(c.dtype).view(c.shape) if scalar else g if ask else None
                           for k, (c, g, ask, scalar) in enumerate(zip(coefs, grads, asks, _mix_scalars(coefs, asks)))]
        dsum = dx if at_hand else grads[-1]
        return None, None, *dcoefs, *(dsum if shared[k] else grads[C + k] if own[k] else None for k in range(K))


def _check_gates(coefs, s):
    shapes = (len(s),), (len(s), 1)
    require(all(_is_number(c) or isinstance(c, Tensor) and c.is_floating_point() and c.shape in shapes for c in coefs),
            f"coefficients must be tensors of one element, ({len(s)},) or ({len(s)}, 1), floating point, "
            f"not {[_kind(c) for c in coefs]}: give one number, or one for each token")
    _require_one_device(s, *coefs)


def mix(coefs, streams, *, normed: bool, keep_x: bool = True, peaks: bool = False, leave: Tensor | None = None):
    """Weighted sum of up to six residual streams, and its RMS norm: (x, n), both (T, D) in the streams' dtype.

    coefs    one for each stream: None (1), one element (a lambda), (T,) or (T, 1) (a gate, of any stride); floating
    streams  (T, D) each, one dtype, D up to 2048; rows of any stride; a Scaled stream's coefficient is None
    normed   also give n, x over its root mean square along D (eps 2**-23); n is None otherwise
    keep_x   False: x is not written, and None; for sums whose norm alone is read
    peaks    give (x, n, peaks): fp32 numbers, a few thousand at most, the largest of which is that of |n|; for `mlp`
    leave    one element, a lambda by which the next mix is to multiply x: x is given as Scaled, for that mix alone

    Sums are fp32 and rounded once; n is the norm of the unrounded x. Gradients reach every coefficient and stream that
    wants one, and are bitwise repeatable; streams without a coefficient, and Scaled ones, share one tensor. Where all
    do, backward takes x as it was rounded, and reads no stream: a chain of such sums, each of which leaves its lambda
    to the next, reads x, dn and dx and writes one gradient. With `leave` and `normed` it is n that is rounded, and the
    next mix multiplies it by the rows' root mean squares as well: forward writes one tensor. Raises ValueError.
    """
    coefs, streams = tuple(coefs), tuple(streams)
    require(1 <= len(streams) <= 6 and len(coefs) == len(streams),
            f"mix takes 1 to 6 streams and as many coefficients, not {len(streams)} and {len(coefs)}: split the sum")
    require(all(c is None for c, s in zip(coefs, streams) if isinstance(s, Scaled)),
            "a Scaled stream brings its coefficient along: give None with it")
    shares = tuple(c is None for c in coefs)
    coefs, streams = _mix_parts(coefs, streams)
    s = streams[0]
    require(s.dim() == 2 and s.numel() > 0 and all(x.shape == s.shape for x in streams),
            f"streams must share one non-empty shape (T, D), not {[tuple(x.shape) for x in streams]}: reshape them")
    require(s.is_floating_point() and all(x.dtype == s.dtype for x in streams),
            f"streams must share one floating-point dtype, not {[str(x.dtype) for x in streams]}: cast them alike")
    given = [c for c in (*coefs, leave) if c is not None]
    _check_gates(given, s)
    require(not any(c.requires_grad and c.numel() > 1 for c, share in zip(coefs, shares) if share and c is not None),
            "a Scaled stream's numbers for its tokens must be constants: let a mix make them, by `leave`")
    require(leave is None or leave.numel() == 1 and keep_x,
            "`leave` must be one element, for a sum that is kept: use keep_x=True")
    _require_one_device(*streams)
    require(normed or keep_x and not peaks, "without its norm a sum has no peaks, and must be kept: use normed=True")
    if not use_kernel(*streams):
        return mix_reference(coefs, streams, normed=normed, keep_x=keep_x, peaks=peaks, leave=leave)
    require(s.shape[1] <= 2048 and all(x.element_size() <= 4 for x in (*given, s)),
            f"the kernels take fp32, bf16 or fp16 rows of up to 2048, not {s.dtype} rows of {s.shape[1]}: "
            "use mix_reference (REFERENCE_OPS=1)")
    coefs = (c.detach() if share and c is not None else c for c, share in zip(coefs, shares))
    x, n, maxima, by = _Mix.apply((normed, keep_x, peaks), shares, *coefs, leave, *streams)
    x = x if keep_x else None
    results = x if leave is None else Scaled(x, leave if by is None else by.detach()), n if normed else None
    return (*results, maxima) if peaks else results


# --- injections: one pair of streams goes into many sums ---

def injections_reference(gates, x, y):
    """What `injections` computes, in eager torch (fp32 inside for 16-bit streams)."""
    pairs = ([(g, s) for g, s in zip(pair, (x, y)) if g is not None] for pair in gates)
    return tuple(mix_reference(*zip(*pair), normed=False)[0] for pair in pairs)


@_any_gate_jit
def _injections_forward_kernel(
    x_ptr, y_ptr, coefs, outs, coef_steps, x_step, y_step, T,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """coefs: two by output, of x and of y; None is 0."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)[None, :]
    inside = (t < T)[:, None] & (d < D)
    x = tl.load(x_ptr + t[:, None] * x_step + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + t[:, None] * y_step + d, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        out = tl.zeros((ROWS, COLUMNS), tl.float32)
        if coefs[2 * k] is not None:
            out += tl.load(coefs[2 * k] + t * coef_steps[2 * k], mask=t < T, other=0.0).to(tl.float32)[:, None] * x
        if coefs[2 * k + 1] is not None:
            g = tl.load(coefs[2 * k + 1] + t * coef_steps[2 * k + 1], mask=t < T, other=0.0).to(tl.float32)
            out += g[:, None] * y
        tl.store(outs[k] + t[:, None] * D + d, out.to(x_ptr.dtype.element_ty), mask=inside)


@_any_gate_jit
def _injections_backward_kernel(
    x_ptr, y_ptr, dx_ptr, dy_ptr, coefs, douts, dcoefs, coef_steps, x_step, y_step, T,
    K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):
    """A missing (None) dout is zero; coefs are None where the gate or the dout is. A chunk of all rows is read at once;
    eight numbers by thread are summed before threads meet."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    LANES: tl.constexpr = CHUNK // 8
    gates = ()
    sums = ()
    for i in tl.static_range(2 * K):
        sums = sums + (tl.zeros((ROWS, LANES), tl.float32),)
        if coefs[i] is None:
            gates = gates + (tl.zeros((ROWS, 1, 1), tl.float32),)  # never read
        else:
            g = tl.load(coefs[i] + t * coef_steps[i], mask=t < T, other=0.0).to(tl.float32)
            gates = gates + (g[:, None, None],)
    t = t[:, None, None]
    for c in tl.static_range(0, D, CHUNK):
        d = c + tl.arange(0, LANES)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        inside = (t < T) & (d < D)
        rows = ()
        for k in tl.static_range(K):
            if douts[k] is None:
                rows = rows + (tl.zeros((ROWS, LANES, 8), tl.float32),)
            else:
                rows = rows + (tl.load(douts[k] + t * D + d, mask=inside, other=0.0),)
        x = tl.load(x_ptr + t * x_step + d, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + t * y_step + d, mask=inside, other=0.0).to(tl.float32)
        dx = tl.zeros((ROWS, LANES, 8), tl.float32)
        dy = tl.zeros((ROWS, LANES, 8), tl.float32)
        more = ()
        for i in tl.static_range(2 * K):
            part = sums[i]
            if coefs[i] is not None:
                dout = rows[i // 2].to(tl.float32)
                if i % 2 == 0:
                    dx += gates[i] * dout
                    part += tl.sum(dout * x, 2)
                else:
                    dy += gates[i] * dout
                    part += tl.sum(dout * y, 2)
            more = more + (part,)
        sums = more
        tl.store(dx_ptr + t * D + d, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dy_ptr + t * D + d, dy.to(dy_ptr.dtype.element_ty), mask=inside)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for i in tl.static_range(2 * K):
        if coefs[i] is not None:
            tl.store(dcoefs[i] + t, tl.sum(sums[i], 1).to(dcoefs[i].dtype.element_ty), mask=t < T)


def _launch_injections(kernel, name, x, y, results, coefs, *tensors):
    (T, D), tiles = x.shape, POINTWISE_TILES[name]
    x, y = _pointwise_rows(x), _pointwise_rows(y)
    kernel[(triton.cdiv(T, tiles["ROWS"]),)](
        x, y, *results, tuple(coefs), *tensors, _steps(coefs), x.stride(0), y.stride(0), T,
        K=len(coefs) // 2, D=D, COLUMNS=triton.next_power_of_2(D), **tiles)


@torch.library.custom_op("speedrun::injections_forward", mutates_args=())
def injections_forward(coefs: list[Tensor | None], x: Tensor, y: Tensor) -> list[Tensor]:
    outs = _injections_empty_results(coefs, x, y)
    _launch_injections(_injections_forward_kernel, "injections forward", x, y, (), coefs, tuple(outs))
    return outs


@injections_forward.register_fake
def _injections_empty_results(coefs, x, y):
    return [x.new_empty(x.shape) for _ in coefs[::2]]


@torch.library.custom_op("speedrun::injections_backward", mutates_args=())
def injections_backward(
    douts: list[Tensor | None], coefs: list[Tensor | None], x: Tensor, y: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradients of x, y and every coefficient; empty for those without gate or dout."""
    coefs = [None if douts[i // 2] is None else c for i, c in enumerate(coefs)]
    dx, dy, dcoefs = _injections_empty_gradients(douts, coefs, x, y)
    douts = tuple(d if d is None else d.contiguous() for d in douts)
    targets = tuple(None if c is None else g for c, g in zip(coefs, dcoefs))
    _launch_injections(_injections_backward_kernel, "injections backward", x, y, (dx, dy), coefs, douts, targets)
    return dx, dy, dcoefs


@injections_backward.register_fake
def _injections_empty_gradients(douts, coefs, x, y):
    wanted = [None if douts[i // 2] is None else c for i, c in enumerate(coefs)]
    dcoefs = [x.new_empty(0) if c is None else c.new_empty(c.shape) for c in wanted]
    return x.new_empty(x.shape), y.new_empty(y.shape), dcoefs


class _Injections(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, *coefs):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, *coefs)
        return tuple(injections_forward(list(coefs), x, y))

    @staticmethod
    def backward(ctx, *douts):
        x, y, *coefs = ctx.saved_tensors
        if all(d is None for d in douts):
            return (None,) * (2 + len(coefs))
        dx, dy, dcoefs = injections_backward(list(douts), coefs, x, y)
        return dx, dy, *(g if g.numel() else None for g in dcoefs)


def injections(gates, x, y):
    """gate * x + gate * y for each pair of gates: what two streams add to many sums, each (T, D) in their dtype.

    gates  pairs, up to 8, of (T,) or (T, 1) of any stride, floating point; one of a pair may be None (0)
    x, y   (T, D), one dtype, D up to 2048; rows of any stride

    One pass reads x and y for all outputs; in backward, one pass makes their gradients from all outputs', where sums
    that took x and y themselves would each write a gradient to be added up. Sums are fp32. Raises ValueError.
    """
    gates = [tuple(pair) for pair in gates]
    require(x.dim() == 2 and x.numel() > 0 and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device),
            f"x and y must be non-empty (T, D) alike, not {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}: "
            "cast and reshape them alike")
    require(1 <= len(gates) <= 8 and all(len(pair) == 2 and any(g is not None for g in pair) for pair in gates),
            f"injections takes 1 to 8 pairs of gates, of which one may be None, not {len(gates)}: split the call")
    given = [g for pair in gates for g in pair if g is not None]
    _check_gates(given, x)
    require(all(g.numel() == len(x) for g in given), f"gates must hold one number for each of {len(x)} "
            f"tokens, not {[tuple(g.shape) for g in given]}: leave a gate out by None")
    if not use_kernel(x, y):
        return injections_reference(gates, x, y)
    require(x.shape[1] <= 2048 and all(t.element_size() <= 4 for t in (x, *given)),
            f"the kernels take fp32, bf16 or fp16 rows of up to 2048, not {x.dtype} rows of {x.shape[1]}: "
            "use injections_reference (REFERENCE_OPS=1)")
    return _Injections.apply(x, y, *(g for pair in gates for g in pair))


# --- gradients that meet: autograd alone would add them one by one, and fill up a slice's with zeros ---

class _Fan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(6))

    @staticmethod
    def backward(ctx, *grads):
        grads = [g for g in grads if g is not None]
        return mix_forward([None] * len(grads), grads, False)[0] if len(grads) > 1 else grads[0] if grads else None


def fan(x):
    """Endless iterator of aliases of x (T, D): one for each place that reads x, so that one pass sums their gradients
    (a pass more for every five beyond the first five)."""
    while use_kernel(x) and x.element_size() <= 4:
        *aliases, x = _Fan.apply(x)
        yield from aliases
    yield from itertools.repeat(x)


class _Leading(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.width = x.shape, width
        return x.view_as(x), x[:, :width]

    @staticmethod
    def backward(ctx, dx, d):
        if d is not None:
            dx = d.new_zeros(ctx.shape) if dx is None else dx
            dx[:, :ctx.width] += d
        return dx, None


def leading(x, width: int):
    """x (T, D), to be read instead of x, and its first columns (T, width), a view.

    The columns' gradient is added to x's in place, so whoever reads x must hand back a gradient of its own, as products
    do, but not a stream of `mix` without a coefficient.
    """
    return _Leading.apply(x, width) if use_kernel(x) else (x, x[:, :width])


# --- smear ---

def smear_reference(e, gate_w, lam):
    """What `smear` computes, in eager torch; the gate in e's dtype, the sum in fp32 for 16-bit inputs."""
    gate = lam.to(e.dtype) * torch.sigmoid(torch.nn.functional.linear(e[1:, :gate_w.shape[1]], gate_w))
    gate, before = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (gate, e[:-1]))
    return mix_reference((None, gate), (e, before), normed=True, keep_x=False)[1]


@jit
def _smear_rows(e_ptr, t, e_step, T, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows t of e, (rows, COLUMNS) fp32; zeros outside."""
    d = tl.arange(0, COLUMNS)[None, :]
    inside = ((t >= 0) & (t < T))[:, None] & (d < D)
    return tl.load(e_ptr + t[:, None] * e_step + d, mask=inside, other=0.0).to(tl.float32)


@jit
def _smear_forward_kernel(
    e_ptr, w_ptr, lam_ptr, n_ptr, e_step, T,
    W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Programs walk the rows, ROWS at a time. Each is also its neighbour's, which finds it in a cache."""
    d = tl.arange(0, COLUMNS)[None, :]
    w, lam = tl.load(w_ptr + d, mask=d < W, other=0.0).to(tl.float32), tl.load(lam_ptr).to(tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        t = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        before, e = _smear_rows(e_ptr, t - 1, e_step, T, D, COLUMNS), _smear_rows(e_ptr, t, e_step, T, D, COLUMNS)
        x = e + (lam * tl.sigmoid(tl.sum(e * w, 1)))[:, None] * before
        n = x * _pointwise_rms_scale(x, D)[:, None]
        tl.store(n_ptr + t[:, None] * D + d, n.to(n_ptr.dtype.element_ty), mask=(t < T)[:, None] & (d < D))


@jit
def _smear_total(dn, e, before, w, lam, D: tl.constexpr):
    """Of rows: the gate's sigmoid (rows,), and the gradient of the sum that was normed."""
    gate = tl.sigmoid(tl.sum(e * w, 1))
    x = e + (lam * gate)[:, None] * before
    scale = _pointwise_rms_scale(x, D)
    share = scale * scale * tl.sum(dn * x, 1) / D
    return gate, scale[:, None] * (dn - share[:, None] * x)


@jit
def _smear_backward_kernel(
    dn_ptr, e_ptr, w_ptr, lam_ptr, de_ptr, partials_ptr, e_step, T,
    W: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):
    """Programs walk the rows, ROWS at a time; a row's gradient is that of its own sum and of the next row's, which is
    computed again. Partials (W + 1, programs): each program's shares of the gradients of gate_w, then of lam."""
    d = tl.arange(0, COLUMNS)[None, :]
    w, lam = tl.load(w_ptr + d, mask=d < W, other=0.0).to(tl.float32), tl.load(lam_ptr).to(tl.float32)
    dw, dlam = tl.zeros((1, COLUMNS), tl.float32), tl.zeros((1,), tl.float32)
    for group in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        t = group * ROWS + tl.arange(0, ROWS).to(tl.int64)
        before, e = _smear_rows(e_ptr, t - 1, e_step, T, D, COLUMNS), _smear_rows(e_ptr, t, e_step, T, D, COLUMNS)
        after = _smear_rows(e_ptr, t + 1, e_step, T, D, COLUMNS)
        dn, dn_after = _smear_rows(dn_ptr, t, D, T, D, COLUMNS), _smear_rows(dn_ptr, t + 1, D, T, D, COLUMNS)
        gate_after, total_after = _smear_total(dn_after, after, e, w, lam, D)
        gate, total = _smear_total(dn, e, before, w, lam, D)
        dgate = tl.sum(total * before, 1)
        dlogit = (dgate * lam * gate * (1 - gate))[:, None]
        dlam += tl.sum(dgate * gate, 0)
        dw += tl.sum(dlogit * e, 0)[None, :]
        de = total + (lam * gate_after)[:, None] * total_after + dlogit * w
        tl.store(de_ptr + t[:, None] * D + d, de.to(de_ptr.dtype.element_ty), mask=(t < T)[:, None] & (d < D))
    partial = partials_ptr + tl.program_id(0)
    tl.store(partial + d * tl.num_programs(0), dw, mask=d < W)
    tl.store(partial + W * tl.num_programs(0) + tl.arange(0, 1), dlam)


def _launch_smear(kernel, name, before, e, gate_w, lam, *results):
    (programs, launch), e = _mix_settings(name, e), _pointwise_rows(e)
    kernel[programs,](*before, e, gate_w.contiguous(), lam, *results, e.stride(0), len(e), W=gate_w.shape[1], **launch)


@torch.library.custom_op("speedrun::smear_forward", mutates_args=())
def smear_forward(e: Tensor, gate_w: Tensor, lam: Tensor) -> Tensor:
    n = _smear_empty_result(e, gate_w, lam)
    _launch_smear(_smear_forward_kernel, "smear forward", (), e, gate_w, lam, n)
    return n


@smear_forward.register_fake
def _smear_empty_result(e, gate_w, lam):
    return e.new_empty(e.shape)


@torch.library.custom_op("speedrun::smear_backward", mutates_args=())
def smear_backward(dn: Tensor, e: Tensor, gate_w: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """de, and (W + 1,) fp32, the gradients of gate_w and of lam."""
    de, sums = _smear_empty_gradients(dn, e, gate_w, lam)
    programs = _mix_settings("smear backward", e)[0]
    partials = sums.new_empty(len(sums), programs)
    _launch_smear(_smear_backward_kernel, "smear backward", (dn.contiguous(),), e, gate_w, lam, de, partials)
    _mix_scalars_kernel[len(sums),](partials, sums, programs, **MIX_SCALARS_TILES)
    return de, sums


@smear_backward.register_fake
def _smear_empty_gradients(dn, e, gate_w, lam):
    return e.new_empty(e.shape), e.new_empty(gate_w.shape[1] + 1, dtype=torch.float32)


class _Smear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, gate_w, lam):
        ctx.save_for_backward(e, gate_w, lam)
        return smear_forward(e, gate_w, lam)

    @staticmethod
    def backward(ctx, dn):
        _, gate_w, lam = ctx.saved_tensors
        de, sums = smear_backward(dn, *ctx.saved_tensors)
        return de, sums[None, :-1].to(gate_w.dtype), sums[-1].to(lam.dtype).view(lam.shape)


def smear(e, gate_w, lam):
    """RMS norm of every row plus a gated share of the row before it: of e[t] + lam sigmoid(gate_w . e[t, :W]) e[t - 1].

    e        (T, D), floating point, D up to 2048; rows of any stride. Row 0 takes no share
    gate_w   (1, W), e's dtype, W up to D
    lam      one element, floating point

    Returns (T, D) in e's dtype; the norm (eps NORM_EPS) is of the unrounded sum. Gradients reach all three, from one
    pass, and are bitwise repeatable. Raises ValueError.
    """
    require(e.dim() == 2 and e.numel() > 0 and e.is_floating_point(),
            f"e must be non-empty (T, D), floating point, not {tuple(e.shape)} {e.dtype}: reshape it")
    require(gate_w.dim() == 2 and len(gate_w) == 1 and 1 <= gate_w.shape[1] <= e.shape[1] and gate_w.dtype == e.dtype,
            f"gate_w must be (1, {e.shape[1]} or fewer), {e.dtype}, not {tuple(gate_w.shape)} {gate_w.dtype}: give one "
            "weight for each column that the gate reads")
    require(_is_number(lam),
            f"lam must be a tensor of one floating-point number, not {_kind(lam)}: gates are made from gate_w")
    _require_one_device(e, gate_w, lam)
    if not use_kernel(e):
        return smear_reference(e, gate_w, lam)
    require(e.shape[1] <= 2048 and all(x.element_size() <= 4 for x in (e, lam)),
            f"the kernels take fp32, bf16 or fp16 rows of up to 2048, not {e.dtype} rows of {e.shape[1]}: "
            "use smear_reference (REFERENCE_OPS=1)")
    return _Smear.apply(e, gate_w, lam)


# --- norm_rotary ---

def norm_rotary_reference(qk, cos, sin, *, paired, key_offset):
    """What `norm_rotary` computes, in eager torch (fp32 inside for 16-bit inputs)."""
    T, _, N, H = qk.shape
    inner = torch.promote_types(qk.dtype, torch.float32)
    streams = 2 if paired else 1
    turn = torch.complex(*(table[:T * streams].to(inner) for table in (cos, -sin))).view(T, 1, streams, H // 4)
    turned, still = torch.nn.functional.rms_norm(qk.to(inner), (H,), eps=NORM_EPS).split(H // 2, -1)
    turned = torch.view_as_complex(turned.reshape(T, 2 * N // streams, streams, H // 4, 2)) * turn
    turned = torch.view_as_real(turned).view(T, 2, N, H // 2)
    if key_offset:
        own, k = still.unbind(1)
        still = torch.stack((own, torch.cat((k[:1], k[:-1]))), 1)
    return torch.cat((turned, still), -1).to(qk.dtype).unbind(1)


@jit
def _rotary_tables(cos_ptr, sin_ptr, t, head, inside, H: tl.constexpr, STREAMS: tl.constexpr):
    """cos and sin, (rows, H/2), of each adjacent pair of a head. Pairs of the second half do not turn."""
    pair = tl.arange(0, H // 2)[None, :]
    # The compiler is shown runs of four (pairs of 16 bytes of x) and no longer ones: it then lays angles out as it does
    # pairs, and moves nothing between threads.
    at = (t * STREAMS + head % STREAMS)[:, None] * (H // 4) + pair // 4 * 4 + pair % 4
    turning = inside[:, None] & (pair < H // 4)
    cos = tl.load(cos_ptr + at, mask=turning, other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=turning, other=0.0).to(tl.float32)


@jit
def _rotary_turn(x, cos, sin):
    """Turn the adjacent pairs of each row backwards by their angles."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(cos * even + sin * odd, cos * odd - sin * even), x.shape)


@jit
def _norm_rotary_forward_kernel(
    qk_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, qk_step, T,
    N: tl.constexpr, H: tl.constexpr, STREAMS: tl.constexpr, KEY_OFFSET: tl.constexpr, ROWS: tl.constexpr,
):
    """Rows are heads of queries (programs (i, 0)) or of keys (programs (i, 1))."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, head, d = row // N, row % N, tl.arange(0, H)[None, :]
    at = row.to(tl.int64)[:, None] * H + d
    inside = t < T
    source = t.to(tl.int64) * qk_step + (part * N + head) * H
    x = tl.load(qk_ptr + source[:, None] + d, mask=inside[:, None], other=0.0).to(tl.float32)
    x *= _pointwise_rms_scale(x, H)[:, None]
    cos, sin = _rotary_tables(cos_ptr, sin_ptr, t, head, inside, H, STREAMS)
    y = _rotary_turn(x, cos, sin).to(q_ptr.dtype.element_ty)
    if part == 0:
        tl.store(q_ptr + at, y, mask=inside[:, None])
    else:
        later = d // (H // 2) if KEY_OFFSET else d * 0  # tokens by which a number moves
        tl.store(k_ptr + at + later * (N * H), y, mask=t[:, None] + later < T)
        if KEY_OFFSET:
            tl.store(k_ptr + at, y, mask=inside[:, None] & (t[:, None] < later))  # token 0 keeps its own


@jit
def _norm_rotary_backward_kernel(
    qk_ptr, dq_ptr, dk_ptr, dqk_ptr, cos_ptr, sin_ptr, qk_step, T,
    N: tl.constexpr, H: tl.constexpr, STREAMS: tl.constexpr, KEY_OFFSET: tl.constexpr, ROWS: tl.constexpr,
):
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, head, d = row // N, row % N, tl.arange(0, H)[None, :]
    at = row.to(tl.int64)[:, None] * H + d
    inside = t < T
    source = t.to(tl.int64) * qk_step + (part * N + head) * H
    x = tl.load(qk_ptr + source[:, None] + d, mask=inside[:, None], other=0.0).to(tl.float32)
    if part == 0:
        dy = tl.load(dq_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    else:
        later = d // (H // 2) if KEY_OFFSET else d * 0
        dy = tl.load(dk_ptr + at + later * (N * H), mask=t[:, None] + later < T, other=0.0).to(tl.float32)
        if KEY_OFFSET:
            dy += tl.load(dk_ptr + at, mask=inside[:, None] & (t[:, None] < later), other=0.0).to(tl.float32)
    cos, sin = _rotary_tables(cos_ptr, sin_ptr, t, head, inside, H, STREAMS)
    dn = _rotary_turn(dy, cos, -sin)
    scale = _pointwise_rms_scale(x, H)[:, None]
    n = x * scale
    dx = scale * (dn - n * (tl.sum(dn * n, 1) / H)[:, None])
    target = (t.to(tl.int64) * 2 + part) * N + head
    tl.store(dqk_ptr + target[:, None] * H + d, dx.to(dqk_ptr.dtype.element_ty), mask=inside[:, None])


def _launch_norm_rotary(kernel, name, qk, arrays, cos, sin, paired, key_offset):
    (T, _, N, H), tiles = qk.shape, POINTWISE_TILES[name]
    kernel[triton.cdiv(T * N, tiles["ROWS"]), 2](
        qk, *arrays, cos.contiguous(), sin.contiguous(), qk.stride(0), T,
        N=N, H=H, STREAMS=2 if paired else 1, KEY_OFFSET=key_offset, **tiles)


@torch.library.custom_op("speedrun::norm_rotary_forward", mutates_args=())
def norm_rotary_forward(
    qk: Tensor, cos: Tensor, sin: Tensor, paired: bool, key_offset: bool,
) -> tuple[Tensor, Tensor]:
    q, k = _norm_rotary_empty_results(qk, cos, sin, paired, key_offset)
    _launch_norm_rotary(_norm_rotary_forward_kernel, "norm_rotary forward", _pointwise_rows(qk), (q, k), cos, sin,
                        paired, key_offset)
    return q, k


@norm_rotary_forward.register_fake
def _norm_rotary_empty_results(qk, cos, sin, paired, key_offset):
    T, _, N, H = qk.shape
    return qk.new_empty(T, N, H), qk.new_empty(T, N, H)


@torch.library.custom_op("speedrun::norm_rotary_backward", mutates_args=())
def norm_rotary_backward(
    dq: Tensor, dk: Tensor, qk: Tensor, cos: Tensor, sin: Tensor, paired: bool, key_offset: bool,
) -> Tensor:
    dqk = _norm_rotary_empty_gradient(dq, dk, qk, cos, sin, paired, key_offset)
    _launch_norm_rotary(_norm_rotary_backward_kernel, "norm_rotary backward", _pointwise_rows(qk),
                        (dq.contiguous(), dk.contiguous(), dqk), cos, sin, paired, key_offset)
    return dqk


@norm_rotary_backward.register_fake
def _norm_rotary_empty_gradient(dq, dk, qk, cos, sin, paired, key_offset):
    return qk.new_empty(qk.shape)


class _NormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qk, cos, sin, paired, key_offset):
        ctx.save_for_backward(qk, cos, sin)
        ctx.options = paired, key_offset
        return norm_rotary_forward(qk, cos, sin, paired, key_offset)

    @staticmethod
    def backward(ctx, dq, dk):
        return norm_rotary_backward(dq, dk, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _check_rotary(cos, sin, device, T, N, H, paired):
    require(not paired or N % 2 == 0, f"paired heads need an even number of them, not {N}: pass paired=False")
    positions = 2 * T if paired else T
    require(cos.shape == sin.shape and cos.dim() == 2 and len(cos) >= positions and cos.shape[1] == H // 4,
            f"cos and sin must be ({positions} or more, {H // 4}), not {tuple(cos.shape)} and {tuple(sin.shape)}: "
            "lay down longer tables")
    require(cos.dtype == sin.dtype and cos.is_floating_point() and device == cos.device == sin.device,
            f"cos and sin must share one floating-point dtype, on {device}, not {cos.dtype} on {cos.device} and "
            f"{sin.dtype} on {sin.device}: cast and move them")


def norm_rotary(qk, cos, sin, *, paired: bool, key_offset: bool):
    """RMS norm (eps NORM_EPS) of every head of queries and keys, then half-truncated rotary: (q, k), (T, N, H) each.

    qk         (T, 2, N, H), queries then keys; tokens of any stride
    cos, sin   (P, H/4), P >= T positions (2T when paired), for the adjacent pairs of the first half of a head: (x1, x2)
               becomes (x1 cos + x2 sin, x2 cos - x1 sin); the second half does not turn
    paired     head h of token t turns by position 2t + h mod 2, not t. `attention` has heads 0 .. N/2-1 at position 2t
               and the others at 2t + 1, so with six heads, 1 and 4 turn by each other's: deliberate, v3's
    key_offset the second half of every key comes from the token before; token 0 keeps its own

    fp32 inside, rounded once. The gradient reaches qk only, in one pass. Raises ValueError.
    """
    T, two, N, H = qk.shape if qk.dim() == 4 else (0, 0, 0, 0)
    require(T > 0 and two == 2 and N > 0 and H > 0 and H % 4 == 0 and qk.is_floating_point(),
            f"qk must be (T, 2, N, H), floating point, with H a multiple of 4, not {tuple(qk.shape)} {qk.dtype}: "
            "view it so")
    _check_rotary(cos, sin, qk.device, T, N, H, paired)
    if not use_kernel(qk):
        return norm_rotary_reference(qk, cos, sin, paired=paired, key_offset=key_offset)
    _require_kernel_heads(qk, "norm_rotary_reference")
    return _NormRotary.apply(qk, cos, sin, paired, key_offset)


def _require_kernel_heads(x, reference):
    H = x.shape[-1]
    require(16 <= H <= 1024 and H & (H - 1) == 0 and x.element_size() <= 4,
            f"the kernels take fp32, bf16 or fp16 heads of a power of two, 16 to 1024, not {x.dtype} heads of {H}: "
            f"use {reference} (REFERENCE_OPS=1)")


# --- finish_heads ---

def finish_heads_reference(y, v, alpha, gate):
    """What `finish_heads` computes, in eager torch (fp32 inside for 16-bit inputs)."""
    inner = torch.promote_types(y.dtype, torch.float32)
    z = y.to(inner)
    if alpha is not None:
        v_hat = torch.nn.functional.normalize(v.to(inner), dim=-1, eps=1e-4)
        share = torch.tanh(alpha.to(inner))[..., None] * (z * v_hat).sum(-1, keepdim=True)
        z = torch.addcmul(z, share, v_hat, value=-1)
    if gate is not None:
        z = z * gate.to(inner)[..., None]
    return z.to(y.dtype)


@jit
def _finish_along(y, v, alpha):
    """Per row: 1 / |v|, 1 where |v| is large enough to count, tanh(alpha), and the component of y along v."""
    length = tl.sqrt(tl.sum(v * v, 1))
    inverse = 1 / tl.maximum(length, 1e-4)
    return inverse, length > 1e-4, 2 * tl.sigmoid(2 * alpha) - 1, tl.sum(y * v, 1) * inverse


@_any_gate_jit
def _finish_heads_forward_kernel(
    y_ptr, v_ptr, alpha_ptr, gate_ptr, z_ptr, y_step, v_step, alpha_step, gate_step, T,
    N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
):
    """Rows are heads. A missing (None) alpha or gate leaves its part out."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, head, d = (row // N).to(tl.int64), row % N, tl.arange(0, H)[None, :]
    inside = row < T * N
    z = tl.load(y_ptr + (t * y_step + head * H)[:, None] + d, mask=inside[:, None], other=0.0).to(tl.float32)
    if alpha_ptr is not None:
        v = tl.load(v_ptr + (t * v_step + head * H)[:, None] + d, mask=inside[:, None], other=0.0).to(tl.float32)
        alpha = tl.load(alpha_ptr + t * alpha_step + head, mask=inside, other=0.0).to(tl.float32)
        inverse, _, share, along = _finish_along(z, v, alpha)
        z -= (share * along * inverse)[:, None] * v
    if gate_ptr is not None:
        z *= tl.load(gate_ptr + t * gate_step + head, mask=inside, other=0.0).to(tl.float32)[:, None]
    tl.store(z_ptr + row.to(tl.int64)[:, None] * H + d, z.to(z_ptr.dtype.element_ty), mask=inside[:, None])


@_any_gate_jit
def _finish_heads_backward_kernel(
    dz_ptr, y_ptr, v_ptr, alpha_ptr, gate_ptr, dy_ptr, dv_ptr, dalpha_ptr, dgate_ptr,
    y_step, v_step, alpha_step, gate_step, T, N: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
):
    """With u = v / |v|, a = tanh(alpha): z = gate (y - a <y, u> u). Every gradient follows from four dot products."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, head, d = (row // N).to(tl.int64), row % N, tl.arange(0, H)[None, :]
    inside = row < T * N
    at = row.to(tl.int64)[:, None] * H + d
    dz = tl.load(dz_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    y = tl.load(y_ptr + (t * y_step + head * H)[:, None] + d, mask=inside[:, None], other=0.0).to(tl.float32)
    dgate = tl.sum(dz * y, 1)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + t * gate_step + head, mask=inside, other=0.0).to(tl.float32)
    else:
        gate = tl.full((ROWS,), 1.0, tl.float32)
    dy = gate[:, None] * dz
    if alpha_ptr is not None:
        v = tl.load(v_ptr + (t * v_step + head * H)[:, None] + d, mask=inside[:, None], other=0.0).to(tl.float32)
        alpha = tl.load(alpha_ptr + t * alpha_step + head, mask=inside, other=0.0).to(tl.float32)
        inverse, counts, a, along = _finish_along(y, v, alpha)
        d_along = tl.sum(dz * v, 1) * inverse
        dgate -= a * along * d_along
        d_along *= gate
        du = -(a * inverse)[:, None] * (along[:, None] * dy + d_along[:, None] * y)
        turn = tl.where(counts, 2 * a * along * d_along * inverse * inverse, 0.0)  # u keeps its length
        tl.store(dv_ptr + at, (du + turn[:, None] * v).to(dv_ptr.dtype.element_ty), mask=inside[:, None])
        dalpha = (a * a - 1) * along * d_along
        tl.store(dalpha_ptr + row, dalpha.to(dalpha_ptr.dtype.element_ty), mask=inside)
        dy -= (a * d_along * inverse)[:, None] * v
    if gate_ptr is not None:
        tl.store(dgate_ptr + row, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dy_ptr + at, dy.to(dy_ptr.dtype.element_ty), mask=inside[:, None])


def _launch_finish_heads(kernel, name, before, y, v, alpha, gate, results):
    (T, N, H), tiles = y.shape, POINTWISE_TILES[name]
    inputs = [x if x is None else _pointwise_rows(x) for x in (y, v, alpha, gate)]
    kernel[(triton.cdiv(T * N, tiles["ROWS"]),)](
        *before, *inputs, *results, *(0 if x is None else x.stride(0) for x in inputs), T,
        N=N, H=H, **tiles)


@torch.library.custom_op("speedrun::finish_heads_forward", mutates_args=())
def finish_heads_forward(y: Tensor, v: Tensor, alpha: Tensor | None, gate: Tensor | None) -> Tensor:
    z = _finish_heads_empty_result(y, v, alpha, gate)
    _launch_finish_heads(_finish_heads_forward_kernel, "finish_heads forward", (), y, v, alpha, gate, (z,))
    return z


@finish_heads_forward.register_fake
def _finish_heads_empty_result(y, v, alpha, gate):
    return y.new_empty(y.shape)


@torch.library.custom_op("speedrun::finish_heads_backward", mutates_args=())
def finish_heads_backward(
    dz: Tensor, y: Tensor, v: Tensor, alpha: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dy, dv, dalpha, dgate; dv and dalpha are empty without alpha, dgate without gate."""
    grads = _finish_heads_empty_gradients(dz, y, v, alpha, gate)
    results = (g if g.numel() else None for g in grads)
    _launch_finish_heads(
        _finish_heads_backward_kernel, "finish_heads backward", (dz.contiguous(),), y, v, alpha, gate, results)
    return grads


@finish_heads_backward.register_fake
def _finish_heads_empty_gradients(dz, y, v, alpha, gate):
    dv = v.new_empty((0,) if alpha is None else v.shape)
    return y.new_empty(y.shape), dv, *(y.new_empty(0) if x is None else x.new_empty(x.shape) for x in (alpha, gate))


class _FinishHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, v, alpha, gate):
        ctx.save_for_backward(y, v, alpha, gate)
        return finish_heads_forward(y, v, alpha, gate)

    @staticmethod
    def backward(ctx, dz):
        _, _, alpha, gate = ctx.saved_tensors
        dy, dv, dalpha, dgate = finish_heads_backward(dz, *ctx.saved_tensors)
        return dy, dv if alpha is not None else None, *(
            g if x is not None else None for x, g in ((alpha, dalpha), (gate, dgate)))


def finish_heads(y, v, alpha, gate):
    """Exclusive self-attention and the attention gate: gate (y - tanh(alpha) <y, u> u), u = v / max(|v|, 1e-4).

    y, v         (T, N, H), one dtype, attention's output and each token's own values; tokens of any stride
    alpha, gate  (T, N), floating point, of any strides; None leaves that part out, but not both

    Returns (T, N, H), contiguous, fp32 inside and rounded once. Gradients reach all inputs, from one pass. Raises
    ValueError.
    """
    require(y.dim() == 3 and y.numel() > 0 and y.shape == v.shape,
            f"y and v must share one non-empty shape (T, N, H), not {tuple(y.shape)} and {tuple(v.shape)}: reshape")
    require(y.dtype == v.dtype and y.is_floating_point(),
            f"y and v must share one floating-point dtype, not {y.dtype} and {v.dtype}: cast them alike")
    given = [x for x in (alpha, gate) if x is not None]
    require(len(given) > 0, "alpha and gate must not both be None: use y as it is")
    require(all(isinstance(x, Tensor) and x.shape == y.shape[:2] and x.is_floating_point() for x in given),
            f"alpha and gate must be {tuple(y.shape[:2])}, floating point, not {[_kind(x) for x in given]}: "
            "give one number for each head")
    _require_one_device(y, v, *given)
    if not use_kernel(y, v):
        return finish_heads_reference(y, v, alpha, gate)
    _require_kernel_heads(y, "finish_heads_reference")
    return _FinishHeads.apply(y, v, alpha, gate)


# --- add_values ---

def add_values_reference(v, ve, near, w):
    """What `add_values` computes, in eager torch; gates in v's dtype, the sum in fp32 for 16-bit inputs."""
    gate = torch.nn.functional.linear(torch.cat((near, ve[:, :near.shape[1]]), -1), w)
    streams = v.reshape(-1, v.shape[-1]), ve.reshape(-1, v.shape[-1])
    return mix_reference((None, (2 * torch.sigmoid(gate)).reshape(-1)), streams, normed=False)[0].view(v.shape)


@jit
def _add_values_weights(w_ptr, N: tl.constexpr, W: tl.constexpr, HEADS: tl.constexpr, NEAR: tl.constexpr):
    """(1, HEADS, NEAR) each: what each head's gate makes of near, and of ve."""
    head, j = tl.arange(0, HEADS)[None, :, None], tl.arange(0, NEAR)[None, None, :]
    at, inside = w_ptr + head * (2 * W) + j, (head < N) & (j < W)
    of_near = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return of_near, tl.load(at + W, mask=inside, other=0.0).to(tl.float32)


@jit
def _add_values_gates(near_ptr, ve_ptr, of_near, of_ve, t, near_step, ve_step, T, W: tl.constexpr, NEAR: tl.constexpr):
    """(rows, HEADS, 1) sigmoids; and (rows, HEADS, NEAR) twice, what they are made from, once for each head: the
    compiler would lay (rows, 1, NEAR) out as it does ve, and products with it take 32 registers."""
    j = tl.arange(0, NEAR)[None, None, :] + tl.zeros(of_near.shape, tl.int32)
    inside = (t < T) & (j < W)
    near = tl.load(near_ptr + t * near_step + j, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(ve_ptr + t * ve_step + j, mask=inside, other=0.0).to(tl.float32)
    return tl.sigmoid(tl.sum(near * of_near + own * of_ve, 2, keep_dims=True)), near, own


@jit
def _add_values_forward_kernel(
    v_ptr, ve_ptr, near_ptr, w_ptr, y_ptr, v_step, ve_step, near_step, T,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Programs walk the tokens together, ROWS at a time each, whole: a gate is made once."""
    N: tl.constexpr = D // H
    HEADS: tl.constexpr = COLUMNS // H
    head, d = tl.arange(0, HEADS)[None, :, None], tl.arange(0, H)[None, None, :]
    of_near, of_ve = _add_values_weights(w_ptr, N, W, HEADS, NEAR)
    for group in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        t = (group * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None, None]
        at, inside = head * H + d, (t < T) & (head < N)
        v = tl.load(v_ptr + t * v_step + at, mask=inside, other=0.0).to(tl.float32)
        ve = tl.load(ve_ptr + t * ve_step + at, mask=inside, other=0.0).to(tl.float32)
        s, _, _ = _add_values_gates(near_ptr, ve_ptr, of_near, of_ve, t, near_step, ve_step, T, W, NEAR)
        tl.store(y_ptr + t * D + at, (v + 2 * s * ve).to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _add_values_backward_kernel(
    dy_ptr, ve_ptr, near_ptr, w_ptr, dve_ptr, dnear_ptr, partials_ptr, dy_step, ve_step, near_step, T,
    D: tl.constexpr, H: tl.constexpr, W: tl.constexpr, NEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Each program sums its tokens' share of w's gradient into partials (2 N W, programs)."""
    N: tl.constexpr = D // H
    HEADS: tl.constexpr = COLUMNS // H
    head, d, j = tl.arange(0, HEADS)[None, :, None], tl.arange(0, H)[None, None, :], tl.arange(0, NEAR)[None, None, :]
    of_near, of_ve = _add_values_weights(w_ptr, N, W, HEADS, NEAR)
    dof_near, dof_ve = tl.zeros((1, HEADS, NEAR), tl.float32), tl.zeros((1, HEADS, NEAR), tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0)):
        t = (group * ROWS + tl.arange(0, ROWS).to(tl.int64))[:, None, None]
        at, inside = head * H + d, (t < T) & (head < N)
        dy = tl.load(dy_ptr + t * dy_step + at, mask=inside, other=0.0).to(tl.float32)
        ve = tl.load(ve_ptr + t * ve_step + at, mask=inside, other=0.0).to(tl.float32)
        s, near, own = _add_values_gates(near_ptr, ve_ptr, of_near, of_ve, t, near_step, ve_step, T, W, NEAR)
        dlogit = 2 * s * (1 - s) * tl.sum(dy * ve, 2, keep_dims=True)
        dof_near += tl.sum(dlogit * near, 0, keep_dims=True)
        dof_ve += tl.sum(dlogit * own, 0, keep_dims=True)
        dnear = tl.sum(dlogit * of_near, 1, keep_dims=True)
        tl.store(dnear_ptr + t * W + j, dnear.to(dnear_ptr.dtype.element_ty), mask=(t < T) & (j < W))
        # ve's columns that the gates read all lie in head 0
        of_columns = tl.load(w_ptr + W + head * (2 * W) + d, mask=(head < N) & (d < W), other=0.0).to(tl.float32)
        dve = 2 * s * dy + tl.where(head == 0, tl.sum(dlogit * of_columns, 1, keep_dims=True), 0.0)
        tl.store(dve_ptr + t * D + at, dve.to(dve_ptr.dtype.element_ty), mask=inside)
    at = partials_ptr + (head * (2 * W) + j) * tl.num_programs(0) + tl.program_id(0)
    tl.store(at, dof_near, mask=(head < N) & (j < W))
    tl.store(at + W * tl.num_programs(0), dof_ve, mask=(head < N) & (j < W))


def _launch_add_values(kernel, launch, v, ve, near, w, *results):
    inputs, W = [_pointwise_rows(x) for x in (v, ve, near)], near.shape[1]
    kernel[launch[0],](*inputs, w.contiguous(), *results, *(x.stride(0) for x in inputs), len(v),
                       H=v.shape[2], W=W, NEAR=triton.next_power_of_2(W), **launch[1])


@torch.library.custom_op("speedrun::add_values_forward", mutates_args=())
def add_values_forward(v: Tensor, ve: Tensor, near: Tensor, w: Tensor) -> Tensor:
    y = _add_values_empty_result(v, ve, near, w)
    launch = _mix_settings("add_values forward", ve)
    _launch_add_values(_add_values_forward_kernel, launch, v, ve, near, w, y)
    return y


@add_values_forward.register_fake
def _add_values_empty_result(v, ve, near, w):
    return v.new_empty(v.shape)


@torch.library.custom_op("speedrun::add_values_backward", mutates_args=())
def add_values_backward(dy: Tensor, ve: Tensor, near: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dve, dnear, and w's gradient in fp32, flat."""
    dve, dnear, sums = _add_values_empty_gradients(dy, ve, near, w)
    launch = _mix_settings("add_values backward", ve)
    partials = sums.new_empty(len(sums), launch[0])
    _launch_add_values(_add_values_backward_kernel, launch, dy, ve, near, w, dve, dnear, partials)
    _mix_scalars_kernel[len(sums),](partials, sums, launch[0], **MIX_SCALARS_TILES)
    return dve, dnear, sums


@add_values_backward.register_fake
def _add_values_empty_gradients(dy, ve, near, w):
    return ve.new_empty(ve.shape), near.new_empty(near.shape), w.new_empty(w.numel(), dtype=torch.float32)


class _AddValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, ve, near, w):
        ctx.save_for_backward(ve, near, w)
        return add_values_forward(v, ve, near, w)

    @staticmethod
    def backward(ctx, dy):
        w = ctx.saved_tensors[2]
        dve, dnear, sums = add_values_backward(dy, *ctx.saved_tensors)
        return dy, dve, dnear, sums.to(w.dtype).view(w.shape)  # v's gradient is y's, the same tensor


def add_values(v, ve, near, w):
    """V plus gated value embeddings: v[t, h] + 2 sigmoid(w[h, :W] . near[t] + w[h, W:] . ve[t, :W]) ve[t, h].

    v     (T, N, H), N H up to 2048; tokens of any stride
    ve    (T, N H), a token's heads side by side; rows of any stride
    near  (T, W), W up to H: the first columns of the attention's input, rows of any stride
    w     (N, 2 W); all of one floating-point dtype

    Returns (T, N, H), contiguous, fp32 inside and rounded once. Gradients reach all four, from one pass, and are
    bitwise repeatable; v's is the tensor that came in. Raises ValueError.
    """
    T, N, H = v.shape if v.dim() == 3 else (0, 0, 0)
    require(v.numel() > 0 and v.is_floating_point() and ve.shape == (T, N * H),
            f"v must be (T, N, H), floating point, and ve (T, N H), not {tuple(v.shape)} {v.dtype} and "
            f"{tuple(ve.shape)}: view them so")
    W = near.shape[1] if near.dim() == 2 else 0
    require(len(near) == T and 1 <= W <= H and w.shape == (N, 2 * W),
            f"near must be ({T}, W), W up to {H}, and w ({N}, 2 W), not {tuple(near.shape)} and {tuple(w.shape)}: "
            "give each head one weight for each column of near and of ve")
    given = ve, near, w
    require(all((x.dtype, x.device) == (v.dtype, v.device) for x in given),
            f"all inputs must be {v.dtype} on {v.device}, not {[f'{x.dtype} on {x.device}' for x in given]}: "
            "cast and move them alike")
    if not use_kernel(v, ve):
        return add_values_reference(v, ve, near, w)
    _require_kernel_heads(v, "add_values_reference")
    require(N * H <= 2048, f"the kernels take rows of up to 2048, not {N * H}: use add_values_reference "
            "(REFERENCE_OPS=1)")
    return _AddValues.apply(v, ve, near, w)


# === Lookup ===
# Rows of tables, and their gradient added straight into the tables' persistent gradient buffers: a micro-batch touches
# a few percent of the rows, so a dense gradient a lookup (zeros, scatter, then an add) would move many times the bytes.

# A program takes COLUMNS of ROWS rows at a time, all in flight at once, "add" STEPS times. COLUMNS are what one warp
# reads of a row in 16-byte pieces: then each thread holds whole columns and sums them without asking another.
LOOKUP_TILES = {
    "gather": dict(ROWS=4, COLUMNS=256, num_warps=1),
    "add": dict(ROWS=4, STEPS=8, COLUMNS=256, num_warps=1),
    "borders": dict(ROWS=8, COLUMNS=256, num_warps=1),
}


def lookup_gather_reference(rows_T: Tensor, tables: list[Tensor], signs=None) -> list[Tensor]:
    """table[rows] of every table, times sign_table[sign_rows] for signs = (sign_table, sign_rows)."""
    streams = [torch.nn.functional.embedding(rows_T, table) for table in tables]
    return streams if signs is None else [x * torch.nn.functional.embedding(*signs[::-1]) for x in streams]


def lookup_add_reference(grads: list[Tensor], rows_T: Tensor, ds: list[Tensor], signs=None) -> None:
    """grad[rows[t]] += d[t] (times the row of signs) for each grad and its d, in place."""
    for grad_VD, d_TD in zip(grads, ds):
        d_TD = d_TD if signs is None else d_TD * torch.nn.functional.embedding(*signs[::-1])
        grad_VD.index_add_(0, rows_T.long(), d_TD)


@jit
def _lookup_pick(values, which, COUNT: tl.constexpr):
    """values[which] of a tuple"""
    value = values[0]
    for i in tl.static_range(1, COUNT):
        value = tl.where(which == i, values[i], value)
    return value


@jit
def _lookup_place(D: tl.constexpr, COLUMNS: tl.constexpr):
    """Where along the rows this program stands: a program for each block of columns does."""
    return tl.program_id(0) // ((D + COLUMNS - 1) // COLUMNS)


@jit
def _lookup_columns(D: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.program_id(0) % ((D + COLUMNS - 1) // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)


@jit
def _lookup_gather_kernel(
    outs, tables, rows_ptr, signs_ptr, sign_rows_ptr, T,
    PLANES: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):
    place, d = _lookup_place(D, COLUMNS), _lookup_columns(D, COLUMNS)[None, :]
    out = _lookup_pick(outs, tl.program_id(1), PLANES)
    table = _lookup_pick(tables, tl.program_id(1), PLANES)
    t = place * ROWS + tl.arange(0, ROWS)
    inside = (t < T)[:, None] & (d < D)
    row = tl.load(rows_ptr + t, mask=t < T, other=0).to(tl.int64)
    x = tl.load(table + row[:, None] * D + d, mask=inside)
    if signs_ptr is not None:
        row = tl.load(sign_rows_ptr + t, mask=t < T, other=0).to(tl.int64)
        sign = tl.load(signs_ptr + row[:, None] * D + d, mask=inside)
        x = (x.to(tl.float32) * sign.to(tl.float32)).to(x.dtype)
    tl.store(out + t.to(tl.int64)[:, None] * D + d, x, mask=inside)


@jit
def _lookup_add_kernel(
    grads, ds, d_steps, sorted_ptr, order_ptr, signs_ptr, sign_rows_ptr, partial_ptr, T,
    PLANES: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):
    """One span of ROWS * STEPS sorted positions of one plane.

    Runs of equal rows that lie within it are added to their row at once. Of a run that comes in from the span before,
    and of one that goes on into the next, the fp32 sum is left in partial (PLANES, spans, 2, D), at 0 and at 1; a run
    that does both stands at 0. Every sum goes in the order of positions, so results repeat bit for bit.
    """
    span, plane = _lookup_place(D, COLUMNS), tl.program_id(1)
    d = _lookup_columns(D, COLUMNS)
    grad, source = _lookup_pick(grads, plane, PLANES), _lookup_pick(ds, plane, PLANES)
    d_step = _lookup_pick(d_steps, plane, PLANES)
    partial = partial_ptr + (plane.to(tl.int64) * tl.cdiv(T, ROWS * STEPS) + span) * (2 * D) + d
    start, end = span * (ROWS * STEPS), tl.minimum((span + 1) * (ROWS * STEPS), T)
    before = tl.load(sorted_ptr + start - 1, mask=start > 0, other=-1).to(tl.int32)
    after = tl.load(sorted_ptr + end, mask=end < T, other=-1).to(tl.int32)
    last = before
    total = tl.zeros((COLUMNS,), tl.float32)  # so far, of the run that `last` stands for
    for first in range(start, end, ROWS):
        rows, places, xs, signs, olds = (), (), (), (), ()
        for i in tl.static_range(ROWS):
            rows += (tl.load(sorted_ptr + first + i, mask=first + i < end, other=-1).to(tl.int32),)
            places += (tl.load(order_ptr + first + i, mask=first + i < end, other=0).to(tl.int64),)
        rows += (tl.load(sorted_ptr + first + ROWS, mask=first + ROWS < end, other=-1).to(tl.int32),)
        for i in tl.static_range(ROWS):  # everything that is read is under way before anything is summed
            inside = (first + i < end) & (d < D)
            own = (rows[i] != rows[i + 1]) & (rows[i] != before) & (rows[i] != after)
            xs += (tl.load(source + places[i] * d_step + d, mask=inside, other=0.0),)
            olds += (tl.load(grad + rows[i].to(tl.int64) * D + d, mask=inside & own, other=0.0),)
            if signs_ptr is not None:
                sign_row = tl.load(sign_rows_ptr + places[i]).to(tl.int64)
                signs += (tl.load(signs_ptr + sign_row * D + d, mask=inside, other=0.0),)
        for i in tl.static_range(ROWS):
            x, row = xs[i].to(tl.float32), rows[i]
            if signs_ptr is not None:
                x *= signs[i].to(tl.float32)
            total = tl.where(row == last, total + x, x)
            last = row
            if (row != rows[i + 1]) & (first + i < end):
                if row == before:
                    tl.store(partial, total, mask=d < D)
                elif row == after:
                    tl.store(partial + D, total, mask=d < D)
                else:
                    new = (olds[i].to(tl.float32) + total).to(grad.dtype.element_ty)
                    tl.store(grad + row.to(tl.int64) * D + d, new, mask=d < D)


@jit
def _lookup_borders_kernel(
    grads, sorted_ptr, partial_ptr, T,
    PLANES: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr,
):
    """Adds up the run, if there is one, that starts in this span and goes on into the next ones."""
    span, d = _lookup_place(D, COLUMNS), _lookup_columns(D, COLUMNS)[None, :]
    plane, spans = tl.program_id(1), tl.cdiv(T, SPAN)
    end = (span + 1) * SPAN
    row = tl.load(sorted_ptr + end - 1)
    before = tl.load(sorted_ptr + span * SPAN - 1, mask=span > 0, other=-1)
    if (tl.load(sorted_ptr + end) == row) & (before != row):
        partial = partial_ptr + plane.to(tl.int64) * spans * (2 * D) + d
        out = _lookup_pick(grads, plane, PLANES) + row.to(tl.int64) * D + d
        old = tl.load(out, mask=d < D, other=0.0).to(tl.float32)
        total = tl.load(partial + span.to(tl.int64) * (2 * D) + D, mask=d < D, other=0.0)
        at = span + 1
        while at < spans:
            later = at + tl.arange(0, ROWS)
            same = tl.load(sorted_ptr + later * SPAN, mask=later < spans, other=-1) == row
            x = tl.load(partial + later.to(tl.int64)[:, None] * (2 * D), mask=same[:, None] & (d < D), other=0.0)
            total += tl.sum(x, 0)[None, :]
            at = tl.where(tl.sum(same.to(tl.int32), 0) == ROWS, at + ROWS, spans)
        tl.store(out, (old + total).to(out.dtype.element_ty), mask=d < D)


def _launch_lookup(kernel, name, places, planes, D, *arguments, **constants):
    """`places` programs along the rows, for every block of columns of every plane."""
    tiles = LOOKUP_TILES[name]
    columns = min(tiles["COLUMNS"], triton.next_power_of_2(D))
    grid = places * triton.cdiv(D, columns), planes
    kernel[grid](*arguments, PLANES=planes, D=D, **constants, **tiles | dict(COLUMNS=columns))


def _check_signs(signs, T, D):
    if signs is not None:
        require(signs[0].shape[1:] == (D,) and signs[1].shape == (T,) and all(x.is_contiguous() for x in signs),
                f"signs must be a table (rows, {D}) and ({T},) rows of it, contiguous, not {tuple(signs[0].shape)} and "
                f"{tuple(signs[1].shape)}: give each token its row")


def lookup_gather(rows_T: Tensor, tables: list[Tensor], signs=None) -> list[Tensor]:
    """table[rows], (T, D), of every table, in one launch; no gradient.  Reference: lookup_gather_reference. Raises
    ValueError.

    tables  (V, D) each, contiguous, one D and dtype
    signs   None or (sign_table (R, D), sign_rows (T,)): every stream is multiplied by sign_table[sign_rows]
    """
    T, (D, dtype) = len(rows_T), (tables[0].shape[1], tables[0].dtype)
    require(all(t.is_contiguous() and t.shape[1] == D and t.dtype == dtype for t in tables),
            "tables must be contiguous, of one width and dtype, not "
            f"{[(tuple(t.shape), str(t.dtype)) for t in tables]}: look others up apart")
    _check_signs(signs, T, D)
    _require_one_device(rows_T, *tables, *(signs or ()))
    if not use_kernel(rows_T, *tables) or dtype == torch.float64 or T == 0:
        return lookup_gather_reference(rows_T, tables, signs)
    outs = [table.new_empty(T, D) for table in tables]
    _launch_lookup(_lookup_gather_kernel, "gather", triton.cdiv(T, LOOKUP_TILES["gather"]["ROWS"]), len(tables), D,
                   tuple(outs), tuple(tables), rows_T.contiguous(), *(signs or (None, None)), T)
    return outs


def lookup_add_(grads: list[Tensor], order: tuple[Tensor, Tensor], ds: list[Tensor], signs=None) -> None:
    """grad[rows[t]] += d[t] in place for each of `grads` and its d, summed in fp32 and rounded once a row.

    grads  (V, D) each, contiguous, one D and dtype (fp32 or 16 bit)
    order  of the rows, from `lookup_order`
    ds     (T, D) each, one dtype, rows of any stride
    signs  as in `lookup_gather`: d[t] counts times its sign row

    Reference: lookup_add_reference. Raises ValueError.
    """
    sorted_rows, positions = order
    T, D = len(sorted_rows), grads[0].shape[1]
    require(all(d.shape == (T, D) for d in ds),
            f"d must be ({T}, {D}), not {[tuple(d.shape) for d in ds]}: give each row its gradient")
    require(all(grad.is_contiguous() for grad in grads),
            "the gradient buffer must be contiguous, it is added to in place: make it so")
    _check_signs(signs, T, D)
    _require_one_device(*grads, *order, *ds, *(signs or ()))
    if not use_kernel(*grads, *ds) or grads[0].dtype == torch.float64 or T == 0:
        ds, signs = [d[positions] for d in ds], signs and (signs[0], signs[1][positions])
        return lookup_add_reference(grads, sorted_rows, ds, signs)
    grads, ds = tuple(grads), tuple(d if d.stride(1) == 1 else d.contiguous() for d in ds)
    span = LOOKUP_TILES["add"]["ROWS"] * LOOKUP_TILES["add"]["STEPS"]
    spans, planes = triton.cdiv(T, span), len(grads)
    partial = torch.empty(planes, spans, 2, D, dtype=torch.float32, device=sorted_rows.device)
    _launch_lookup(_lookup_add_kernel, "add", spans, planes, D, grads, ds, tuple(d.stride(0) for d in ds), sorted_rows,
                   positions, *(signs or (None, None)), partial, T)
    if spans > 1:
        _launch_lookup(_lookup_borders_kernel, "borders", spans - 1, planes, D, grads, sorted_rows, partial, T,
                       SPAN=span)


def lookup_order(rows_T: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in ascending order, and the positions they come from, ascending within equal rows; (T,) each."""
    return torch.sort(rows_T, stable=True)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_T, planes, signs, *tables):
        ctx.rows, ctx.planes, ctx.signs, ctx.tables = rows_T, planes, signs, tables
        ctx.set_materialize_grads(False)
        parts = [part for table, n in zip(tables, planes) for part in table.chunk(n)]
        return tuple(lookup_gather(rows_T, parts, signs))

    @staticmethod
    def backward(ctx, *ds):
        grads = []
        for table, n in zip(ctx.tables, ctx.planes):
            if table.grad is None:
                table.grad = torch.zeros_like(table)
            grads += table.grad.chunk(n)
        used = [(grad, d) for grad, d in zip(grads, ds) if d is not None]
        if used:
            lookup_add_([grad for grad, _ in used], lookup_order(ctx.rows), [d for _, d in used], ctx.signs)
        return (None,) * (3 + len(ctx.tables))


def lookup(rows_T: Tensor, tables: list[Tensor], planes: list[int], signs=None) -> tuple[Tensor, ...]:
    """The same rows of several leaf tables: one (T, D) tensor for each plane of each table.

    rows_T  (T,) int32 or int64, each below every plane's number of rows: not checked, which would cost a device sync
    tables  (planes V, D) parameters; a table of n planes holds n tables of V rows, one under the other
    signs   None or (sign_table (R, D), sign_rows (T,)): every stream is multiplied by sign_table[sign_rows], +-1,
            which itself gets no gradient

    The backward pass adds to `table.grad` itself (zeros where it is None) and hands autograd nothing for the tables:
    use loss.backward(), not autograd.grad. Repeated rows are summed in fp32, by position. Raises ValueError.
    """
    whole = all(isinstance(n, int) and n > 0 and t.dim() == 2 and len(t) % n == 0 for t, n in zip(tables, planes))
    require(0 < len(tables) == len(planes) and whole,
            f"tables (rows, D) must hold whole planes, not {[tuple(t.shape) for t in tables]} {list(planes)}: pad them")
    require(rows_T.dim() == 1 and rows_T.dtype in (torch.int32, torch.int64),
            f"rows must be (T,), int32 or int64, not {tuple(rows_T.shape)} {rows_T.dtype}: flatten and cast them")
    require(all(t.is_leaf for t in tables), "tables must be leaf tensors, whose .grad can be added to: pass parameters")
    return _Lookup.apply(rows_T, tuple(planes), signs, *tables)


# === Symmetric products ===
# One triangle of tiles is computed, the other is its mirror image.

SYMMETRIC_TILES = {  # card: launch; H200, 2026-11-30, Triton 3.6: xtx of (24, 3072, 768) takes 85 us, cuBLAS 124
    "large": dict(BLOCK=128, BLOCK_K=64, num_warps=4, num_stages=3),
    "small": dict(BLOCK=128, BLOCK_K=32, num_warps=8, num_stages=4),
}


def _use_matrix_kernel(*tensors: Tensor) -> bool:
    """use_kernel, where the tensor cores take the dtype: a GPU's fp32 and fp64 products stay torch's."""
    wide = {torch.float64, torch.float32} if tensors[0].is_cuda else {torch.float64}
    return use_kernel(*tensors) and tensors[0].dtype not in wide


def _check_bank(x: Tensor) -> None:
    require(x.ndim in (2, 3) and x.is_floating_point(), "a product takes a floating-point matrix or a bank of them, "
            f"got {_kind(x)}; flatten the leading dimensions")


def xxt_reference(x_BRC: Tensor) -> Tensor:
    return x_BRC @ x_BRC.mT


def xtx_reference(x_BRC: Tensor) -> Tensor:
    return x_BRC.mT @ x_BRC


def ba_plus_caa_reference(a_BRR: Tensor, beta: float, alpha: float, diagonal: float = 0.0) -> Tensor:
    """beta A + alpha A A^T + diagonal I, summed in fp32 or better and rounded once."""
    a = a_BRR.to(torch.promote_types(a_BRR.dtype, torch.float32))
    out = beta * a + alpha * (a @ a.mT)
    out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out.to(a_BRR.dtype)


@jit
def _symmetric_kernel(x, out, bank_stride, row_stride, depth_stride, size, depth, alpha, beta, diagonal,
                     BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr, NORMALIZE: tl.constexpr,
                     SIZE_POW2: tl.constexpr):
    """One BLOCK x BLOCK tile of X X^T, X (size, depth), written to its place and, transposed, to the mirrored place.

    STEP: alpha A A^T + beta A + diagonal I of a symmetric A = X. NORMALIZE: alpha, beta and diagonal are changed so
    that the result, applied to the raw Y of A = Y Y^T, is what they would make of Y / norm: the trace of A is norm^2,
    so no pass over Y goes into finding the norm or dividing by it.
    """
    pair, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)  # pair = i (i + 1) / 2 + j with j <= i
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)  # the square root is only approximate
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    j = pair - i * (i + 1) // 2
    rows, cols, step = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    x += batch * bank_stride
    out += batch * size * size
    left_at = x + rows[:, None] * row_stride + step[None, :] * depth_stride
    right_at = x + cols[:, None] * row_stride + step[None, :] * depth_stride
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, depth, BLOCK_K):
        keep = (k + step < depth)[None, :]
        left = tl.load(left_at, mask=(rows < size)[:, None] & keep, other=0.0)
        right = tl.load(right_at, mask=(cols < size)[:, None] & keep, other=0.0)
        acc = tl.dot(left, right.T, acc, input_precision="ieee")
        left_at += BLOCK_K * depth_stride
        right_at += BLOCK_K * depth_stride
    keep = (rows < size)[:, None] & (cols < size)[None, :]
    if STEP:
        if NORMALIZE:
            line = tl.arange(0, SIZE_POW2)
            trace = tl.load(x + line * (row_stride + depth_stride), mask=line < size, other=0.0)
            inverse = 1.0 / (1.02 * tl.sqrt(tl.sum(trace.to(tl.float32))) + 1e-6)
            diagonal *= inverse
            beta *= inverse * inverse * inverse
            alpha *= inverse * inverse * inverse * inverse * inverse
        base = tl.load(x + rows[:, None] * row_stride + cols[None, :] * depth_stride, mask=keep, other=0.0)
        acc = alpha * acc + beta * base.to(tl.float32) + tl.where(rows[:, None] == cols[None, :], diagonal, 0.0)
    tile = acc.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * size + cols[None, :], tile, mask=keep)
    if i != j:
        mirrored = (cols < size)[:, None] & (rows < size)[None, :]
        tl.store(out + cols[:, None] * size + rows[None, :], tile.T, mask=mirrored)


def _launch_symmetric(x, alpha=1.0, beta=0.0, diagonal=0.0, step=False, normalize=False):
    """X X^T of one matrix or of each in a bank; the other arguments as in _symmetric_kernel."""
    x_BRC = x if x.ndim == 3 else x[None]
    B, size, depth = x_BRC.shape
    out = torch.empty((B, size, size), dtype=x.dtype, device=x.device)
    if out.numel():
        launch = SYMMETRIC_TILES[card_of(x.device)[0]]
        tiles = triton.cdiv(size, launch["BLOCK"])
        _symmetric_kernel[tiles * (tiles + 1) // 2, B](x_BRC, out, *x_BRC.stride(), size, depth, alpha, beta, diagonal,
                                                      STEP=step, NORMALIZE=normalize,
                                                      SIZE_POW2=triton.next_power_of_2(size), **launch)
    return out if x.ndim == 3 else out[0]


def xxt(x_BRC: Tensor) -> Tensor:
    """X X^T for every matrix of a bank.  Reference: xxt_reference.

    In    x_BRC (B, R, C) or (R, C), floating point, any size and strides
    Out   (B, R, R) or (R, R) in x's dtype, contiguous; summed in fp32, rounded once
    Grad  none: for the optimizer
    Why   half of a symmetric product is a copy of the other half, so only one triangle of tiles is computed
    Raises ValueError
    """
    _check_bank(x_BRC)
    return _launch_symmetric(x_BRC) if _use_matrix_kernel(x_BRC) else xxt_reference(x_BRC)


def xtx(x_BRC: Tensor) -> Tensor:
    """X^T X for every matrix of a bank, (B, C, C); otherwise as xxt.  Reference: xtx_reference."""
    _check_bank(x_BRC)
    return _launch_symmetric(x_BRC.mT) if _use_matrix_kernel(x_BRC) else xtx_reference(x_BRC)


def ba_plus_caa(a_BRR: Tensor, beta: float, alpha: float, diagonal: float = 0.0) -> Tensor:
    """beta A + alpha A A^T + diagonal I for every symmetric A of a bank.  Reference: ba_plus_caa_reference.

    In    a_BRR (B, R, R) or (R, R), symmetric (of any other A the lower triangle of beta A would be mirrored), any R
    Out   as A, contiguous; summed in fp32, rounded once
    Grad  none: for the optimizer
    Raises ValueError
    """
    _check_bank(a_BRR)
    require(a_BRR.shape[-1] == a_BRR.shape[-2], f"A must be square, got {tuple(a_BRR.shape)}; pass X X^T or X^T X")
    if not _use_matrix_kernel(a_BRR):
        return ba_plus_caa_reference(a_BRR, beta, alpha, diagonal)
    return _launch_symmetric(a_BRR, alpha, beta, diagonal, step=True)


# --- Polar Express: the nearest orthogonal matrix by five odd polynomials ---

# Amsel, Persson, Musco, Gower: "The Polar Express" (arXiv 2505.16932); Muon's use of such iterations: Keller Jordan.

POLAR_EXPRESS = (  # (a, b, c) of X <- a X + b A X + c A A X with A = X X^T, one row an iteration
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express_reference(x_BRC: Tensor) -> Tensor:
    """Every operation rounds to x's dtype; plain fp64 in fp64."""
    tall = x_BRC.shape[-2] > x_BRC.shape[-1]
    x = x_BRC / (1.02 * x_BRC.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    x = x if x.ndim == 3 else x[None]
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT
        step = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, step, beta=a) if tall else torch.baddbmm(x, step, x, beta=a)
    return x.view(x_BRC.shape)


def polar_express(x_BRC: Tensor) -> Tensor:
    """The orthogonal factor of every matrix of a bank, approximately.  Reference: polar_express_reference.

    In    x_BRC (B, R, C) or (R, C), floating point, any size; all zeros give zeros
    Out   as x, all singular values near 1 (those far below the largest lag behind); x is left alone
    Grad  none: for the optimizer
    Why   three products an iteration and nothing else. a X is folded into the step matrix as a I, so X <- step X needs
          no copy of X to add to; the norm comes from the first Gram matrix (see _symmetric_kernel)
    Raises ValueError
    """
    _check_bank(x_BRC)
    if not _use_matrix_kernel(x_BRC) or x_BRC.dtype == torch.float16:  # 1 / norm may pass fp16's largest number
        return polar_express_reference(x_BRC)
    tall, x = x_BRC.shape[-2] > x_BRC.shape[-1], x_BRC
    for iteration, (a, b, c) in enumerate(POLAR_EXPRESS):
        gram = _launch_symmetric(x.mT if tall else x)
        step = _launch_symmetric(gram, c, b, a, step=True, normalize=iteration == 0)
        x = x @ step if tall else step @ x
    return x


# === Linear + relu2 and FP8 quantization ===

# --- quantization, one scale a tensor ---

QUANTIZE_TILES = dict(BLOCK=4096, num_warps=8)  # H200, 2026-11-30, Triton 3.6: 22 us for (16384, 768)
QUANTIZE_PARTS = 1024  # programs a tensor, at most: every program of the cast reads all programs' peaks


class QuantizedWeight(NamedTuple):
    """w = w8 * scale, nearly."""

    w8: Tensor  # (F, D) float8_e4m3fn, contiguous
    scale: Tensor  # one fp32 number at a 16-byte boundary: the FP8 products of cuBLAS refuse others


def quantize_reference(x: Tensor, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The scale is max|x| / 448 rounded to bf16, as the record's trainer keeps it, and never 0. Rounding may make it a
    little too small, so x / scale is clamped. Where `peaks` are given, max|x| is the largest of them."""
    limit = torch.finfo(E4M3).max
    x = x.detach().float()
    peak = x.abs().amax() if peaks is None else peaks.amax()
    scale = torch.where(peak == 0, 1.0, (peak.clamp(min=1e-12) / limit).bfloat16().float())
    return (x * (1 / scale)).clamp(-limit, limit).to(E4M3), scale


@jit
def _quantize_peak_kernel(x, peaks, bank_stride, numel, blocks, BLOCK: tl.constexpr):
    """peaks[b, p] = max |x| over every num_programs-th block of tensor b, from the p-th on."""
    batch = tl.program_id(1).to(tl.int64)
    peak = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + batch * bank_stride + at, mask=at < numel, other=0.0)
        peak = tl.maximum(peak, tl.abs(value.to(tl.float32)))
    tl.store(peaks + batch * tl.num_programs(0) + tl.program_id(0), tl.max(peak))


@jit
def _quantize_cast_kernel(x, peaks, x8, cells, bank_stride, numel, blocks, parts, PARTS_POW2: tl.constexpr,
                         BLOCK: tl.constexpr):
    """x8 = e4m3(x / scale); every program finds its tensor's scale from its `parts` peaks, the first one stores it.

    The last blocks come first: whoever found the peaks has left them in the L2 cache.
    """
    batch = tl.program_id(1).to(tl.int64)
    every = tl.arange(0, PARTS_POW2)
    peak = tl.max(tl.load(peaks + batch * parts + every, mask=every < parts, other=0.0))
    scale = tl.div_rn(tl.maximum(peak, 1e-12), 448.0).to(tl.bfloat16).to(tl.float32)
    scale = tl.where(peak == 0.0, 1.0, scale)
    if tl.program_id(0) == 0:
        tl.store(cells + batch * 4, scale)
    inverse = tl.div_rn(1.0, scale)
    for done in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = (blocks - 1 - done) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + batch * bank_stride + at, mask=at < numel, other=0.0).to(tl.float32) * inverse
        tl.store(x8 + batch * numel + at, _to_fp8(value, 448.0), mask=at < numel)


def quantize_bank(w_BFD: Tensor, w8_BFD: Tensor, scales_B4: Tensor) -> None:
    """Quantize every matrix of a bank to e4m3, in place on w8 and scales.  Reference: quantize_reference, one by one.

    In    w_BFD (B, ...) floating point, each w[b] contiguous; a strided choice of matrices, mlp_bank[:, 0], is fine
    Out   w8_BFD (B, ...) float8_e4m3fn, contiguous; scales_B4 (B, 4) fp32, contiguous: w[b] ~ w8[b] * scales[b, 0]; a
          scale has 16 bytes to itself because cuBLAS refuses scales at other addresses
    Raises ValueError where shapes, dtypes or contiguity differ from that
    """
    require(w8_BFD.shape == w_BFD.shape and w8_BFD.dtype == E4M3 and w8_BFD.is_contiguous(),
            f"w8 must be contiguous float8_e4m3fn of w's shape {tuple(w_BFD.shape)}, got {w8_BFD.dtype} "
            f"{tuple(w8_BFD.shape)}; allocate it with torch.empty(w.shape, dtype=E4M3)")
    require(scales_B4.shape == (len(w_BFD), 4) and scales_B4.dtype == torch.float32 and scales_B4.is_contiguous(),
            f"scales must be contiguous fp32 ({len(w_BFD)}, 4), 16 bytes for each matrix, got {scales_B4.dtype} "
            f"{tuple(scales_B4.shape)}; allocate it with torch.empty")
    require(len(w_BFD) == 0 or w_BFD[0].is_contiguous(),
            f"each matrix must be contiguous, got strides {w_BFD.stride()}; pass w.contiguous()")
    _require_one_device(w_BFD, w8_BFD, scales_B4)
    if w_BFD.numel() == 0:
        return
    if not use_kernel(w_BFD, w8_BFD, scales_B4) or w_BFD.dtype == torch.float64:
        for w, w8, cell in zip(w_BFD, w8_BFD, scales_B4):
            w8_new, cell[0] = quantize_reference(w)
            w8.copy_(w8_new)
        return
    numel, blocks = w_BFD[0].numel(), triton.cdiv(w_BFD[0].numel(), QUANTIZE_TILES["BLOCK"])
    peaks_BP = torch.empty(len(w_BFD), min(blocks, QUANTIZE_PARTS), dtype=torch.float32, device=w_BFD.device)
    _quantize_peak_kernel[peaks_BP.shape[::-1]](w_BFD, peaks_BP, w_BFD.stride(0), numel, blocks, **QUANTIZE_TILES)
    _launch_quantize_cast(w_BFD, peaks_BP, w8_BFD, scales_B4)


def _launch_quantize_cast(w_BFD, peaks_BP, w8_BFD, scales_B4):
    """quantize_bank, once each w[b]'s largest number is among peaks[b]."""
    numel, parts = w_BFD[0].numel(), peaks_BP.shape[1]
    blocks = triton.cdiv(numel, QUANTIZE_TILES["BLOCK"])
    _quantize_cast_kernel[min(blocks, QUANTIZE_PARTS), len(w_BFD)](
        w_BFD, peaks_BP, w8_BFD, scales_B4, w_BFD.stride(0), numel, blocks, parts,
        PARTS_POW2=triton.next_power_of_2(parts), **QUANTIZE_TILES)


def _launch_quantize(x, peaks=None):
    """quantize on the GPU, callable from within other launches; peaks: as mlp takes them."""
    x = x.detach().contiguous()
    x8 = torch.empty(x.shape, dtype=E4M3, device=x.device)
    cells = torch.empty((1, 4), dtype=torch.float32, device=x.device)
    if peaks is None or x.numel() == 0:
        quantize_bank(x[None], x8[None], cells)
    else:
        _launch_quantize_cast(x[None], peaks[None], x8[None], cells)
    return x8, cells[0, 0]


@torch.library.custom_op("speedrun::quantize", mutates_args=())
def _quantize_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    return _launch_quantize(x)


@_quantize_tensor.register_fake
def _(x):
    return torch.empty(x.shape, dtype=E4M3, device=x.device), x.new_empty((), dtype=torch.float32)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x8, scale) with x ~ x8 * scale: x8 e4m3, contiguous, scale a 0-d fp32 tensor at a 16-byte boundary.

    For tests and timing: the model's products call what it launches. x floating point, any shape and strides (copied
    where not contiguous). No gradient: the result is detached. Reference: quantize_reference
    """
    if not use_kernel(x) or x.dtype == torch.float64:
        return quantize_reference(x)
    return _quantize_tensor(x.detach())


# --- linear ---

PRODUCT_TILES = dict(BLOCK_T=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)  # of a large card. H200,
# 2026-11-30, Triton 3.6, T = 49152: 251 us for the gradient that queries, keys and values give their input, 310 for
# 3072 -> 768, 0.94 and 0.99 of cuBLAS's; in a step as long as cuBLAS's, without a memset before each launch


@jit
def _product_kernel(left, right, more_left, more_right, out, T, N, K, K_MORE, TRANSPOSED: tl.constexpr,
                    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """out (T, N) = left (T, K) right (K, N) [+ more_left (T, K_MORE) more_right (K_MORE, N)], rounded once. TRANSPOSED:
    right is (N, K). A program walks every num_programs-th tile; tiles leave in two halves to halve the staging memory.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    tiles_N = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T) * tiles_N, tl.num_programs(0), flatten=True):
        t, n = tile // tiles_N * BLOCK_T, tile % tiles_N * BLOCK_N
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            factor = right.load([n, k]).T if TRANSPOSED else right.load([k, n])
            acc = tl.dot(left.load([t, k]), factor, acc, input_precision="ieee")
        if more_left is not None:
            for k in range(0, K_MORE, BLOCK_K):
                acc = tl.dot(more_left.load([t, k]), more_right.load([k, n]), acc, input_precision="ieee")
        halves = acc.reshape(BLOCK_T, 2, HALF).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            out.store([t, n + half * HALF], halves[half].to(out.dtype))


def _check_product(lefts_TK, rights_KN, transposed):
    require(1 <= len(lefts_TK) == len(rights_KN) <= 2 - transposed, "product sums one or two products, transposed one, "
            f"got {len(lefts_TK)} lefts and {len(rights_KN)} rights; call it again for the others")
    first, last, operands = lefts_TK[0], rights_KN[-1], (*lefts_TK, *rights_KN)
    fit = first.is_floating_point() and all(x.dim() == 2 and x.dtype == first.dtype for x in operands) and all(
        len(left) == len(first) and 0 < left.shape[1] == right.shape[transposed]
        and right.shape[not transposed] == last.shape[not transposed] for left, right in zip(lefts_TK, rights_KN))
    require(fit, "products take lefts (T, K) and rights (K, N), transposed (N, K), K at least 1, of one T, N and "
            f"floating-point dtype, got {[_kind(x) for x in operands]}; flatten, slice or cast them to fit")
    _require_one_device(*operands)


@torch.library.custom_op("speedrun::product", mutates_args=())
def product(lefts_TK: list[Tensor], rights_KN: list[Tensor], transposed: bool = False) -> Tensor:
    """The sum (T, N) of one or two products left (T, K) right (K, N), in one accumulator; transposed: of one, its right
    given as (N, K). The library's on small cards, and for a GPU's fp32. Autograd does not go through it,
    but through linear, heads and mlp, which use it. Raises ValueError."""
    _check_product(lefts_TK, rights_KN, transposed)
    (card, processors), T, N = card_of(lefts_TK[0].device), len(lefts_TK[0]), rights_KN[0].shape[not transposed]
    if card == "small" or not _use_matrix_kernel(lefts_TK[0]):
        out_TN = lefts_TK[0] @ (rights_KN[0].mT if transposed else rights_KN[0])
        for left_TK, right_KN in zip(lefts_TK[1:], rights_KN[1:]):
            out_TN.addmm_(left_TK, right_KN)
        return out_TN
    out_TN, launch = aligned_empty(lefts_TK[0], T, N), dict(PRODUCT_TILES)
    if out_TN.numel() == 0:
        return out_TN
    block_t, block_n, block_k = launch["BLOCK_T"], launch["BLOCK_N"], launch["BLOCK_K"]
    programs = min(processors, triton.cdiv(T, block_t) * triton.cdiv(N, block_n))
    operands, depths = [], []
    for left_TK, right_KN in zip(lefts_TK, rights_KN):
        operands += [TensorDescriptor.from_tensor(aligned(left_TK), [block_t, block_k]),
                     TensorDescriptor.from_tensor(aligned(right_KN), [block_n, block_k] if transposed else
                                                  [block_k, block_n])]
        depths.append(left_TK.shape[1])
    operands, depths = (operands + [None, None])[:4], (depths + [None])[:2]
    _product_kernel[programs,](*operands, TensorDescriptor.from_tensor(out_TN, [block_t, block_n // 2]), T, N, *depths,
                               TRANSPOSED=transposed, **launch)
    return out_TN


@product.register_fake
def _(lefts_TK, rights_KN, transposed=False):
    return aligned_empty(lefts_TK[0], len(lefts_TK[0]), rights_KN[0].shape[not transposed])


def _weight_gradient(grad_FD, dy_TF, x_TD):
    """dy^T x, or None after it was added to grad."""
    if grad_FD is None:
        return dy_TF.mT @ x_TD
    grad_FD.addmm_(dy_TF.mT, x_TD)


def _check_grads(grads, *weights):
    kinds, given = [_kind(w) for w in weights], [_kind(grad) for grad in grads]
    require(len(given) == len(kinds) and all(own in ("None", kind) for own, kind in zip(given, kinds)),
            f"grads must be one for each of {kinds}, of its shape and dtype, got {given}; give None for autograd")
    _require_one_device(*weights, *grads)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, grads, x_TD, *weights):
        ctx.grads = grads
        ctx.save_for_backward(x_TD, *weights)
        return tuple(product([x_TD], [w_FD], transposed=True) for w_FD in weights)

    @staticmethod
    def backward(ctx, *dys):
        x_TD, *weights = ctx.saved_tensors
        dx_TD = None
        if ctx.needs_input_grad[1]:
            dx_TD = product(list(dys), weights)
        dws = (_weight_gradient(grad, dy, x_TD) if need else None
               for grad, dy, need in zip(ctx.grads, dys, ctx.needs_input_grad[2:]))
        return None, dx_TD, *dws


def linear(x_TD: Tensor, weights: tuple[Tensor, ...], grads: tuple[Tensor | None, ...] | None = None) -> tuple:
    """x w^T for each weight (F, D), all of one dtype: (T, F) each.

    grads: where each weight's gradient is added in place, by the product itself, instead of going to autograd; None
    for autograd. x's gradients meet in one product. Off the GPU, and with REFERENCE_OPS=1, autograd does it all. Raises
    ValueError.
    """
    require(1 <= len(weights) <= 2, f"linear takes one weight or two, not {len(weights)}: call it again for the others")
    for w_FD in weights:
        _check_product([x_TD], [w_FD], True)
    grads = (None,) * len(weights) if grads is None else grads
    _check_grads(grads, *weights)
    if not use_kernel(x_TD):
        return tuple(torch.nn.functional.linear(x_TD, w_FD) for w_FD in weights)
    return _Linear.apply(grads, x_TD, *weights)


# --- a product whose results are normed and turned heads ---

def heads_reference(n_TD, w_ED, cos, sin, *, heads, paired, key_offset):
    """What `heads` computes, in eager torch."""
    qk, v = (torch.nn.functional.linear(n_TD, w) for w in w_ED.tensor_split([2 * len(w_ED) // 3]))
    qk, v = qk.view(len(n_TD), 2, heads, -1), v.view(len(n_TD), heads, -1)
    return *norm_rotary_reference(qk, cos, sin, paired=paired, key_offset=key_offset), v


HEADS_TILES = dict(BLOCK_T=128, BLOCK_K=64, WAVES=2, num_warps=4, num_stages=3)  # H200, 2026-11-30, Triton 3.6, in
# a step, T = 49152, six heads of 128: 321 to 329 us; cuBLAS's two products and norm_rotary took 360


@jit
def _halves(x):
    """The left and the right half of the columns of x."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@jit
def _head_angles(cos_ptr, sin_ptr, t, head, inside, H: tl.constexpr, STREAMS: tl.constexpr):
    """cos and sin (rows, H/4) of the pairs in the first half of a token's head; 1 and 0 where not inside."""
    at = (t * STREAMS + head % STREAMS)[:, None] * (H // 4) + tl.arange(0, H // 4)[None, :]
    cos = tl.load(cos_ptr + at, mask=inside[:, None], other=1.0).to(tl.float32)
    return cos, tl.load(sin_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)


@jit
def _heads_kernel(left, right, out, scale_ptr, cos_ptr, sin_ptr, T, K, N: tl.constexpr, H: tl.constexpr,
                  STREAMS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """out (3, T, N H) from left (T, K) right^T (3 N H, K): queries and keys normed and turned head by head, values as
    they are. Programs walk the tiles, a head of BLOCK_T tokens each."""
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T) * (3 * N), tl.num_programs(0)):
        t0, row = tile // (3 * N) * BLOCK_T, tile % (3 * N)
        acc = tl.zeros((BLOCK_T, H), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(left.load([t0, k]), right.load([row * H, k]).T, acc, input_precision="ieee")
        part, head = row // N, row % N
        t = t0 + tl.arange(0, BLOCK_T)
        turns = (t < T) & (part < 2)
        scale = _pointwise_rms_scale(acc, H)
        tl.store(scale_ptr + t * (2 * N) + row, scale, mask=turns)
        turned, still = _halves(acc * tl.where(turns, scale, 1.0)[:, None])
        cos, sin = _head_angles(cos_ptr, sin_ptr, t, head, turns, H, STREAMS)
        turned = _rotary_turn(turned, cos, sin)
        out.store([part, t0, head * H], tl.reshape(turned.to(out.dtype), (1, BLOCK_T, H // 2)))
        out.store([part, t0, head * H + H // 2], tl.reshape(still.to(out.dtype), (1, BLOCK_T, H // 2)))


@jit
def _heads_backward_kernel(out_ptr, dq_ptr, dk_ptr, dqk_ptr, scale_ptr, cos_ptr, sin_ptr, T, N: tl.constexpr,
                           H: tl.constexpr, STREAMS: tl.constexpr, ROWS: tl.constexpr):
    """The gradient of heads before norm and turn from what they became. Rows are heads of queries (programs (i, 0)) or
    of keys (programs (i, 1)). A turn leaves a head's mean of x * dx as it was."""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, head, d = row // N, row % N, tl.arange(0, H)[None, :]
    inside, at = (t < T)[:, None], row.to(tl.int64)[:, None] * H + d
    x = tl.load(out_ptr + part.to(tl.int64) * T * (N * H) + at, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        dx = tl.load(dq_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        dx = tl.load(dk_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + t * (2 * N) + part * N + head, mask=t < T, other=0.0)[:, None]
    cos, sin = _rotary_tables(cos_ptr, sin_ptr, t, head, t < T, H, STREAMS)
    dx = scale * _rotary_turn(dx - x * (tl.sum(x * dx, 1) / H)[:, None], cos, -sin)
    target = (t.to(tl.int64) * 2 + part) * N + head
    tl.store(dqk_ptr + target[:, None] * H + d, dx.to(dqk_ptr.dtype.element_ty), mask=inside)


@torch.library.custom_op("speedrun::heads_forward", mutates_args=())
def heads_forward(n_TD: Tensor, w_ED: Tensor, cos: Tensor, sin: Tensor, heads: int, paired: bool
                  ) -> tuple[Tensor, Tensor]:
    """(3, T, N, H): queries and keys, normed and turned, and values; (T, 2 N) fp32: 1 / rms of queries and keys."""
    out, scale = _heads_empty_results(n_TD, w_ED, cos, sin, heads, paired)
    _, T, N, H = out.shape
    launch, tiles = dict(HEADS_TILES), triton.cdiv(T, HEADS_TILES["BLOCK_T"]) * 3 * N
    block_t, block_k = launch["BLOCK_T"], launch["BLOCK_K"]
    _heads_kernel[min(tiles, card_of(n_TD.device)[1] * launch.pop("WAVES")),](
        TensorDescriptor.from_tensor(aligned(n_TD), [block_t, block_k]),
        TensorDescriptor.from_tensor(aligned(w_ED), [H, block_k]),
        TensorDescriptor.from_tensor(out.view(3, T, N * H), [1, block_t, H // 2]), scale, cos.contiguous(),
        sin.contiguous(), T, n_TD.shape[1], N=N, H=H, STREAMS=1 + paired, **launch)
    return out, scale


@heads_forward.register_fake
def _heads_empty_results(n_TD, w_ED, cos, sin, heads, paired):
    T, width = len(n_TD), len(w_ED) // (3 * heads)
    return n_TD.new_empty(3, T, heads, width), n_TD.new_empty(T, 2 * heads, dtype=torch.float32)


@torch.library.custom_op("speedrun::heads_backward", mutates_args=())
def heads_backward(dq: Tensor, dk: Tensor, out: Tensor, scale: Tensor, cos: Tensor, sin: Tensor, paired: bool
                   ) -> Tensor:
    """(T, 2, N, H), the gradient of queries and keys before norm and turn; out, scale: heads_forward's results."""
    dqk, (_, T, N, H) = _heads_empty_gradient(dq, dk, out, scale, cos, sin, paired), out.shape
    tiles = POINTWISE_TILES["norm_rotary backward"]
    _heads_backward_kernel[triton.cdiv(T * N, tiles["ROWS"]), 2](
        out, dq.contiguous(), dk.contiguous(), dqk, scale, cos.contiguous(), sin.contiguous(), T, N=N, H=H,
        STREAMS=1 + paired, **tiles)
    return dqk


@heads_backward.register_fake
def _heads_empty_gradient(dq, dk, out, scale, cos, sin, paired):
    _, T, N, H = out.shape
    return out.new_empty(T, 2, N, H)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n_TD, w_ED, grad_ED, cos, sin, heads, paired):
        out, scale = heads_forward(n_TD, w_ED, cos, sin, heads, paired)
        ctx.save_for_backward(n_TD, w_ED, out, scale, cos, sin)
        ctx.grad_ED, ctx.paired = grad_ED, paired
        return out.unbind()

    @staticmethod
    def backward(ctx, dq, dk, dv):
        n_TD, w_ED, *made = ctx.saved_tensors
        dys = [dy.reshape(len(n_TD), -1) for dy in (heads_backward(dq, dk, *made, ctx.paired), dv)]
        parts = [dy.shape[1] for dy in dys]
        dn_TD = product(dys, list(w_ED.split(parts))) if ctx.needs_input_grad[0] else None
        dw_ED = None
        if ctx.needs_input_grad[1]:
            grads = (None, None) if ctx.grad_ED is None else ctx.grad_ED.split(parts)
            dws = [_weight_gradient(grad, dy, n_TD) for grad, dy in zip(grads, dys)]
            dw_ED = torch.cat(dws) if ctx.grad_ED is None else None
        return dn_TD, dw_ED, None, None, None, None, None


def heads(n_TD, w_ED, cos, sin, *, heads: int, paired: bool, key_offset: bool, grad=None) -> tuple:
    """Attention's queries, keys and values (T, N, H) from its input: a product, then norm_rotary of the first two.

    n_TD (T, D); w_ED (3 N H, D), the weights of queries, keys and values; cos, sin, paired and key_offset: see
    norm_rotary, also for the direction of the turn and the norm's eps, NORM_EPS; grad: where w_ED's gradient is added,
    see `linear`. Where it can, the product norms and turns what it writes: without a key offset (which leaves out half
    of the last key), on a large card, for heads of 16 to 128. Its gradients are right only where cos^2 + sin^2 = 1, as
    in rotary tables: the norm's is made from heads that have turned. Raises ValueError.
    """
    require(isinstance(heads, int) and heads > 0, f"heads must be an int from 1 on, not {heads}: count the queries'")
    T, width = len(n_TD), len(w_ED) // (3 * heads)
    require(n_TD.dim() == w_ED.dim() == 2 and w_ED.shape == (3 * heads * width, n_TD.shape[1]) and n_TD.numel() > 0
            and n_TD.dtype == w_ED.dtype and n_TD.is_floating_point() and width > 0 and width % 4 == 0,
            f"heads takes n (T, D) and weights (3 x {heads} x head dim, D) of its floating-point dtype, head dim a "
            f"multiple of 4, not {_kind(n_TD)} and {_kind(w_ED)}: stack those of queries, keys, values")
    _check_grads((grad,), w_ED)
    _require_one_device(n_TD, w_ED)
    _check_rotary(cos, sin, n_TD.device, T, heads, width, paired)
    if not use_kernel(n_TD):
        return heads_reference(n_TD, w_ED, cos, sin, heads=heads, paired=paired, key_offset=key_offset)
    large = _use_matrix_kernel(n_TD) and card_of(n_TD.device)[0] == "large"
    if large and not key_offset and width in (16, 32, 64, 128):
        return _Heads.apply(n_TD, w_ED, grad, cos, sin, heads, paired)
    parts = [2 * heads * width, heads * width]
    qk, v = linear(n_TD, w_ED.split(parts), None if grad is None else grad.split(parts))
    q, k = norm_rotary(qk.view(T, 2, heads, width), cos, sin, paired=paired, key_offset=key_offset)
    return q, k, v.view(T, heads, width)


# --- linear + relu^2, forward and backward ---

MLP_TILES = {  # (card, product): launch; WAVES: programs a multiprocessor. H200, 2026-11-30, Triton 3.6, T = 16384,
    # 768 -> 3072: fp8 73 us, up 118, dpre 157 (cuBLAS's bare product: 72, 115, 115)
    ("large", "fp8"): dict(BLOCK_T=128, BLOCK_F=256, BLOCK_D=128, WAVES=1, FLATTEN=True, num_warps=8, num_stages=4),
    ("large", "up"): dict(BLOCK_T=128, BLOCK_F=128, BLOCK_D=64, WAVES=2, FLATTEN=True, num_warps=4, num_stages=3),
    ("large", "dpre"): dict(BLOCK_T=128, BLOCK_F=128, BLOCK_D=64, WAVES=2, FLATTEN=False, num_warps=4, num_stages=3),
    ("small", "fp8"): dict(BLOCK_T=128, BLOCK_F=128, BLOCK_D=64, WAVES=1, FLATTEN=False, num_warps=8, num_stages=3),
    ("small", "up"): dict(BLOCK_T=128, BLOCK_F=128, BLOCK_D=32, WAVES=1, FLATTEN=False, num_warps=8, num_stages=3),
    ("small", "dpre"): dict(BLOCK_T=128, BLOCK_F=128, BLOCK_D=32, WAVES=1, FLATTEN=False, num_warps=8, num_stages=3),
}


def mlp_reference(n_TD: Tensor, w_fc_FD: Tensor, w_proj_FD: Tensor,
                  fp8: QuantizedWeight | None = None, peaks: Tensor | None = None) -> Tensor:
    """Every operation rounds to n's dtype. FP8 is emulated: the up product's value is that of the quantized operands,
    its gradient that of the unquantized ones (straight-through)."""
    pre_TF = n_TD @ w_fc_FD.mT
    if fp8 is not None:
        n8, n_scale = quantize_reference(n_TD, peaks)
        exact = torch.promote_types(n_TD.dtype, torch.float32)
        value = (n8.to(exact) @ fp8.w8.to(exact).mT * (n_scale * fp8.scale)).to(n_TD.dtype)
        pre_TF = pre_TF - pre_TF.detach() + value
    relu_TF = pre_TF.relu()
    return (relu_TF * relu_TF) @ w_proj_FD


@jit
def _mlp_view(x, rows, columns, line, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile view of x: x itself where the host made the copy engine's descriptor, else one over plain pointers."""
    if isinstance(x, tl.tensor_descriptor):
        return x
    else:
        return tl.make_tensor_descriptor(x, [rows, columns], [line, 1], [ROWS, COLUMNS])


@jit
def _mlp_kernel(left, right, post, out, left_scale, right_scale, left_line, right_line, out_line, T, F, D,
               BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr,
               BACKWARD: tl.constexpr, FLATTEN: tl.constexpr):
    """out (T, F) from the product left (T, D) right^T (F, D), each program walking every num_programs-th tile.

    Forward: relu(product)^2, FP8 operands descaled first. BACKWARD: product * 2 sqrt(post), which is the gradient of
    relu(pre)^2: post holds relu(pre) to half the relative error that storing relu(pre) itself would cost. Tiles leave
    in two halves to halve the staging memory. post has out's strides.
    """
    HALF: tl.constexpr = BLOCK_F // 2
    left = _mlp_view(left, T, D, left_line, BLOCK_T, BLOCK_D)
    right = _mlp_view(right, F, D, right_line, BLOCK_F, BLOCK_D)
    out = _mlp_view(out, T, F, out_line, BLOCK_T, HALF)
    if BACKWARD:
        post = _mlp_view(post, T, F, out_line, BLOCK_T, HALF)
    scale = tl.load(left_scale) * tl.load(right_scale) if FP8 else 1.0
    tiles_F = tl.cdiv(F, BLOCK_F)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, BLOCK_T) * tiles_F, tl.num_programs(0), flatten=FLATTEN):
        t, f = tile // tiles_F * BLOCK_T, tile % tiles_F * BLOCK_F
        acc = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
        for d in range(0, D, BLOCK_D):
            acc = tl.dot(left.load([t, d]), right.load([f, d]).T, acc, input_precision="ieee")
        halves = acc.reshape(BLOCK_T, 2, HALF).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            if BACKWARD:
                value = halves[half] * (2.0 * tl.sqrt(post.load([t, f + half * HALF]).to(tl.float32)))
            else:
                value = tl.maximum(halves[half] * scale, 0.0)
                value *= value
            out.store([t, f + half * HALF], value.to(out.dtype))


def _launch_mlp(which, left_TD, right_FD, post_TF=None, scales=(None, None), dtype=None):
    """relu(left right^T)^2, or with post the backward product, as _mlp_kernel says; which: of MLP_TILES."""
    card, processors = card_of(left_TD.device)
    launch = dict(MLP_TILES[card, which])
    (T, D), F = left_TD.shape, len(right_FD)
    out_TF = aligned_empty(left_TD, T, F, dtype=dtype)
    if out_TF.numel() == 0:
        return out_TF
    block_t, block_f, block_d = launch["BLOCK_T"], launch["BLOCK_F"], launch["BLOCK_D"]
    programs = min(processors * launch.pop("WAVES"), triton.cdiv(T, block_t) * triton.cdiv(F, block_f))
    if post_TF is not None and post_TF.stride() != out_TF.stride():
        post_TF = aligned_empty(out_TF, T, F).copy_(post_TF)
    half = [block_t, block_f // 2]
    views = [(aligned(left_TD), [block_t, block_d]), (aligned(right_FD), [block_f, block_d]), (post_TF, half),
             (out_TF, half)]
    left, right, post, out = (x if x is None or card == "small" else TensorDescriptor.from_tensor(x, block)
                              for x, block in views)
    _mlp_kernel[programs,](left, right, post, out, *scales, *(views[i][0].stride(0) for i in (0, 1, 3)), T, F, D,
                          FP8=which == "fp8", BACKWARD=post is not None, **launch)
    return out_TF


@torch.library.custom_op("speedrun::mlp_up", mutates_args=())
def mlp_up(n_TD: Tensor, w_fc_FD: Tensor, w8_FD: Tensor | None, w_scale: Tensor | None,
           peaks: Tensor | None = None) -> Tensor:
    """relu(n w_fc^T)^2, through FP8 where w8 is given. Opaque to torch.compile, as every launch of the model is."""
    if w8_FD is None:
        return _launch_mlp("up", n_TD, w_fc_FD)
    n8_TD, n_scale = _launch_quantize(n_TD, peaks)
    return _launch_mlp("fp8", n8_TD, w8_FD, scales=(n_scale, w_scale), dtype=n_TD.dtype)


@mlp_up.register_fake
def _(n_TD, w_fc_FD, w8_FD, w_scale, peaks=None):
    return aligned_empty(n_TD, len(n_TD), len(w_fc_FD))


@torch.library.custom_op("speedrun::mlp_dpre", mutates_args=())
def mlp_dpre(g_TD: Tensor, w_proj_FD: Tensor, post_TF: Tensor) -> Tensor:
    """The gradient of pre from the output's gradient g."""
    return _launch_mlp("dpre", g_TD, w_proj_FD, post_TF)


@mlp_dpre.register_fake
def _(g_TD, w_proj_FD, post_TF):
    return aligned_empty(g_TD, len(g_TD), len(w_proj_FD))


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n_TD, w_fc_FD, w_proj_FD, w8_FD, w_scale, grads, peaks):
        post_TF = mlp_up(n_TD, w_fc_FD, w8_FD, w_scale, peaks)
        ctx.save_for_backward(n_TD, w_fc_FD, w_proj_FD, post_TF)
        ctx.grads = grads
        return product([post_TF], [w_proj_FD])

    @staticmethod
    def backward(ctx, g_TD):
        n_TD, w_fc_FD, w_proj_FD, post_TF = ctx.saved_tensors
        want_n, want_fc, want_proj = ctx.needs_input_grad[:3]
        dw_proj_FD = _weight_gradient(ctx.grads[1], post_TF, g_TD) if want_proj else None
        dpre_TF = mlp_dpre(g_TD, w_proj_FD, post_TF) if want_n or want_fc else None
        dw_fc_FD = _weight_gradient(ctx.grads[0], dpre_TF, n_TD) if want_fc else None
        dn_TD = product([dpre_TF], [w_fc_FD]) if want_n else None
        return dn_TD, dw_fc_FD, dw_proj_FD, None, None, None, None


def mlp(n_TD: Tensor, w_fc_FD: Tensor, w_proj_FD: Tensor, fp8: QuantizedWeight | None = None,
        grads: tuple[Tensor | None, Tensor | None] = (None, None), peaks: Tensor | None = None) -> Tensor:
    """relu(n w_fc^T)^2 w_proj.  Reference: mlp_reference.

    In    n_TD (T, D); w_fc_FD, w_proj_FD (F, D); one floating-point dtype, any T, D, F and strides. fp8: w_fc quantized
          by quantize_bank; the up product then runs in e4m3, with n quantized by its own maximum, the largest of
          `peaks` where they are given (fp32, of one dimension; see mix). grads: see linear
    Out   (T, D) in n's dtype
    Grad  to n, w_fc and w_proj, all from the unquantized operands (straight-through). Kept for it: n and
          post = relu(pre)^2, nothing of pre (see _mlp_kernel)
    Raises ValueError
    """
    require(n_TD.ndim == w_fc_FD.ndim == 2 and w_fc_FD.shape == w_proj_FD.shape and n_TD.shape[1] == w_fc_FD.shape[1],
            f"mlp takes n (T, D) and two weights (F, D), got {tuple(n_TD.shape)}, {tuple(w_fc_FD.shape)} and "
            f"{tuple(w_proj_FD.shape)}; flatten n's leading dimensions and store w_proj as (F, D)")
    require(n_TD.is_floating_point() and n_TD.dtype == w_fc_FD.dtype == w_proj_FD.dtype, "mlp takes operands of one "
            f"floating-point dtype, got {n_TD.dtype}, {w_fc_FD.dtype} and {w_proj_FD.dtype}; convert n to the weights'")
    require(fp8 is None or fp8.w8.shape == w_fc_FD.shape, "the quantized weight must have w_fc's shape "
            f"{tuple(w_fc_FD.shape)}, got {tuple(fp8.w8.shape) if fp8 else None}; quantize w_fc itself")
    require(peaks is None or peaks.ndim == 1 and peaks.dtype == torch.float32 and peaks.is_contiguous(),
            "peaks must be contiguous fp32 of one dimension: take them from mix(..., peaks=True)")
    _check_grads(grads, w_fc_FD, w_proj_FD)
    _require_one_device(n_TD, w_fc_FD, w_proj_FD, *(fp8 or ()), peaks)
    if not _use_matrix_kernel(n_TD, w_fc_FD, w_proj_FD):
        return mlp_reference(n_TD, w_fc_FD, w_proj_FD, fp8, peaks)
    return _Mlp.apply(n_TD, w_fc_FD, w_proj_FD, *(fp8 or (None, None)), grads, peaks)


# === Gates ===
# T tokens · D model dim · F hidden units · L lanes, few of both. The layers meet within a program: apart, their small
# products and what lies between them cost a launch each, and more passes over x's rows than the one that is needed.

# WAVES: programs a multiprocessor, which walk the tokens together. Chosen by registers and shared memory, no more.
GATES_TILES = {
    "forward": dict(ROWS=128, BLOCK_D=64, num_warps=8, num_stages=4),
    "backward": dict(ROWS=64, BLOCK_D=64, WAVES=2, num_warps=4, num_stages=3),  # large cards, up to 64 lanes
    "backward, tight": dict(ROWS=32, BLOCK_D=64, WAVES=2, num_warps=8, num_stages=3),
    "sums": dict(BLOCK=8192, num_warps=8),
}


def gates_reference(x_TD, w1_FD, w2_LF, b2_L, scale, dtype=None):
    """What `gates` computes, in eager torch; every operation rounds to x's dtype."""
    linear, gelu = torch.nn.functional.linear, torch.nn.functional.gelu
    scale = scale.to(x_TD.dtype) if isinstance(scale, Tensor) else scale
    return ((linear(gelu(linear(x_TD, w1_FD)), w2_LF) + b2_L) * scale).to(dtype or x_TD.dtype)


@jit
def _gates_gelu(h):
    """gelu(h), which is h times the normal distribution's integral up to h, and its slope there.

    The integral to 8e-8 by one exponential, which the slope needs too: Abramowitz and Stegun, 7.1.26.
    """
    t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(h))
    bell = tl.exp(-0.5 * h * h)
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail *= 0.5 * bell
    below = tl.where(h < 0.0, tail, 1.0 - tail)
    return h * below, below + h * (0.3989422804014327 * bell)


@jit
def _gates_scale(scale_ptr, factor, DTYPE: tl.constexpr):
    """What multiplies the gates: the tensor's number, rounded to DTYPE, where there is one, else factor."""
    scale = factor
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(DTYPE).to(tl.float32)
    return scale


@jit
def _gates_forward_kernel(
    x_ptr, w1_ptr, w2_ptr, b2_ptr, scale_ptr, gates_ptr, hidden_ptr, factor, x_step, T,
    D: tl.constexpr, F: tl.constexpr, L: tl.constexpr, LANES: tl.constexpr, PITCH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """ROWS tokens: hidden (T, F) as the backward pass reads it, gates (T, L) in rows of PITCH."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f, lane, inside = tl.arange(0, F), tl.arange(0, LANES), (t < T)[:, None]
    acc = tl.zeros((ROWS, F), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        x = tl.load(x_ptr + t[:, None] * x_step + d, mask=inside & (d < D), other=0.0)
        w1 = tl.load(w1_ptr + f[:, None] * D + d, mask=d < D, other=0.0)
        acc = tl.dot(x, w1.T, acc, input_precision="ieee")
    hidden = acc.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + t[:, None] * F + f[None, :], hidden, mask=inside)
    value, _ = _gates_gelu(hidden.to(tl.float32))
    w2 = tl.load(w2_ptr + lane[:, None] * F + f[None, :], mask=lane[:, None] < L, other=0.0)
    b2 = tl.load(b2_ptr + lane, mask=lane < L, other=0.0).to(tl.float32)
    gates = tl.dot(value.to(hidden.dtype), w2.T, input_precision="ieee") + b2[None, :]
    gates *= _gates_scale(scale_ptr, factor, hidden.dtype)
    at = t[:, None] * PITCH + lane[None, :]
    tl.store(gates_ptr + at, gates.to(gates_ptr.dtype.element_ty), mask=inside & (lane < PITCH)[None, :])


@jit
def _gates_backward_kernel(
    dgates_ptr, hidden_ptr, w1_ptr, w2_ptr, b2_ptr, scale_ptr, dhidden_ptr, dx_ptr, sums_ptr, factor, T,
    D: tl.constexpr, F: tl.constexpr, L: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Gradients of the hidden units and, unless it is None, of x; each program's shares of those of w2^T (F rows of
    LANES), b2 (a row) and scale (a row to be summed up), in sums (programs, F + 2, LANES).

    Sums over tokens leave out the scale: with it they are w2's and b2's gradients, and with w2 and b2 the scale's,
    without the gates or a division by it.
    """
    f, lane, t = tl.arange(0, F), tl.arange(0, LANES), tl.arange(0, ROWS)[:, None]
    scale = _gates_scale(scale_ptr, factor, hidden_ptr.dtype.element_ty)
    into_w2 = tl.zeros((F, LANES), tl.float32)
    into_b2 = tl.zeros((LANES,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=1):
        first, inside = tl.cast(tile, tl.int64) * ROWS, t < T - tile * ROWS
        at_g, at_h = t * L + lane[None, :], t * F + f[None, :]
        dgates = tl.load(dgates_ptr + first * L + at_g, mask=inside & (lane < L)[None, :], other=0.0)
        hidden = tl.load(hidden_ptr + first * F + at_h, mask=inside, other=0.0)
        w2 = tl.load(w2_ptr + lane[:, None] * F + f[None, :], mask=lane[:, None] < L, other=0.0)
        into_b2 += tl.sum(dgates.to(tl.float32), 0)
        dgates = dgates.to(w2.dtype)
        _, slope = _gates_gelu(hidden.to(tl.float32))
        dhidden = (tl.dot(dgates, w2, input_precision="ieee") * (slope * scale)).to(w2.dtype)
        tl.store(dhidden_ptr + first * F + at_h, dhidden, mask=inside)
        # read again, from the cache: in this product's layout, and registers are free again
        hidden = tl.load(hidden_ptr + first * F + at_h, mask=inside, other=0.0)
        value, _ = _gates_gelu(hidden.to(tl.float32))
        into_w2 = tl.dot(value.to(w2.dtype).T, dgates, into_w2, input_precision="ieee")
        if dx_ptr is not None:
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)[None, :]
                w1 = tl.load(w1_ptr + f[:, None] * D + d, mask=d < D, other=0.0)
                dx = tl.dot(dhidden, w1, input_precision="ieee")
                tl.store(dx_ptr + first * D + t * D + d, dx.to(w2.dtype), mask=inside & (d < D))
    row, at = sums_ptr + tl.program_id(0).to(tl.int64) * ((F + 2) * LANES), f[:, None] * LANES + lane[None, :]
    w2_FL = tl.load(w2_ptr + lane[None, :] * F + f[:, None], mask=lane[None, :] < L, other=0.0).to(tl.float32)
    b2 = tl.load(b2_ptr + lane, mask=lane < L, other=0.0).to(tl.float32)
    tl.store(row + at, into_w2 * scale)
    tl.store(row + F * LANES + lane, into_b2 * scale)
    tl.store(row + (F + 1) * LANES + lane, tl.sum(into_w2 * w2_FL, 0) + into_b2 * b2)


@jit
def _gates_add(ptr, value, mask):
    value += tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@jit
def _gates_sums_kernel(
    sums_ptr, dw2_ptr, db2_ptr, dscale_ptr, parts,
    F: tl.constexpr, L: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
):
    """Adds a row of sums (parts, F + 2, LANES) to the gradient it is of, where that is wanted (not None)."""
    row, lane = tl.program_id(0), tl.arange(0, LANES)
    total = tl.zeros((PARTS, LANES), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)[:, None]
        total += tl.load(sums_ptr + (part * (F + 2) + row) * LANES + lane[None, :], mask=part < parts, other=0.0)
    total = tl.sum(total, 0)
    if row < F:
        if dw2_ptr is not None:
            _gates_add(dw2_ptr + lane * F + row, total, lane < L)
    elif row == F:
        if db2_ptr is not None:
            _gates_add(db2_ptr + lane, total, lane < L)
    else:
        if dscale_ptr is not None:
            _gates_add(dscale_ptr + lane, tl.where(lane == 0, tl.sum(total, 0), 0.0), lane == 0)


def _gates_backward_tiles(w1_FD, lanes):
    """A copy of the entry, and how many programs a card runs."""
    card, processors = card_of(w1_FD.device)
    tiles = dict(GATES_TILES["backward" if card == "large" and lanes <= 64 else "backward, tight"])
    return tiles, processors * tiles.pop("WAVES")


def _gates_sizes(w1_FD, lanes):
    return dict(D=w1_FD.shape[1], F=len(w1_FD), L=lanes, LANES=max(16, triton.next_power_of_2(lanes)))


@torch.library.custom_op("speedrun::gates_forward", mutates_args=())
def gates_forward(x_TD: Tensor, w1_FD: Tensor, w2_LF: Tensor, b2_L: Tensor, scale: Tensor | None, factor: float,
                  dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gates in `dtype`, rows at 16-byte boundaries, and the hidden units before gelu; factor if scale is None."""
    gates_TL, hidden_TF = _gates_empty_results(x_TD, w1_FD, w2_LF, b2_L, scale, factor, dtype)
    x_TD, w1_FD, w2_LF, b2_L = _pointwise_rows(x_TD), w1_FD.contiguous(), w2_LF.contiguous(), b2_L.contiguous()
    tiles = GATES_TILES["forward"]
    _gates_forward_kernel[triton.cdiv(len(x_TD), tiles["ROWS"]),](
        x_TD, w1_FD, w2_LF, b2_L, scale, gates_TL, hidden_TF, factor, x_TD.stride(0), len(x_TD),
        **_gates_sizes(w1_FD, len(b2_L)), PITCH=gates_TL.stride(0), **tiles)
    return gates_TL, hidden_TF


@gates_forward.register_fake
def _gates_empty_results(x_TD, w1_FD, w2_LF, b2_L, scale, factor, dtype):
    return aligned_empty(x_TD, len(x_TD), len(b2_L), dtype=dtype), x_TD.new_empty(len(x_TD), len(w1_FD))


@torch.library.custom_op("speedrun::gates_backward", mutates_args=())
def gates_backward(dgates_TL: Tensor, hidden_TF: Tensor, w1_FD: Tensor, w2_LF: Tensor, b2_L: Tensor,
                   scale: Tensor | None, factor: float, needs_x: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the hidden units and of x (empty where not needed); every program's sums for gates_sums_."""
    results = _gates_empty_gradients(dgates_TL, hidden_TF, w1_FD, w2_LF, b2_L, scale, factor, needs_x)
    dhidden_TF, dx_TD, sums = results
    dgates_TL, w1_FD, w2_LF, b2_L = (x.contiguous() for x in (dgates_TL, w1_FD, w2_LF, b2_L))
    _gates_backward_kernel[len(sums),](
        dgates_TL, hidden_TF, w1_FD, w2_LF, b2_L, scale, dhidden_TF, dx_TD if needs_x else None, sums, factor,
        len(hidden_TF), **_gates_sizes(w1_FD, len(b2_L)), **_gates_backward_tiles(w1_FD, len(b2_L))[0])
    return results


@gates_backward.register_fake
def _gates_empty_gradients(dgates_TL, hidden_TF, w1_FD, w2_LF, b2_L, scale, factor, needs_x):
    (T, F), sizes = hidden_TF.shape, _gates_sizes(w1_FD, len(b2_L))
    tiles, most = _gates_backward_tiles(w1_FD, len(b2_L))
    dx_TD = hidden_TF.new_empty((T, sizes["D"]) if needs_x else (0,))
    programs = min(triton.cdiv(T, tiles["ROWS"]), most)
    sums = hidden_TF.new_empty(programs, F + 2, sizes["LANES"], dtype=torch.float32)
    return hidden_TF.new_empty(T, F), dx_TD, sums


@torch.library.custom_op("speedrun::gates_sums_", mutates_args=("dw2_LF", "db2_L", "dscale"))
def gates_sums_(sums: Tensor, lanes: int, dw2_LF: Tensor | None, db2_L: Tensor | None, dscale: Tensor | None) -> None:
    """Add to each gradient that is given, in place, what gates_backward's programs summed up."""
    (parts, rows, width), tiles = sums.shape, dict(GATES_TILES["sums"])
    _gates_sums_kernel[rows,](sums, dw2_LF, db2_L, dscale, parts, F=rows - 2, L=lanes, LANES=width,
                              PARTS=tiles.pop("BLOCK") // width, **tiles)


@gates_sums_.register_fake
def _(sums, lanes, dw2_LF, db2_L, dscale):
    return None


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, factor, dtype, grads, x_TD, w1_FD, w2_LF, b2_L, scale):
        ctx.factor, ctx.grads = factor, grads
        gates_TL, hidden_TF = gates_forward(x_TD, w1_FD, w2_LF, b2_L, scale, factor, dtype)
        ctx.save_for_backward(x_TD, w1_FD, w2_LF, b2_L, scale, hidden_TF)
        return gates_TL

    @staticmethod
    def backward(ctx, dgates_TL):
        x_TD, w1_FD, *small, hidden_TF = ctx.saved_tensors
        needs_x, needs_w1, *needs = ctx.needs_input_grad[3:]
        dhidden_TF, dx_TD, sums = gates_backward(dgates_TL, hidden_TF, w1_FD, *small, ctx.factor, needs_x)
        dw1_FD = _weight_gradient(ctx.grads[0], dhidden_TF, x_TD) if needs_w1 else None
        fresh = [torch.zeros_like(x, memory_format=torch.contiguous_format) if need and grad is None else None
                 for x, grad, need in zip(small, ctx.grads[1:], needs)]
        if any(needs):
            targets = [(new if grad is None else grad) if need else None
                       for new, grad, need in zip(fresh, ctx.grads[1:], needs)]
            gates_sums_(sums, len(small[1]), *targets)
        return None, None, None, dx_TD if needs_x else None, dw1_FD, *fresh


def gates(x_TD, w1_FD, w2_LF, b2_L, scale, dtype=None, grads=(None,) * 4):
    """(gelu(x w1^T) w2^T + b2) * scale, every token's coefficients (T, L).  Reference: gates_reference.

    In    x_TD (T, D), rows of any stride; w1_FD (F, D); w2_LF (L, F); b2_L (L,); one floating-point dtype. scale: a
          number, or a tensor of one element, which is rounded to x's dtype first. gelu is the exact one, by erf
    Out   in `dtype` (x's where None), floating; rows may lie further apart than L
    Grad  to x, w1, w2, b2 and the scale. grads: where those of the last four are added in place, as in `linear`;
          contiguous, None for autograd. Kept for it: x and the hidden units before gelu
    Why   a pass over x, one over x's gradient and the product for w1's; no other array is wider than F or L

    Kernels take 16-bit x (interpreted, fp32 too), D a multiple of 16, F of 16, 32 or 64, L up to 128; all else goes to
    the reference. Raises ValueError.
    """
    require(x_TD.ndim == w1_FD.ndim == 2 and x_TD.shape[1] == w1_FD.shape[1] and b2_L.ndim == 1
            and w2_LF.shape == (len(b2_L), len(w1_FD)),
            f"gates takes x (T, D), w1 (F, D), w2 (L, F) and b2 (L,), got {tuple(x_TD.shape)}, {tuple(w1_FD.shape)}, "
            f"{tuple(w2_LF.shape)} and {tuple(b2_L.shape)}; flatten x's leading dimensions, take as many lanes of both")
    require(x_TD.is_floating_point() and x_TD.dtype == w1_FD.dtype == w2_LF.dtype == b2_L.dtype,
            f"gates takes operands of one floating-point dtype, got {x_TD.dtype}, {w1_FD.dtype}, {w2_LF.dtype} and "
            f"{b2_L.dtype}; convert them to the weights' dtype")
    learned = isinstance(scale, Tensor)
    require(not learned or _is_number(scale),
            "the scale must be a number or a floating-point tensor of one element; multiply by more of them afterwards")
    require(dtype is None or dtype.is_floating_point, f"dtype must be a floating-point one, not {dtype}; cast later")
    F, D, L = *w1_FD.shape, len(b2_L)
    _require_one_device(x_TD, w1_FD, w2_LF, b2_L, scale)
    _check_grads(grads, w1_FD, w2_LF, b2_L, scale)
    fits = x_TD.numel() > 0 and D % 16 == 0 and F in (16, 32, 64) and 1 <= L <= 128
    if not fits or not _use_matrix_kernel(x_TD):
        return gates_reference(x_TD, w1_FD, w2_LF, b2_L, scale, dtype)
    require(all(grad is None or grad.is_contiguous() for grad in grads),
            "grads must be contiguous, kernels add to them; make them so or give None for autograd")
    factor, scale = (1.0, scale) if learned else (float(scale), None)
    return _Gates.apply(factor, dtype or x_TD.dtype, tuple(grads), x_TD, w1_FD, w2_LF, b2_L, scale)


# === Optimizer updates ===
# Every number that changes from step to step lives in device memory. Each update is one launch (variance normalization
# two), in place.

# Elements a program; all of these stream memory. H200, 2026-11-30, Triton 3.6: 4.1 to 4.2 TB/s, variance 3.1.
ADAM_TILES = dict(BLOCK=1024, num_warps=4)
ADAM_SEGMENT = ADAM_TILES["BLOCK"]  # parameters that lie in one flat buffer start at multiples of it
MOMENTUM_TILES = dict(BLOCK=1024, num_warps=4)
VARIANCE_TILES = dict(LINES=16, DEPTH=256, num_warps=4)  # lines are reduced along their depth
RESCALE_TILES = dict(BLOCK=4096, BLOCKS=4, num_warps=8)
CAUTIOUS_TILES = dict(BLOCK=1024, num_warps=8)


def _exact_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 where any tensor is, else fp32: what the updates compute and keep their states in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _require_in_place(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """A state that a kernel updates in place must be exactly what the kernel takes it for."""
    require(tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous(),
            f"{name} must be contiguous {dtype} of shape {tuple(shape)}, got {tensor.dtype} {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; allocate it so, it is updated in place")


# --- Adam with cautious weight decay ---

def adam_update_reference_(p, g, exp_avg, exp_avg_sq, hyper, starts=None):
    if starts is not None:  # one row of five an element
        rows = starts.long()[:, None] + torch.arange(5, device=hyper.device)
        hyper = hyper[rows].repeat_interleave(ADAM_SEGMENT, 0)
    beta1, beta2, step_size, eps, decay = hyper.unbind(-1)
    g, wide = g.to(exp_avg.dtype), p.to(exp_avg.dtype)
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.lerp_(g * g, 1 - beta2)
    update = exp_avg / (exp_avg_sq.sqrt() + eps) * step_size
    p.copy_(wide - torch.where(update * wide > 0, update + decay * wide, update))


@jit
def _adam_kernel(p, g, exp_avg, exp_avg_sq, hyper, starts, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < numel
    if starts is not None:
        hyper += tl.load(starts + tl.program_id(0))
    beta1, beta2, step_size = tl.load(hyper), tl.load(hyper + 1), tl.load(hyper + 2)
    eps, decay = tl.load(hyper + 3), tl.load(hyper + 4)
    grad = tl.load(g + at, mask=keep).to(tl.float32)
    wide = tl.load(p + at, mask=keep).to(tl.float32)
    mean = beta1 * tl.load(exp_avg + at, mask=keep) + (1 - beta1) * grad
    square = beta2 * tl.load(exp_avg_sq + at, mask=keep) + (1 - beta2) * grad * grad
    tl.store(exp_avg + at, mean, mask=keep)
    tl.store(exp_avg_sq + at, square, mask=keep)
    update = mean / (tl.sqrt(square) + eps) * step_size
    update = tl.where(update * wide > 0, update + decay * wide, update)
    tl.store(p + at, (wide - update).to(p.dtype.element_ty), mask=keep)


def adam_update_(p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor,
                 starts: Tensor | None = None) -> None:
    """One Adam step with cautious weight decay, in place, of one parameter or of many that lie end to end.

    Reference: adam_update_reference_.
    In    p any shape and floating dtype, contiguous; g of p's shape, any floating dtype and strides; exp_avg and
          exp_avg_sq of p's shape, fp32 (fp64 for fp64 p); hyper (5,) of the moments' dtype: beta1, beta2,
          step_size = lr' sqrt(1 - beta2^n) / (1 - beta1^n), eps, decay = lr'^2 wd, with lr' = lr lr_mul, this being
          update n.
          With starts, every ADAM_SEGMENT elements have five numbers of their own: hyper is (any number,), and starts
          (p.numel() / ADAM_SEGMENT,) int32 says where in it each segment's begin; whether they lie inside is not looked
          at. The five numbers 1, 1, 0, eps, 0 leave a segment and its moments as they are
    Out   p, exp_avg, exp_avg_sq updated. Decay acts only where it pulls the way the update does (update * p > 0;
          Liang et al., "Cautious Optimizers", arXiv 2411.16085), and counts lr twice, as in the record
    Raises ValueError for a state of other shape, dtype or layout
    """
    exact = _exact_dtype(p)
    _require_in_place("p", p, p.shape, p.dtype)
    _require_in_place("exp_avg", exp_avg, p.shape, exact)
    _require_in_place("exp_avg_sq", exp_avg_sq, p.shape, exact)
    _require_in_place("hyper", hyper, torch.Size([5]) if starts is None else hyper.shape[:1], exact)
    require(g.shape == p.shape, f"g must have p's shape {tuple(p.shape)}, got {tuple(g.shape)}; reshape it")
    if starts is not None:
        require(p.dim() == 1 and len(p) == ADAM_SEGMENT * starts.numel(), f"with starts p must be flat, {ADAM_SEGMENT} "
                f"elements for each start; got {tuple(p.shape)} and {tuple(starts.shape)}: pad every parameter")
        _require_in_place("starts", starts, starts.shape[:1], torch.int32)
    tensors = (p, g, exp_avg, exp_avg_sq, hyper)
    if not use_kernel(*tensors) or exact == torch.float64:
        adam_update_reference_(*tensors, starts)
    elif p.numel():
        grid = triton.cdiv(p.numel(), ADAM_TILES["BLOCK"]),
        _adam_kernel[grid](p, g.contiguous(), exp_avg, exp_avg_sq, hyper, starts, p.numel(), **ADAM_TILES)


# --- matrices times their lambdas, once a step ---

FOLD_TILES = dict(BLOCK=4096, num_warps=8)  # not swept: 50 million numbers a step


@torch.no_grad()
def fold_reference_(folded_BFD, w_BFD, scale_B):
    """What fold_ does, in eager torch."""
    folded_BFD.copy_(w_BFD * scale_B.view(-1, 1, 1))


@torch.no_grad()
def unfold_reference_(dfolded_BFD, w_BFD, scale_B, dw_BFD):
    """What unfold_ does, in eager torch."""
    exact = dfolded_BFD.to(torch.promote_types(dfolded_BFD.dtype, torch.float32))
    dw_BFD.add_(exact * scale_B.view(-1, 1, 1))
    dscale_B = (exact * w_BFD).sum((1, 2)).to(scale_B.dtype)
    dfolded_BFD.zero_()
    return dscale_B


@jit
def _fold_kernel(folded, w, scale, folded_stride, w_stride, numel, BLOCK: tl.constexpr):
    """Programs (i, b): the i-th BLOCK numbers of matrix b."""
    b, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(w + b * w_stride + at, mask=at < numel).to(tl.float32) * tl.load(scale + b)
    tl.store(folded + b * folded_stride + at, x.to(folded.dtype.element_ty), mask=at < numel)


@jit
def _unfold_kernel(dfolded, w, scale, dw, partials, folded_stride, w_stride, dw_stride, numel, BLOCK: tl.constexpr):
    """As _fold_kernel; partials (B, blocks): each block's share of its number's gradient."""
    b, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, dfolded, dw = at < numel, dfolded + b * folded_stride + at, dw + b * dw_stride + at
    d = tl.load(dfolded, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(w + b * w_stride + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dw, mask=inside).to(tl.float32) + d * tl.load(scale + b)
    tl.store(dw, grad.to(dw.dtype.element_ty), mask=inside)
    tl.store(dfolded, tl.zeros_like(d).to(dfolded.dtype.element_ty), mask=inside)
    tl.store(partials + b * tl.num_programs(0) + tl.program_id(0), tl.sum(d * x, 0))


def _check_fold(scale_B, *banks):
    first = banks[0]
    require(all(x.dim() == 3 and (x.shape, x.dtype) == (first.shape, first.dtype) and x[:1].is_contiguous()
                for x in banks) and scale_B.shape == first.shape[:1],
            "folding takes banks (B, F, D) of one shape and dtype, each matrix contiguous, and a number a matrix, got "
            f"{[_kind(x) for x in banks]} and {_kind(scale_B)}; slice them alike")
    _require_one_device(scale_B, *banks)
    kernel_takes = first.numel() > 0 and first.element_size() <= 4 and scale_B.dtype == torch.float32
    return kernel_takes and use_kernel(scale_B, *banks)


def fold_(folded_BFD: Tensor, w_BFD: Tensor, scale_B: Tensor) -> None:
    """folded = w * scale, matrix by matrix, in place.  Reference: fold_reference_.

    folded_BFD, w_BFD (B, F, D), one dtype, every matrix contiguous; scale_B (B,) fp32 (fp64 for fp64). Raises
    ValueError.
    """
    if not _check_fold(scale_B, folded_BFD, w_BFD):
        return fold_reference_(folded_BFD, w_BFD, scale_B)
    B, numel = len(w_BFD), w_BFD[0].numel()
    _fold_kernel[triton.cdiv(numel, FOLD_TILES["BLOCK"]), B](
        folded_BFD, w_BFD, scale_B.contiguous(), folded_BFD.stride(0), w_BFD.stride(0), numel, **FOLD_TILES)


def unfold_(dfolded_BFD: Tensor, w_BFD: Tensor, scale_B: Tensor, dw_BFD: Tensor) -> Tensor:
    """The way back: adds dfolded * scale to dw, clears dfolded and returns the gradient of scale, all in one pass.

    Banks and numbers as in fold_. Bitwise repeatable.  Reference: unfold_reference_. Raises ValueError.
    """
    if not _check_fold(scale_B, dfolded_BFD, w_BFD, dw_BFD):
        return unfold_reference_(dfolded_BFD, w_BFD, scale_B, dw_BFD)
    B, numel = len(w_BFD), w_BFD[0].numel()
    blocks = triton.cdiv(numel, FOLD_TILES["BLOCK"])
    partials = scale_B.new_empty(B, blocks)
    _unfold_kernel[blocks, B](dfolded_BFD, w_BFD, scale_B.contiguous(), dw_BFD, partials, dfolded_BFD.stride(0),
                              w_BFD.stride(0), dw_BFD.stride(0), numel, **FOLD_TILES)
    return partials.sum(1)


# --- NorMuon: Nesterov momentum ---

# Muon: Keller Jordan et al.; its neuron-wise normalized form: Li et al., "NorMuon" (arXiv 2510.05491).


def _update_dtype(g: Tensor) -> torch.dtype:
    """bf16 for low-precision gradients, else the gradient's own."""
    return g.dtype if g.dtype in (torch.float32, torch.float64) else torch.bfloat16


def normuon_momentum_reference_(g, buf, momentum):
    wide = g.to(buf.dtype)
    buf.lerp_(wide, 1 - momentum)
    return wide.lerp(buf, momentum).to(_update_dtype(g))


@jit
def _momentum_kernel(g, buf, momentum, x, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < numel
    rate = tl.load(momentum)
    grad = tl.load(g + at, mask=keep).to(tl.float32)
    mean = tl.load(buf + at, mask=keep)
    mean += (1 - rate) * (grad - mean)
    tl.store(buf + at, mean, mask=keep)
    tl.store(x + at, (grad + rate * (mean - grad)).to(x.dtype.element_ty), mask=keep)


def normuon_momentum_(g: Tensor, buf: Tensor, momentum: Tensor) -> Tensor:
    """Nesterov momentum: buf <- buf + (1 - m)(g - buf), in place; returns X = g + m (buf - g).

    Reference: normuon_momentum_reference_.
    In    g any shape, floating dtype and strides; buf of g's shape, fp32 (fp64 for fp64 g), contiguous; momentum m, one
          element of buf's dtype
    Out   X of g's shape, contiguous, bf16 for 16-bit g, else g's dtype; g is left alone
    Raises ValueError for a state of other shape, dtype or layout
    """
    exact = _exact_dtype(g)
    _require_in_place("buf", buf, g.shape, exact)
    require(momentum.numel() == 1 and momentum.dtype == exact, f"momentum must be one element of {exact}, got "
            f"{momentum.dtype} {tuple(momentum.shape)}; pass torch.tensor(m, dtype={exact})")
    if not use_kernel(g, buf, momentum) or exact == torch.float64:
        return normuon_momentum_reference_(g, buf, momentum)
    x = torch.empty(g.shape, dtype=_update_dtype(g), device=g.device)
    if g.numel():
        grid = triton.cdiv(g.numel(), MOMENTUM_TILES["BLOCK"]),
        _momentum_kernel[grid](g.contiguous(), buf, momentum, x, g.numel(), **MOMENTUM_TILES)
    return x


# --- NorMuon: variance normalization ---

VARIANCE_FLOOR = 1e-10  # under the second moments and under the norm: zero gradients must stay zero


def normalize_variance_reference_(x_BRC, v2, beta2):
    dim = -1 if v2.shape[-1] == 1 else -2
    wide = x_BRC.to(v2.dtype)
    mean = wide.square().mean(dim, keepdim=True)
    v2.lerp_(mean, 1 - beta2)
    scale = v2.clamp(min=VARIANCE_FLOOR).rsqrt()
    before, after = mean.sum((-2, -1), keepdim=True), (mean * scale * scale).sum((-2, -1), keepdim=True)
    depth = x_BRC.shape[dim]
    ratio = (depth * before).sqrt() / (depth * after).sqrt().clamp(min=VARIANCE_FLOOR)
    x_BRC.mul_((scale * ratio).to(x_BRC.dtype))


@jit
def _variance_kernel(x, v2, means, beta2, lines, depth, line_stride, depth_stride, LINES: tl.constexpr,
                    DEPTH: tl.constexpr):
    """Mean square of each line (a row or a column) of matrix program_id(1), merged into v2 and kept in means."""
    batch = tl.program_id(1)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    x += batch.to(tl.int64) * lines * depth
    total = tl.zeros((LINES,), tl.float32)
    for start in range(0, depth, DEPTH):
        step = start + tl.arange(0, DEPTH)
        keep = (line < lines)[:, None] & (step < depth)[None, :]
        value = tl.load(x + line[:, None] * line_stride + step[None, :] * depth_stride, mask=keep, other=0.0)
        value = value.to(tl.float32)
        total += tl.sum(value * value, axis=1)
    mean = total / depth
    at = batch * lines + line
    old = tl.load(v2 + at, mask=line < lines, other=0.0)
    tl.store(v2 + at, old + (1 - tl.load(beta2)) * (mean - old), mask=line < lines)
    tl.store(means + at, mean, mask=line < lines)


@jit
def _rescale_kernel(x, v2, means, lines, depth, line_stride, floor, ALL_LINES: tl.constexpr, BLOCK: tl.constexpr,
                   BLOCKS: tl.constexpr):
    """x *= v2^-1/2 along each line, times what keeps the matrix's Frobenius norm; every program finds that itself."""
    batch = tl.program_id(1)
    x += batch.to(tl.int64) * lines * depth
    v2 += batch * lines
    line = tl.arange(0, ALL_LINES)
    mean = tl.load(means + batch * lines + line, mask=line < lines, other=0.0)
    before = tl.sum(mean)
    after = tl.sum(mean / tl.maximum(tl.load(v2 + line, mask=line < lines, other=1.0), floor))
    ratio = tl.sqrt(before * depth) / tl.maximum(tl.sqrt(after * depth), floor)
    for block in range(BLOCKS):
        at = (tl.program_id(0) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        keep = at < lines * depth
        second = tl.load(v2 + at // line_stride % lines, mask=keep, other=1.0)
        factor = (tl.rsqrt(tl.maximum(second, floor)) * ratio).to(x.dtype.element_ty).to(tl.float32)
        value = tl.load(x + at, mask=keep).to(tl.float32) * factor
        tl.store(x + at, value.to(x.dtype.element_ty), mask=keep)


def normalize_variance_(x_BRC: Tensor, v2: Tensor, beta2: Tensor) -> None:
    """Divide every row or column of each matrix by its running root mean square, keeping each matrix's norm; in place.

    Reference: normalize_variance_reference_.
    In    x_BRC (B, R, C) floating point, contiguous; v2 (B, R, 1) for rows or (B, 1, C) for columns: running mean
          squares, fp32 (fp64 for fp64 x), contiguous; beta2 one element of v2's dtype
    Out   v2 <- v2 + (1 - beta2)(mean square - v2), then x scaled by v2^-1/2 and a number a matrix; the scale is rounded
          to x's dtype
    Raises ValueError for other shapes, dtypes or layouts
    """
    exact = _exact_dtype(x_BRC)
    B, R, C = x_BRC.shape
    _require_in_place("x", x_BRC, x_BRC.shape, x_BRC.dtype)
    require(v2.shape in ((B, R, 1), (B, 1, C)), f"v2 must be (B, R, 1) or (B, 1, C) for x {tuple(x_BRC.shape)}, got "
            f"{tuple(v2.shape)}; reduce over the shorter dimension")
    _require_in_place("v2", v2, v2.shape, exact)
    require(beta2.numel() == 1 and beta2.dtype == exact, f"beta2 must be one element of {exact}, got {beta2.dtype} "
            f"{tuple(beta2.shape)}; pass torch.tensor(beta2, dtype={exact})")
    if not use_kernel(x_BRC, v2, beta2) or exact == torch.float64:
        normalize_variance_reference_(x_BRC, v2, beta2)
    elif x_BRC.numel():
        by_row = v2.shape[-1] == 1
        lines, depth, line_stride, depth_stride = (R, C, C, 1) if by_row else (C, R, 1, C)
        means = torch.empty_like(v2)
        grid = triton.cdiv(lines, VARIANCE_TILES["LINES"]), B
        _variance_kernel[grid](x_BRC, v2, means, beta2, lines, depth, line_stride, depth_stride, **VARIANCE_TILES)
        grid = triton.cdiv(R * C, RESCALE_TILES["BLOCK"] * RESCALE_TILES["BLOCKS"]), B
        _rescale_kernel[grid](x_BRC, v2, means, lines, depth, line_stride, VARIANCE_FLOOR,
                             ALL_LINES=triton.next_power_of_2(lines), **RESCALE_TILES)


# --- NorMuon: cautious update of split weights ---

def cautious_update_reference_(p_BRC, low, x, lr_B, wd):
    if low is None:
        wide = p_BRC.to(lr_B.dtype)
    else:  # an fp32 weight is stored as its upper 16 bits, which are a bf16 number, and its lower 16 bits
        bits = p_BRC.view(torch.int16).int().bitwise_left_shift_(16).bitwise_or_(low.int())
        wide = bits.view(torch.float32)
    x, lr = x.to(wide.dtype), lr_B.view(-1, 1, 1)
    decay = torch.where(x * wide >= 0, wide, 0.0) * wd * lr
    wide = wide - decay - x * lr
    if low is None:
        p_BRC.copy_(wide)
    else:
        bits = wide.view(torch.int32)
        low.view(torch.int16).copy_(bits)  # both casts keep the lowest 16 bits
        p_BRC.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


@jit
def _cautious_kernel(p, low, x, lr, wd, numel, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Element by element, one rounding an operation: launch with enable_fp_fusion=False."""
    batch = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < numel
    start = batch.to(tl.int64) * numel
    rate, pull = tl.load(lr + batch), tl.load(wd)
    update = tl.load(x + start + at, mask=keep).to(tl.float32)
    if SPLIT:
        bits = tl.load(p + start + at, mask=keep).to(tl.uint32) << 16
        wide = (bits | tl.load(low + start + at, mask=keep).to(tl.uint32)).to(tl.float32, bitcast=True)
    else:
        wide = tl.load(p + start + at, mask=keep).to(tl.float32)
    wide = wide - tl.where(update * wide >= 0, wide, 0.0) * pull * rate - update * rate
    if SPLIT:
        bits = wide.to(tl.uint32, bitcast=True)
        tl.store(p + start + at, (bits >> 16).to(tl.uint16), mask=keep)
        tl.store(low + start + at, bits.to(tl.uint16), mask=keep)
    else:
        tl.store(p + start + at, wide.to(p.dtype.element_ty), mask=keep)


def cautious_update_(p_BRC: Tensor, low: Tensor | None, x: Tensor, lr_B: Tensor,
                     wd: Tensor) -> None:
    """p <- p - lr x, with weight decay wd lr p where x p >= 0; in place.  Reference: cautious_update_reference_.

    In    p_BRC (B, R, C) contiguous. bf16: low (B, R, C) uint16 carries 16 further mantissa bits of every weight, so
          that p and low together are an fp32 number, updated as such, bit for bit as the reference does; fp32, fp64:
          low is None. x of p's shape, floating point, any strides; lr_B (B,) effective learning rates, a matrix each,
          and wd one element (weight decay times learning rate), fp32 (fp64 for fp64 p)
    Out   p and low updated. p is the upper half of the fp32 number, truncated, not rounded
    Raises ValueError for other shapes, dtypes or layouts
    """
    exact = _exact_dtype(p_BRC)
    _require_in_place("p", p_BRC, p_BRC.shape, p_BRC.dtype)
    require((low is None) == (p_BRC.dtype != torch.bfloat16), f"low carries the mantissa bits that bf16 lacks, got "
            f"{'none' if low is None else low.dtype} for {p_BRC.dtype}; pass it for bf16 only")
    if low is not None:
        _require_in_place("low", low, p_BRC.shape, torch.uint16)
    _require_in_place("lr", lr_B, p_BRC.shape[:1], exact)
    require(wd.numel() == 1 and wd.dtype == exact, f"wd must be one element of {exact}, got {wd.dtype} "
            f"{tuple(wd.shape)}; pass torch.tensor(wd, dtype={exact})")
    require(x.shape == p_BRC.shape, f"x must have p's shape {tuple(p_BRC.shape)}, got {tuple(x.shape)}; reshape it")
    if not use_kernel(p_BRC, x, lr_B, wd) or exact == torch.float64:
        cautious_update_reference_(p_BRC, low, x, lr_B, wd)
    elif p_BRC.numel():
        numel, split = p_BRC[0].numel(), low is not None
        grid = triton.cdiv(numel, CAUTIOUS_TILES["BLOCK"]), len(p_BRC)
        p = p_BRC.view(torch.uint16) if split else p_BRC
        _cautious_kernel[grid](p, low, x.contiguous(), lr_B, wd, numel, SPLIT=split, enable_fp_fusion=False,
                              **CAUTIOUS_TILES)


# === Head ===
# z = CAP * sigmoid((logit + SHIFT) / STRETCH), so 0 < z < CAP: the log-sum-exp needs no running maximum.
CAP, SHIFT, STRETCH = 23.0, 5.0, 7.5
LN2 = 0.6931471805599453
LOG2_CAP = CAP / LN2  # z in units of log 2
# FP8 scales of activations, weights, and the logit gradient of a loss whose gradient is 1.
X_SCALE, W_SCALE, G_SCALE = 100 / 448, 1.6 / 448, 0.75 / 448
# In FP8 training sigma is stored in 8 bits: steps of 1 / 254, where the v3 record's bf16 has steps of 1 / 256 (from 0.5
# to 1). z is off by at most 0.045 and p by 4.5%; the e5m2 gradient that it goes to rounds by up to 12.5%.
FP8_SIGMA, SIGMA_LEVELS = torch.uint8, 254
HEAD_CHUNK = 16384  # rows whose sigmoids exist at one time (0.8 GB in FP8 training); a multiple of 16

# Launch constants: the fastest of a sweep on an H200 at T 16384, D 768, V 50304 (2026-11-30, Triton 3.6).
# WAVES: programs a multiprocessor.
HEAD_PRODUCT_TILES = dict(ROWS=128, COLS=128, DEPTH=128, GROUP=64, WAVES=2, num_warps=4, num_stages=3)
HEAD_SOFTCAP_TILES = dict(COLS=4096, num_warps=8)
HEAD_LOSS_TILES = dict(ROWS=32, TILES=128, num_warps=4)
HEAD_GRADIENT_TILES = dict(ROWS=128, COLS=128, GROUP=16, num_warps=8)
HEAD_GRADIENT_FP8_TILES = dict(ROWS=128, COLS=128, GROUP=128, num_warps=4)
HEAD_TARGETS_TILES = dict(ROWS=128, num_warps=4)
HEAD_QUANTIZE_TILES = dict(ROWS=64, COLS=128, num_warps=8)


class QuantizedHead(NamedTuple):
    """lm_head in e4m3, times 1 / W_SCALE, in the two layouts that FP8 products read (contraction dim contiguous)."""
    w8_DV: Tensor
    w8_VD: Tensor


# --- references ---

def _on_grid(x, scale, dtype):
    """x rounded to the FP8 grid of the given scale, in x's dtype."""
    limit = torch.finfo(dtype).max
    return (x / scale).clamp(-limit, limit).to(dtype).to(x.dtype) * scale


def _wanted(targets, mtp_weights, rows, vocab):
    """(rows, V): the weight that each row's targets put on each column, summed where targets repeat."""
    wanted_TV = mtp_weights.new_zeros(rows.stop - rows.start, vocab)
    for k, weight in enumerate(mtp_weights):
        target = targets[rows.start + k:rows.stop + k]  # short in the last rows: targets past the end are dropped
        row = torch.arange(len(target), device=targets.device)
        wanted_TV[row, target.clamp(min=0)] += weight * (target >= 0)
    return wanted_TV


def _reference_chunks(x, lm_head, targets, mtp_weights, fp8, quantized, chunk):
    """(rows, lm_head as the products read it, sigma, wanted) of every chunk of rows; sigma is rounded as it is stored:
    to x's dtype, or in FP8 to one of 255 levels."""
    inner, w = torch.promote_types(x.dtype, torch.float32), lm_head
    if fp8:
        w = _on_grid(w.to(inner), W_SCALE, E4M3) if quantized is None else quantized.w8_DV.to(inner) * W_SCALE
    for start in range(0, len(x), chunk):
        rows = slice(start, min(start + chunk, len(x)))
        logits = (_on_grid(x[rows].to(inner), X_SCALE, E4M3) if fp8 else x[rows]) @ w
        sigma = torch.sigmoid((logits.to(inner) + SHIFT) / STRETCH)
        sigma = torch.round(SIGMA_LEVELS * sigma) / SIGMA_LEVELS if fp8 else sigma.to(x.dtype).to(inner)
        yield rows, w, sigma, _wanted(targets, mtp_weights.to(inner), rows, w.shape[1])


class _HeadLossReference(torch.autograd.Function):
    """The backward pass computes a chunk's sigmoids again instead of keeping them."""

    @staticmethod
    def forward(ctx, x, lm_head, targets, mtp_weights, fp8, quantized, chunk):
        ctx.save_for_backward(x, lm_head, targets, mtp_weights)
        ctx.options = fp8, quantized, chunk
        losses = []
        for _, _, sigma, wanted in _reference_chunks(x, lm_head, targets, mtp_weights, *ctx.options):
            lse = torch.logsumexp(CAP * sigma, dim=1)
            losses.append((wanted * (lse[:, None] - CAP * sigma)).sum(1))
        return torch.cat(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_T):
        x, lm_head, _, mtp_weights = ctx.saved_tensors
        top = grad_T.abs().amax()
        share_T1 = (grad_T / torch.where(top > 0, top, 1))[:, None]
        dx, dw = torch.empty_like(x), 0
        for rows, w, sigma, wanted in _reference_chunks(*ctx.saved_tensors, *ctx.options):
            # The softmax keeps the full sum of weights also where a target is missing, as in the v3 record's loss.
            g = mtp_weights.sum() * torch.softmax(CAP * sigma, 1) - wanted
            g = g * (sigma - sigma.square()) * (CAP / STRETCH)
            weighted_x = x[rows] * share_T1[rows]
            if ctx.options[0]:
                g, weighted_x = _on_grid(g, G_SCALE, E5M2), _on_grid(weighted_x, X_SCALE, E4M3)
            g = g.to(w.dtype)
            dx[rows] = ((g @ w.T).to(x.dtype) * share_T1[rows] * top).to(x.dtype)
            dw = dw + (weighted_x.to(w.dtype).T @ g).to(sigma.dtype)
        return dx, (dw * top).to(lm_head.dtype), None, None, None, None, None


def head_loss_reference(x, lm_head, targets, mtp_weights, *, fp8, quantized=None, chunk=1024):
    """What head_loss computes, in eager torch on any device up to fp64; FP8 is emulated by rounding to its grid."""
    _check_head(x, lm_head, targets, mtp_weights, quantized and quantized.w8_DV)
    return _HeadLossReference.apply(x, lm_head, targets, mtp_weights, fp8, quantized if fp8 else None, chunk)


def head_cross_entropy_reference(x, lm_head, targets, chunk=1024):
    """What head_cross_entropy computes, in eager torch on any device up to fp64."""
    _check_head(x, lm_head, targets)
    inner = torch.promote_types(x.dtype, torch.float32)
    losses = []
    for rows, target in zip(x.split(chunk), targets.split(chunk)):
        z = CAP * torch.sigmoid(((rows @ lm_head).to(inner) + SHIFT) / STRETCH)
        losses.append(torch.nn.functional.cross_entropy(z, target.clamp(min=0), reduction="none") * (target >= 0))
    return torch.cat(losses)


# --- kernels ---

@jit
def _head_tile(pid, row_tiles, col_tiles, GROUP: tl.constexpr):
    """Row and column of a tile; GROUP row tiles walk the columns together, so what they share stays in L2."""
    first = pid // (GROUP * col_tiles) * GROUP
    height = min(row_tiles - first, GROUP)
    return first + pid % (GROUP * col_tiles) % height, pid % (GROUP * col_tiles) // height


@jit
def _tanh(x, HARDWARE: tl.constexpr):
    """From one special-function instruction, which errs by 2^-11: sigma is stored to 2^-9."""
    if HARDWARE:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return 2 * tl.sigmoid(2 * x) - 1


@jit
def _exp2(x, HARDWARE: tl.constexpr):
    """2^x for arguments that are never denormal results, without the compiler's guard for those."""
    if HARDWARE:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True,
                                         pack=1)
    return tl.exp2(x)


@jit
def _to_bf16(x, HARDWARE: tl.constexpr):
    """fp32 to bf16 two at a time; one at a time the conversion would queue with the special functions."""
    if HARDWARE:
        return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16,
                                         is_pure=True, pack=2)
    return x.to(tl.bfloat16)


@jit
def _softcap(product, scale, SHIFT, STRETCH, LOG2_CAP, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """sigma = sigmoid((product * scale + SHIFT) / STRETCH) as it will be stored, and exp(z - CAP) of that very sigma,
    so that the probabilities of the gradient sum to one. In uint8, sigma is its level, from 1 (0) to 255 (1)."""
    half = 0.5 / STRETCH
    tanh = _tanh(product * (scale * half) + SHIFT * half, HARDWARE)
    if DTYPE == tl.uint8:
        rounded = 127 * tanh + 8388736.0  # 2^23 + 128 + an integer: fp32 holds it exactly, its lowest byte is the level
        level = rounded.to(tl.int32, bitcast=True).to(tl.uint8)
        return level, _exp2((rounded - 8388863.0) * (LOG2_CAP / 254), HARDWARE)  # 2^23 + 255 stands for sigma = 1
    sigma = 0.5 * tanh + 0.5
    if DTYPE == tl.bfloat16:
        sigma = _to_bf16(sigma, HARDWARE)
    else:
        sigma = sigma.to(DTYPE)
    return sigma, _exp2(sigma.to(tl.float32) * LOG2_CAP - LOG2_CAP, HARDWARE)


@jit
def _below_one(sigma):
    """sigma - 1 of a stored sigma, in units of its levels: of 1 / 254 in uint8, of 1 in floating point."""
    if sigma.dtype == tl.uint8:
        return (sigma.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388863.0  # undoes _softcap's packing
    return sigma.to(tl.float32) - 1


@jit
def _head_product_kernel(x_desc, w_desc, sigma_desc, sums_ptr, T, V, D, logit_scale, SHIFT, STRETCH, LOG2_CAP,
                         MASKED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
                         GROUP: tl.constexpr, HARDWARE: tl.constexpr):
    """Tiles of sigma from x (T, D) and w (V, D) in FP8, and each row's sum of exp(z - CAP) over a tile's columns.
    Two programs share a multiprocessor: one's special functions run beside the other's products."""
    row_tiles, col_tiles = tl.cdiv(T, ROWS), tl.cdiv(V, COLS)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=True):
        tile_t, tile_v = _head_tile(tile, row_tiles, col_tiles, GROUP)
        t0, v0 = tile_t * ROWS, tile_v * COLS
        acc = tl.zeros((ROWS, COLS), tl.float32)
        for d in range(0, D, DEPTH):
            acc = tl.dot(x_desc.load([t0, d]), w_desc.load([v0, d]).T, acc)
        sigma, mass = _softcap(acc, logit_scale, SHIFT, STRETCH, LOG2_CAP, sigma_desc.dtype, HARDWARE)
        sigma_desc.store([t0, v0], sigma)
        if MASKED:
            mass = tl.where(v0 + tl.arange(0, COLS)[None, :] < V, mass, 0.0)
        t = t0 + tl.arange(0, ROWS)
        tl.store(sums_ptr + tile_v * T + t, tl.sum(mass, 1), mask=t < T)


@jit
def _head_softcap_kernel(logits_ptr, sigma_ptr, sums_ptr, V, SHIFT, STRETCH, LOG2_CAP, COLS: tl.constexpr,
                         HARDWARE: tl.constexpr):
    """The same for one row of logits that a library product made; sigma may overwrite them."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * V
    total = tl.zeros((COLS,), tl.float32)
    for v0 in range(0, V, COLS):
        v = v0 + tl.arange(0, COLS)
        logits = tl.load(logits_ptr + first + v, mask=v < V, other=0.0).to(tl.float32)
        sigma, mass = _softcap(logits, 1.0, SHIFT, STRETCH, LOG2_CAP, sigma_ptr.dtype.element_ty, HARDWARE)
        tl.store(sigma_ptr + first + v, sigma, mask=v < V)
        total += tl.where(v < V, mass, 0.0)
    tl.store(sums_ptr + row, tl.sum(total, 0))


@jit
def _head_loss_kernel(sigma_ptr, sums_ptr, targets_ptr, weights_ptr, mass_ptr, loss_ptr, at_targets_ptr, T, V, tiles,
                      left, n_weights, unit, CAP, LOG2_CAP, LN2, ROWS: tl.constexpr, TILES: tl.constexpr):
    """For T rows: log2 of the sum of exp(z - CAP), multi-token loss, and unit * d loss / d logit at the targets,
    (n_weights, T). `left` rows remain in the sequence from the first of them on."""
    LEVELS: tl.constexpr = 254 if sigma_ptr.dtype.element_ty == tl.uint8 else 1
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((TILES, ROWS), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        inside = (tile[:, None] < tiles) & (t[None, :] < T)
        total += tl.load(sums_ptr + tile[:, None] * T + t[None, :], mask=inside, other=0.0)
    mass = tl.log2(tl.where(t < T, tl.sum(total, 0), 1.0))
    tl.store(mass_ptr + t, mass, mask=t < T)
    weight_sum = 0.0
    for k in range(n_weights):
        weight_sum += tl.load(weights_ptr + k)
    loss = tl.zeros((ROWS,), tl.float32)
    for k in range(n_weights):
        target = tl.load(targets_ptr + t + k, mask=(t < T) & (t + k < left), other=-1)
        valid = (target >= 0) & (target < V)
        below = _below_one(tl.load(sigma_ptr + t.to(tl.int64) * V + target, mask=valid, other=1.0)) / LEVELS
        loss += tl.where(valid, tl.load(weights_ptr + k) * (mass * LN2 - below * CAP), 0.0)
        wanted = tl.zeros((ROWS,), tl.float32)  # all that this row's targets want of this column: they may repeat
        for j in range(n_weights):
            other = tl.load(targets_ptr + t + j, mask=(t < T) & (t + j < left), other=-1)
            wanted += tl.where(other == target, tl.load(weights_ptr + j), 0.0)
        p = tl.exp2(below * LOG2_CAP - mass)
        tl.store(at_targets_ptr + k * T + t, (weight_sum * p - wanted) * (below * (below + 1)) * -unit, mask=t < T)
    tl.store(loss_ptr + t, loss, mask=t < T)


@jit
def _pack_e5m2(g0, g1, g2, g3, HARDWARE: tl.constexpr):
    """Four values as the four e5m2 bytes, lowest first, of an int32; saturating, NaN stays NaN."""
    if HARDWARE:  # not pure: the compiler must transpose the words, and not compute the values again in both layouts
        return tl.inline_asm_elementwise(
            "{.reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1; cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; "
            "mov.b32 $0, {lo, hi};}", "=r,f,f,f,f", [g0, g1, g2, g3], dtype=tl.int32, is_pure=False, pack=1)
    b0, b1 = _to_fp8(g0, 57344.0).to(tl.uint8, bitcast=True), _to_fp8(g1, 57344.0).to(tl.uint8, bitcast=True)
    b2, b3 = _to_fp8(g2, 57344.0).to(tl.uint8, bitcast=True), _to_fp8(g3, 57344.0).to(tl.uint8, bitcast=True)
    return b0.to(tl.int32) | (b1.to(tl.int32) << 8) | (b2.to(tl.int32) << 16) | (b3.to(tl.int32) << 24)


@jit
def _softmax_gradient(sigma_ptr, mass_ptr, t, v, T, V, factor, LOG2_CAP, HARDWARE: tl.constexpr):
    """factor * p * sigma (1 - sigma) at rows t and columns v; 0 in rows past T (1 stands for a sigma of 0 or 1)."""
    LEVELS: tl.constexpr = 254 if sigma_ptr.dtype.element_ty == tl.uint8 else 1
    inside = (t < T)[:, None] & (v < V)[None, :]
    sigma = tl.load(sigma_ptr + (t.to(tl.int64) * V)[:, None] + v[None, :], mask=inside, other=1.0)
    below = _below_one(sigma)
    mass = tl.load(mass_ptr + t, mask=t < T, other=0.0)
    p = _exp2(below * (LOG2_CAP / LEVELS) - mass[:, None], HARDWARE)
    return p * (below * (below + LEVELS) * (factor / (-LEVELS * LEVELS)))


@jit
def _head_gradient_kernel(sigma_ptr, mass_ptr, weights_ptr, g_ptr, T, V, n_weights, unit, LOG2_CAP, ROWS: tl.constexpr,
                          COLS: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr):
    """The softmax's part of unit * d loss / d logit, one tile, in g's dtype; g may be sigma."""
    tile_t, tile_v = _head_tile(tl.program_id(0), tl.cdiv(T, ROWS), tl.cdiv(V, COLS), GROUP)
    t, v = tile_t * ROWS + tl.arange(0, ROWS), tile_v * COLS + tl.arange(0, COLS)
    factor = 0.0
    for k in range(n_weights):
        factor += tl.load(weights_ptr + k) * unit
    g = _softmax_gradient(sigma_ptr, mass_ptr, t, v, T, V, factor, LOG2_CAP, HARDWARE)
    tl.store(g_ptr + (t.to(tl.int64) * V)[:, None] + v[None, :], g.to(g_ptr.dtype.element_ty),
             mask=(t < T)[:, None] & (v < V)[None, :])


@jit
def _head_gradient_fp8_kernel(sigma_ptr, mass_ptr, weights_ptr, g_ptr, g_VT_ptr, T, padded_T, V, stride_VT, n_weights,
                              unit, LOG2_CAP, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
                              HARDWARE: tl.constexpr):
    """The same in e5m2, row-major and transposed (as int32 words of four rows). Rows from T to padded_T get zeros."""
    tile_t, tile_v = _head_tile(tl.program_id(0), tl.cdiv(padded_T, ROWS), tl.cdiv(V, COLS), GROUP)
    word = tile_t * (ROWS // 4) + tl.arange(0, ROWS // 4)
    t, v = 4 * word, tile_v * COLS + tl.arange(0, COLS)
    factor = 0.0
    for k in range(n_weights):
        factor += tl.load(weights_ptr + k) * unit
    # Each thread holds the same columns of four rows, so that what moves through shared memory is whole words.
    words = _pack_e5m2(_softmax_gradient(sigma_ptr, mass_ptr, t, v, T, V, factor, LOG2_CAP, HARDWARE),
                       _softmax_gradient(sigma_ptr, mass_ptr, t + 1, v, T, V, factor, LOG2_CAP, HARDWARE),
                       _softmax_gradient(sigma_ptr, mass_ptr, t + 2, v, T, V, factor, LOG2_CAP, HARDWARE),
                       _softmax_gradient(sigma_ptr, mass_ptr, t + 3, v, T, V, factor, LOG2_CAP, HARDWARE), HARDWARE)
    writable = (t < padded_T)[:, None] & (v < V)[None, :]
    for k in tl.static_range(4):
        g_row = g_ptr + ((t + k).to(tl.int64) * V)[:, None]
        tl.store(g_row + v[None, :], (words >> (8 * k)).to(tl.uint8), mask=writable)
    # In words, so that the compiler sees that four neighbours share a mask, and stores 16 bytes a thread.
    writable = (v < V)[:, None] & (word < padded_T // 4)[None, :]
    tl.store(g_VT_ptr + (v.to(tl.int64) * (stride_VT // 4))[:, None] + word[None, :], words.T, mask=writable)


@jit
def _head_targets_kernel(targets_ptr, at_targets_ptr, g_ptr, g_VT_ptr, T, V, stride_VT, left, n_weights,
                         FP8: tl.constexpr, ROWS: tl.constexpr):
    """The gradient at each row's targets replaces the softmax's part there (in both layouts: FP8)."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for k in range(n_weights):
        target = tl.load(targets_ptr + t + k, mask=(t < T) & (t + k < left), other=-1)
        valid = (target >= 0) & (target < V)
        g = tl.load(at_targets_ptr + k * T + t, mask=valid, other=0.0)
        if FP8:
            g8 = _to_fp8(g, 57344.0).to(tl.uint8, bitcast=True)
            tl.store(g_ptr + t.to(tl.int64) * V + target, g8, mask=valid)
            tl.store(g_VT_ptr + target * stride_VT + t, g8, mask=valid)
        else:
            tl.store(g_ptr + t.to(tl.int64) * V + target, g.to(g_ptr.dtype.element_ty), mask=valid)


@jit
def _quantize_head_kernel(src_ptr, share_ptr, dst_ptr, dst_T_ptr, R, C, padded_R, inverse_scale, SHARED: tl.constexpr,
                          PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """e4m3(src * inverse_scale [* the row's share]), as it is and / or transposed; rows from R to padded_R are zero."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (r < R)[:, None] & (c < C)[None, :]
    offset = r.to(tl.int64)[:, None] * C + c[None, :]
    x = tl.load(src_ptr + offset, mask=inside, other=0.0).to(tl.float32) * inverse_scale
    if SHARED:
        x *= tl.load(share_ptr + r, mask=r < R, other=0.0)[:, None]
    x8 = _to_fp8(x, 448.0)
    writable = (r < padded_R)[:, None] & (c < C)[None, :]
    if PLAIN:
        tl.store(dst_ptr + offset, x8, mask=writable)
    if TRANSPOSED:
        tl.store(dst_T_ptr + c.to(tl.int64)[:, None] * padded_R + r[None, :], x8.T, mask=writable.T)


# --- launchers ---

def _scaled_product(a_MK, b_NK, scale_a, scale_b, out, fast=False):
    """out = a b^T * scale_a * scale_b of FP8 matrices. Gradients need fast=False, which promotes partial sums."""
    scale_a, scale_b = (torch.full((), s, dtype=torch.float32, device=out.device) if isinstance(s, float) else s
                        for s in (scale_a, scale_b))  # each its own allocation: the library wants 16-byte alignment
    if not a_MK.is_cuda:  # interpreted kernels
        return out.copy_(a_MK.float() @ b_NK.float().T * (scale_a * scale_b))
    return torch._scaled_mm(a_MK, b_NK.T, scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype, use_fast_accum=fast,
                            out=out)


def _quantize_scaled(src_RC, scale, *, plain=False, transposed=False, share=None):
    """(e4m3(src / scale), its transpose), whichever is asked for; rows of zeros fill up to a multiple of 16, which FP8
    products need of a dim that they contract."""
    (R, C), tiles = src_RC.shape, HEAD_QUANTIZE_TILES
    padded_R = round_up(R, 16)
    dst = src_RC.new_empty(padded_R, C, dtype=E4M3) if plain else None
    dst_T = src_RC.new_empty(C, padded_R, dtype=E4M3) if transposed else None
    grid = triton.cdiv(padded_R, tiles["ROWS"]), triton.cdiv(C, tiles["COLS"])
    _quantize_head_kernel[grid](src_RC, share, dst, dst_T, R, C, padded_R, 1 / scale, SHARED=share is not None,
                                PLAIN=plain, TRANSPOSED=transposed, **tiles)
    return dst, dst_T


def _softcapped_fp8_product(x8_TD, w8_VD, sigma_TV):
    """Fill sigma and return the partial sums (V tiles, T) of exp(z - CAP). The product with the softcap in its epilogue
    takes the copy engine and the shared memory of a large card."""
    (T, V), D, tiles = sigma_TV.shape, x8_TD.shape[1], dict(HEAD_PRODUCT_TILES)
    card, multiprocessors = card_of(x8_TD.device)
    if card == "small":
        logits = torch.empty(T, V, dtype=torch.bfloat16, device=x8_TD.device)
        return _softcap_rows(_scaled_product(x8_TD, w8_VD, X_SCALE, W_SCALE, logits, fast=True), sigma_TV)
    rows, cols, depth = tiles["ROWS"], tiles["COLS"], tiles["DEPTH"]
    sums = torch.empty(triton.cdiv(V, cols), T, dtype=torch.float32, device=x8_TD.device)
    _head_product_kernel[min(triton.cdiv(T, rows) * len(sums), tiles.pop("WAVES") * multiprocessors),](
        TensorDescriptor.from_tensor(x8_TD, [rows, depth]), TensorDescriptor.from_tensor(w8_VD, [cols, depth]),
        TensorDescriptor.from_tensor(sigma_TV, [rows, cols]), sums, T, V, D, X_SCALE * W_SCALE, SHIFT, STRETCH,
        LOG2_CAP, MASKED=V % cols > 0, HARDWARE=x8_TD.is_cuda, **tiles)
    return sums


def _softcap_rows(logits_TV, sigma_TV):
    """Fill sigma, which may be the logits, and return the sums (1, T) of exp(z - CAP)."""
    T, V = logits_TV.shape
    sums = torch.empty(1, T, dtype=torch.float32, device=logits_TV.device)
    _head_softcap_kernel[T,](logits_TV, sigma_TV, sums, V, SHIFT, STRETCH, LOG2_CAP, HARDWARE=logits_TV.is_cuda,
                             **HEAD_SOFTCAP_TILES)
    return sums


def _loss_from_sums(sigma_TV, sums, targets, mtp_weights, loss_T, unit):
    """Fill loss_T; return log2 of the sum of exp(z - CAP) (T,) and unit * d loss / d logit at the targets (K, T).
    `targets` starts at the same row and runs to the end of the sequence."""
    T, V = sigma_TV.shape
    mass_T = torch.empty_like(loss_T)
    at_targets_KT = loss_T.new_empty(len(mtp_weights), T)
    _head_loss_kernel[triton.cdiv(T, HEAD_LOSS_TILES["ROWS"]),](
        sigma_TV, sums, targets, mtp_weights, mass_T, loss_T, at_targets_KT, T, V, len(sums), len(targets),
        len(mtp_weights), unit * CAP / STRETCH, CAP, LOG2_CAP, LN2, **HEAD_LOSS_TILES)
    return mass_T, at_targets_KT


def _head_gradient(sigma_TV, mass_T, at_targets_KT, targets, mtp_weights, g_TV, g_VT, unit):
    """Fill g_TV with unit * d loss / d logit (rows past T with zeros), and in FP8 g_VT with the same transposed."""
    (T, V), padded_T, fp8 = sigma_TV.shape, len(g_TV), g_VT is not None
    tiles = HEAD_GRADIENT_FP8_TILES if fp8 else HEAD_GRADIENT_TILES
    grid = triton.cdiv(padded_T, tiles["ROWS"]) * triton.cdiv(V, tiles["COLS"]),
    numbers = len(mtp_weights), unit * CAP / STRETCH, LOG2_CAP
    stride_VT = 0
    if fp8:
        g_TV, g_VT, stride_VT = g_TV.view(torch.uint8), g_VT.view(torch.uint8), g_VT.stride(0)
        _head_gradient_fp8_kernel[grid](sigma_TV, mass_T, mtp_weights, g_TV, g_VT.view(torch.int32), T, padded_T, V,
                                        stride_VT, *numbers, HARDWARE=sigma_TV.is_cuda, **tiles)
    else:
        _head_gradient_kernel[grid](sigma_TV, mass_T, mtp_weights, g_TV, T, V, *numbers, HARDWARE=sigma_TV.is_cuda,
                                    **tiles)
    _head_targets_kernel[triton.cdiv(T, HEAD_TARGETS_TILES["ROWS"]),](
        targets, at_targets_KT, g_TV, g_VT, T, V, stride_VT, len(targets), len(mtp_weights), FP8=fp8,
        **HEAD_TARGETS_TILES)


# --- operations that a compiler calls without looking inside ---

def _head_outputs(x, lm_head, fp8, training):
    """loss (T,), dx for an incoming gradient of 1, and what dW needs: the logit gradient, (V, T) in e5m2 or (T, V)."""
    (T, D), V = x.shape, lm_head.shape[1]
    padded_T, loss_T = round_up(T, 16), x.new_empty(T, dtype=torch.float32)
    if not training:
        return loss_T, x.new_empty(0), x.new_empty(0)
    return loss_T, x.new_empty(padded_T, D), x.new_empty(V, padded_T, dtype=E5M2) if fp8 else x.new_empty(T, V)


@torch.library.custom_op("speedrun::head_forward", mutates_args=())
def head_forward(x: Tensor, lm_head: Tensor, targets: Tensor, mtp_weights: Tensor, w8_DV: Tensor | None,
                 w8_VD: Tensor | None, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    _check_head(x, lm_head, targets, mtp_weights, w8_DV)
    x, lm_head, targets, mtp_weights = (a.contiguous() for a in (x, lm_head, targets, mtp_weights.float()))
    T, V, fp8 = len(x), lm_head.shape[1], w8_DV is not None
    loss_T, dx, g = _head_outputs(x, lm_head, fp8, training)
    chunk, unit = min(T, HEAD_CHUNK), 1 / G_SCALE if fp8 else 1.0
    x8 = _quantize_scaled(x, X_SCALE, plain=True)[0] if fp8 else None
    # FP8 keeps the transposed gradient and reuses one chunk of all else. Without it the gradient overwrites sigma.
    sigma = g if training and not fp8 else x.new_empty(chunk, V, dtype=FP8_SIGMA if fp8 else x.dtype)
    g_chunk = x.new_empty(round_up(chunk, 16), V, dtype=E5M2) if training and fp8 else None
    for start in range(0, T, chunk):
        rows, later = slice(start, min(start + chunk, T)), targets[start:]
        sigma_TV = sigma[rows] if len(sigma) == T else sigma[:rows.stop - start]
        if fp8:
            sums = _softcapped_fp8_product(x8[rows], w8_VD, sigma_TV)
        else:
            sums = _softcap_rows(torch.mm(x[rows], lm_head, out=sigma_TV), sigma_TV)
        mass_T, at_targets_KT = _loss_from_sums(sigma_TV, sums, later, mtp_weights, loss_T[rows], unit)
        if training and fp8:
            g_TV = g_chunk[:round_up(rows.stop - start, 16)]
            _head_gradient(sigma_TV, mass_T, at_targets_KT, later, mtp_weights, g_TV, g[:, start:], unit)
            _scaled_product(g_TV, w8_DV, G_SCALE, W_SCALE, dx[start:start + len(g_TV)])
        elif training:
            _head_gradient(sigma_TV, mass_T, at_targets_KT, later, mtp_weights, sigma_TV, None, unit)
            torch.mm(sigma_TV, lm_head.T, out=dx[rows])
    return loss_T, dx, g


@head_forward.register_fake
def _(x, lm_head, targets, mtp_weights, w8_DV, w8_VD, training):
    return _head_outputs(x, lm_head, w8_DV is not None, training)


def _head_gradients(x, g, needs_x, needs_head):
    V = g.shape[0] if g.dtype == E5M2 else g.shape[1]
    return x.new_empty(x.shape if needs_x else 0), x.new_empty((x.shape[1], V) if needs_head else 0)


@torch.library.custom_op("speedrun::head_backward", mutates_args=())
def head_backward(x: Tensor, dx_unit: Tensor, g: Tensor, grad_T: Tensor, needs_x: bool,
                  needs_head: bool) -> tuple[Tensor, Tensor]:
    x, grad_T = x.contiguous(), grad_T.contiguous()
    dx, dw = _head_gradients(x, g, needs_x, needs_head)
    if needs_x:
        dx_unit = dx_unit[:len(x)]
        _launch_mix(_mix_forward_kernel, _mix_settings("mix forward", dx_unit), (dx, *[None] * 4), [grad_T], [dx_unit])
    if needs_head and g.dtype == E5M2:
        top = grad_T.abs().amax()
        share_T = grad_T / torch.where(top > 0, top, 1.0)
        _scaled_product(_quantize_scaled(x, X_SCALE, transposed=True, share=share_T)[1], g, X_SCALE, top * G_SCALE, dw)
    elif needs_head:
        torch.mm(torch.mul(x, grad_T[:, None], out=torch.empty_like(x)).T, g, out=dw)
    return dx, dw


@head_backward.register_fake
def _(x, dx_unit, g, grad_T, needs_x, needs_head):
    return _head_gradients(x, g, needs_x, needs_head)


@torch.library.custom_op("speedrun::quantize_head", mutates_args=())
def _quantize_head(lm_head: Tensor) -> tuple[Tensor, Tensor]:
    _check_fp8(lm_head)
    return _quantize_scaled(lm_head.contiguous(), W_SCALE, plain=True, transposed=True)


@_quantize_head.register_fake
def _(lm_head):
    return lm_head.new_empty(lm_head.shape, dtype=E4M3), lm_head.new_empty(lm_head.shape[::-1], dtype=E4M3)


@torch.library.custom_op("speedrun::head_cross_entropy", mutates_args=())
def _head_cross_entropy(x: Tensor, lm_head: Tensor, targets: Tensor, chunk: int) -> Tensor:
    _check_head(x, lm_head, targets)
    x, lm_head, targets = x.contiguous(), lm_head.contiguous(), targets.contiguous()
    sigma = x.new_empty(min(len(x), chunk), lm_head.shape[1], dtype=torch.float32)
    loss_T, weight = x.new_empty(len(x), dtype=torch.float32), torch.ones(1, device=x.device)
    for start in range(0, len(x), chunk):
        rows = slice(start, min(start + chunk, len(x)))
        sigma_TV = sigma[:rows.stop - start]
        sums = _softcap_rows(x[rows] @ lm_head, sigma_TV)
        _loss_from_sums(sigma_TV, sums, targets[rows], weight, loss_T[rows], 1.0)
    return loss_T


@_head_cross_entropy.register_fake
def _(x, lm_head, targets, chunk):
    return x.new_empty(len(x), dtype=torch.float32)


class _HeadLoss(torch.autograd.Function):
    """The logit gradient for an incoming gradient of 1 is made chunk by chunk in the forward pass, while a chunk's
    sigmoids exist; it is linear in the incoming per-token gradient, which the backward pass applies to the rows of dx
    and, through the rows of x, to dW. (Gradient in the forward pass: Liger-Kernel, arXiv 2410.10989.)"""

    @staticmethod
    def forward(ctx, x, lm_head, targets, mtp_weights, w8_DV, w8_VD, needs):
        loss_T, dx_unit, g = head_forward(x, lm_head, targets, mtp_weights, w8_DV, w8_VD, any(needs))
        ctx.save_for_backward(x, dx_unit, g)
        ctx.needs = needs
        return loss_T

    @staticmethod
    def backward(ctx, grad_T):
        grads = head_backward(*ctx.saved_tensors, grad_T, *ctx.needs)
        return *(grad if needed else None for grad, needed in zip(grads, ctx.needs)), None, None, None, None, None


# --- public ---

def _check_head(x, lm_head, targets, mtp_weights=None, w8_DV=None):
    require(x.dim() == 2 and lm_head.dim() == 2 and x.shape[1] == lm_head.shape[0] and len(x) > 0,
            f"the head takes x (T, D) and lm_head (D, V), got {tuple(x.shape)} and {tuple(lm_head.shape)}; "
            "flatten the batch and store lm_head as (model dim, vocabulary)")
    require(x.dtype == lm_head.dtype and x.dtype.is_floating_point and x.element_size() > 1,
            f"x and lm_head must share one floating-point dtype, got {x.dtype} and {lm_head.dtype}; cast one of them")
    require(targets.shape == x.shape[:1] and targets.dtype == torch.int64,
            f"targets must be one int64 a row of x, got {tuple(targets.shape)} {targets.dtype} for {len(x)} rows; "
            "pass the T next tokens as int64")
    if mtp_weights is not None:
        require(mtp_weights.dim() == 1 and len(mtp_weights) > 0 and mtp_weights.dtype.is_floating_point,
                f"mtp_weights must be a vector of at least one float, got {tuple(mtp_weights.shape)} "
                f"{mtp_weights.dtype}; pass one weight a predicted token")
    if w8_DV is not None:
        require(w8_DV.shape == lm_head.shape, f"quantized must be quantize_head(lm_head), got shape "
                f"{tuple(w8_DV.shape)} for {tuple(lm_head.shape)}; quantize this lm_head or leave it out")
    _require_one_device(x, lm_head, targets, mtp_weights, w8_DV)


def _check_fp8(lm_head):
    require(lm_head.dim() == 2 and lm_head.shape[0] % 16 == 0 and lm_head.shape[1] % 16 == 0,
            "an FP8 head needs a model dim and a vocabulary that are multiples of 16, got "
            f"{tuple(lm_head.shape)}; pad lm_head or pass fp8=False")


def quantize_head(lm_head):
    """lm_head (D, V) in e4m3 in both layouts: once per optimizer step is enough, see head_loss(quantized=).

    On a GPU for 16-bit weights only, else ValueError: from fp32 the transposed layout came out with rows missing
    (Triton 3.6).
    """
    require(not lm_head.is_cuda or lm_head.element_size() == 2,
            f"FP8 takes a 16-bit head, not {lm_head.dtype}: cast it, or leave FP8 off")
    if use_kernel(lm_head) and lm_head.dtype != torch.float64:
        return QuantizedHead(*_quantize_head(lm_head.detach()))
    w8_DV = (lm_head.detach().float() / W_SCALE).clamp(-448, 448).to(E4M3)
    return QuantizedHead(w8_DV, w8_DV.T.contiguous())


def head_loss(x, lm_head, targets, mtp_weights, *, fp8, quantized=None):
    """Softcapped multi-token cross-entropy of every token.  Reference: head_loss_reference.

    In    x (T, D) and lm_head (D, V) of one dtype; targets (T,) int64, negative: no target; mtp_weights (K,) fp32;
          fp8: products in FP8, else in x's dtype; quantized: quantize_head(lm_head), computed here when absent
    Out   loss (T,) fp32 (fp64 for fp64): sum over k < K, t + k < T of w_k * (lse_t - z_t[targets[t + k]]),
          z = 23 sigmoid((x lm_head + 5) / 7.5) over all V columns; not divided by the sum of weights
    Grad  for x and lm_head: the incoming per-token gradient times (sum of w * p - wanted) * dz/dlogit. The last K - 1
          rows keep the full sum of weights although their missing targets are dropped (so did the v3 record's loss).
          FP8: e5m2 logit gradients, e4m3 rows of x weighted by their share of max|g|, no fast accumulation
    Raises ValueError for shapes, dtypes, and dims that the kernels cannot take
    """
    require(fp8 or quantized is None, "a quantized head is for FP8 only, got fp8=False; pass fp8=True or leave it out")
    if not use_kernel(x, lm_head, targets) or x.dtype == torch.float64:
        return head_loss_reference(x, lm_head, targets, mtp_weights, fp8=fp8, quantized=quantized)
    w8_DV, w8_VD = (quantized or quantize_head(lm_head)) if fp8 else (None, None)
    training = torch.is_grad_enabled()
    needs = training and x.requires_grad, training and lm_head.requires_grad
    return _HeadLoss.apply(x, lm_head, targets, mtp_weights, w8_DV, w8_VD, needs)


@torch.no_grad()
def head_cross_entropy(x, lm_head, targets, chunk=8192):
    """Next-token cross-entropy of softcapped logits, for evaluation.  Reference: head_cross_entropy_reference.

    In    as head_loss; products in x's dtype, softcap and cross-entropy in fp32 (fp64 for fp64), `chunk` rows at a time
    Out   loss (T,) in nats, 0 where the target is negative; no gradient
    Raises ValueError
    """
    require(chunk > 0, "chunk counts rows and must be positive, got 0 or less; leave it at its default")
    if not use_kernel(x, lm_head, targets) or x.dtype == torch.float64:
        return head_cross_entropy_reference(x, lm_head, targets, chunk)
    return _head_cross_entropy(x, lm_head, targets, chunk)



# === Transposes ===

TRANSPOSE_TILES = dict(ROWS=64, COLS=64, num_warps=4)  # chosen as the head's above


def transpose_copy_reference(src, dst):
    dst.copy_(src.T)


def transpose_add_reference(src, dst):
    dst.add_(src.T)


@jit
def _transpose_kernel(src_ptr, dst_ptr, M, N, src_m, src_n, dst_n, dst_m, ADD: tl.constexpr, ROWS: tl.constexpr,
                      COLS: tl.constexpr):
    """dst[n, m] = src[m, n], or += ; reads and writes both walk their contiguous dim."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (m < M)[:, None] & (n < N)[None, :]
    tile = tl.load(src_ptr + m.to(tl.int64)[:, None] * src_m + n.to(tl.int64)[None, :] * src_n, mask=inside).T
    dst = dst_ptr + n.to(tl.int64)[:, None] * dst_n + m.to(tl.int64)[None, :] * dst_m
    if ADD:
        tile += tl.load(dst, mask=inside.T)  # low precision adds as fp32 would: the exact sum, rounded once
    tl.store(dst, tile, mask=inside.T)


def _check_transpose(src, dst):
    require(src.dim() == 2 and dst.shape == src.T.shape and (src.dtype, src.device) == (dst.dtype, dst.device),
            f"transposes take src (M, N), dst (N, M) of one dtype, on one device, got {_kind(src)} on {src.device} and "
            f"{_kind(dst)} on {dst.device}; allocate dst as the transpose of src")


def _transpose(src, dst, add):
    M, N = src.shape
    grid = triton.cdiv(M, TRANSPOSE_TILES["ROWS"]), triton.cdiv(N, TRANSPOSE_TILES["COLS"])
    _transpose_kernel[grid](src, dst, M, N, *src.stride(), *dst.stride(), ADD=add, **TRANSPOSE_TILES)


def transpose_copy(src, dst):
    """dst[n, m] = src[m, n], any strides; the kernel takes elements of 1, 2 or 4 bytes, others the reference. Raises
    ValueError."""
    _check_transpose(src, dst)
    if not use_kernel(src, dst) or src.element_size() > 4:
        return transpose_copy_reference(src, dst)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[src.element_size()]
    _transpose(src.view(word), dst.view(word), add=False)


def transpose_add(src, dst):
    """dst[n, m] += src[m, n] for floating-point elements, any strides. Raises ValueError."""
    _check_transpose(src, dst)
    if not use_kernel(src, dst):
        return transpose_add_reference(src, dst)
    _transpose(src, dst, add=True)
