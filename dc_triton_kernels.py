"""Windowed DC softmax correction, forward and backward: eager reference and Triton kernels.

The op. Beside a layer's own attention (result `base`), each head looks once more at the last `window` keys of its
document, itself included, with its own softmax. Every token then mixes the heads' maps into a single one, which all
heads apply to their values:

    S_h = scale q_h k_h^T      P_h = softmax(S_h)      A = sum_h w1_h P_h      y_h = base_h + w2_h (A v_h)

(h counts heads; w1_h and w2_h scale the rows, which are tokens; scores outside window and document are masked.)

The algebra. Because A is shared, most of the work is not per head. With G the gradient of y:

    M_h = G_h v_h^T            dA = sum_h w2_h M_h                dw2_h = rowsum(A * M_h)
    dw1_h = rowsum(P_h * dA)   dS_h = P_h * w1_h (dA - dw1_h)     dq_h = scale dS_h k_h       dk_h = scale dS_h^T q_h
    dv_h = A^T (w2_h G_h)      dbase = G

dw2 needs neither u_h = A v_h nor a second product, and dS is FlashAttention's formula with w1_h dw1_h as its delta.

The kernels. A program takes 64 queries (32 where there is no copy engine), the smallest tile of Hopper's tensor-core
instruction: at window 112 they can see 175 keys, and the program visits 192 of them, its own 64 ("diagonal") and the
LEFT = 128 before (64 where the window allows). So a whole row of scores stays in registers, and the softmax is exact in
one pass. What kernels hand each other (A, dA, and dS of each head) is a band: row t holds the LEFT + 64 keys that t's
program visits. The forward pass keeps A. The backward pass is three kernels in which each value has one writer, so
nothing is atomic and the same inputs give the same bits.

    forward        q, k -> P, A; A, v, base -> y               a program: 64 queries, all heads
    mixed_grad     G, v, A -> dA, dw2                          a program: 64 queries, all heads
    query_grad     q, k, dA -> dw1, dS, dq                     a program: 64 queries, one head
    key_grad       dS, q -> dk; A, G -> dv                     a program: 64 keys, one head

Where the time goes (H200, T = 49152, N = 6, H = 128, window 112: 177 us forward, 366 us backward). By count the kernels
draw 3.9 (forward) to 5.3 TB/s (key_grad) of tiles out of L2, three times each row of k and v, while the tensor cores do
0.19 PFLOP/s: a faster version would have to reread less.

Shape letters: T tokens, N heads, H head dim, M queries of a block, K keys that a block of queries can see, B blocks.
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from triton_kernels import TensorDescriptor, aligned, card_of, jit, require, round_up, tl, use_kernel

# --- reference ---

def dc_correction_reference(q, k, v, w1, w2, base, cu_seqlens, *, scale, window=112):
    """The definition in eager torch, banded: blocks of `window` queries against the 2 window - 1 keys they can see.
    Arithmetic in fp32 (fp64 for fp64 inputs), one rounding at the end; differentiable by autograd."""
    T, N, H = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    block = min(window, T)
    blocks = -(-T // block)
    tail = blocks * block - T
    span = block + window - 1

    def query_blocks(x_T):  # (B, M, ...)
        x_T = x_T.to(wide)
        return torch.cat([x_T, x_T.new_zeros(tail, *x_T.shape[1:])]).unflatten(0, (blocks, block))

    def key_spans(x_TNH):  # (B, N, H, K), overlapping views of one padded copy
        return F.pad(x_TNH.to(wide), (0, 0, 0, 0, window - 1, tail)).unfold(0, span, block)

    boundaries = cu_seqlens.long()
    t_T = torch.arange(blocks * block, device=q.device)
    start_T = boundaries[torch.searchsorted(boundaries, t_T, right=True) - 1]  # `right`: past empty documents
    first_BM1 = torch.maximum(start_T, t_T - window + 1).view(blocks, block, 1)
    t_BM1 = t_T.view(blocks, block, 1)
    s_B1K = t_BM1[:, :1] - (window - 1) + torch.arange(span, device=q.device)
    hidden_B1MK = ((s_B1K < first_BM1) | (s_B1K > t_BM1))[:, None]

    scores_BNMK = scale * torch.einsum("bmnh,bnhk->bnmk", query_blocks(q), key_spans(k))
    p_BNMK = scores_BNMK.masked_fill(hidden_B1MK, float("-inf")).softmax(-1)
    a_BMK = torch.einsum("bmn,bnmk->bmk", query_blocks(w1), p_BNMK)
    u_BMNH = torch.einsum("bmk,bnhk->bmnh", a_BMK, key_spans(v))
    y_BMNH = query_blocks(base) + query_blocks(w2)[..., None] * u_BMNH
    return y_BMNH.flatten(0, 1)[:T].to(q.dtype)


# --- kernels ---

# Arguments named *_rows are matrices read by tiles, (T, N * H) unless they are bands; a tile may begin before token 0
# and end after T, where it holds zeros. Bands, lse and first have whole blocks of rows; those past T are written too.

# By card and kernel. "large" swept on an H200, 2026-11-30, Triton 3.6.0: two programs of four warps on a multiprocessor
# beat one of eight with three stages (forward 182 against 240 us), as where one product feeds another Triton gives both
# halves of eight warps the same 64 rows; mixed_grad has no such pair. "small" (plain pointers, tiles for small shared
# memory) is compiled ahead of time, never run.
DC_BLOCK = {"large": 64, "small": 32}  # queries of a program, keys of key_grad's
DC_TILES = {
    ("large", "forward"): dict(num_warps=4, num_stages=1),
    ("large", "mixed_grad"): dict(num_warps=8, num_stages=3),
    ("large", "query_grad"): dict(num_warps=4, num_stages=1),
    ("large", "key_grad"): dict(num_warps=4, num_stages=2),
} | {("small", name): dict(num_warps=4, num_stages=2) for name in ("forward", "mixed_grad", "query_grad", "key_grad")}


@jit
def _dc_first_key(cu_ptr, boundaries, rows, window, BLOCK: tl.constexpr):
    """The first key that each row may see: the largest boundary not past it, or the edge of its window."""
    start = tl.zeros((BLOCK, 64), tl.int32)
    for i in range(0, boundaries, 64):
        cu = tl.load(cu_ptr + i + tl.arange(0, 64), mask=i + tl.arange(0, 64) < boundaries, other=0)
        start = tl.maximum(start, tl.where(cu[None, :] <= rows[:, None], cu[None, :], 0))
    return tl.maximum(tl.max(start, 1), rows - window + 1)


@jit
def _dc_tile(matrix, row0, column0, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             ENGINE: tl.constexpr):
    """A tile of a (rows, WIDTH) matrix, zeros outside: `matrix` is a descriptor where the card has a copy engine, else
    a pointer to it, contiguous."""
    if ENGINE:
        return matrix.load([row0, column0])
    else:
        row = tl.arange(0, ROWS)[:, None]
        tile = matrix + row0.to(tl.int64) * WIDTH + row * WIDTH + column0 + tl.arange(0, COLUMNS)[None, :]
        return tl.load(tile, mask=(row0 + row >= 0) & (row0 + row < rows), other=0.0)


@jit
def _dc_scores(q, k, key0, rows, first, scale_log2e, KEYS: tl.constexpr, DIAGONAL: tl.constexpr):
    """Scores in units of log 2, -inf where masked. The subtraction of lse stays outside: fused into the product it
    would round differently from the forward pass, and a row with a single key would not get P = 1 exactly."""
    keys = key0 + tl.arange(0, KEYS)
    allowed = keys[None, :] >= first[:, None]
    if DIAGONAL:
        allowed = allowed & (keys[None, :] <= rows[:, None])
    return tl.where(allowed, tl.dot(q, tl.trans(k)) * scale_log2e, float("-inf"))


@jit
def _dc_band(band_ptr, row0, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the left and the diagonal part of one block of a band."""
    starts = band_ptr + row0.to(tl.int64) * (LEFT + BLOCK) + tl.arange(0, BLOCK)[:, None] * (LEFT + BLOCK)
    return starts + tl.arange(0, LEFT)[None, :], starts + LEFT + tl.arange(0, BLOCK)[None, :]


@jit
def _dc_column(x_ptr, rows, h, stride, T):
    """Column h of a (T, N) matrix, as fp32."""
    return tl.load(x_ptr + rows.to(tl.int64) * stride + h, mask=rows < T, other=0.0).to(tl.float32)


@jit
def _dc_store(out_ptr, row0, h, value, T, N: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """Store one head's tile of a contiguous (T, N, H) tensor."""
    rows = tl.arange(0, BLOCK)[:, None]
    out_ptrs = out_ptr + row0.to(tl.int64) * (N * H) + rows * (N * H) + h * H + tl.arange(0, H)[None, :]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=row0 + rows < T)


@jit
def _dc_forward_kernel(q_rows, k_rows, k_left_rows, v_rows, v_left_rows, base_rows, w1_ptr, w2_ptr, cu_ptr,
                       y_ptr, a_ptr, lse_ptr, first_ptr, T, boundaries, w1_stride, w2_stride, scale_log2e, window,
                       N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
                       ENGINE: tl.constexpr):
    row0 = tl.program_id(0) * BLOCK
    padded_T = tl.num_programs(0) * BLOCK
    rows = row0 + tl.arange(0, BLOCK)
    first = _dc_first_key(cu_ptr, boundaries, rows, window, BLOCK)
    tl.store(first_ptr + rows, first)
    a_left = tl.zeros((BLOCK, LEFT), tl.float32)
    a_diag = tl.zeros((BLOCK, BLOCK), tl.float32)
    for h in range(N):
        q = _dc_tile(q_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)
        k_diag = _dc_tile(k_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)
        s_diag = _dc_scores(q, k_diag, row0, rows, first, scale_log2e, BLOCK, True)
        k_left = _dc_tile(k_left_rows, row0 - LEFT, h * H, T, N * H, LEFT, H, ENGINE)
        s_left = _dc_scores(q, k_left, row0 - LEFT, rows, first, scale_log2e, LEFT, False)
        top = tl.maximum(tl.max(s_left, 1), tl.max(s_diag, 1))
        p_left = tl.exp2(s_left - top[:, None])
        p_diag = tl.exp2(s_diag - top[:, None])
        total = tl.sum(p_left, 1) + tl.sum(p_diag, 1)
        tl.store(lse_ptr + h * padded_T + rows, top + tl.log2(total))
        weight = _dc_column(w1_ptr, rows, h, w1_stride, T) / total
        a_left += weight[:, None] * p_left
        a_diag += weight[:, None] * p_diag
    a_left = a_left.to(a_ptr.dtype.element_ty)
    a_diag = a_diag.to(a_ptr.dtype.element_ty)
    left_ptrs, diag_ptrs = _dc_band(a_ptr, row0, LEFT, BLOCK)
    tl.store(left_ptrs, a_left)
    tl.store(diag_ptrs, a_diag)
    for h in range(N):
        w2 = _dc_column(w2_ptr, rows, h, w2_stride, T)
        base = _dc_tile(base_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)
        u = tl.dot(a_diag, _dc_tile(v_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE))
        u = tl.dot(a_left, _dc_tile(v_left_rows, row0 - LEFT, h * H, T, N * H, LEFT, H, ENGINE), u)
        _dc_store(y_ptr, row0, h, base + w2[:, None] * u, T, N, H, BLOCK)


@jit
def _dc_mixed_grad_kernel(g_rows, v_rows, v_left_rows, w2_ptr, a_ptr, da_ptr, dw2_ptr, T, w2_stride,
                          N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
                          ENGINE: tl.constexpr):
    row0 = tl.program_id(0) * BLOCK
    rows = row0 + tl.arange(0, BLOCK)
    left_ptrs, diag_ptrs = _dc_band(a_ptr, row0, LEFT, BLOCK)
    a_left = tl.load(left_ptrs)
    a_diag = tl.load(diag_ptrs)
    da_left = tl.zeros((BLOCK, LEFT), tl.float32)
    da_diag = tl.zeros((BLOCK, BLOCK), tl.float32)
    for h in range(N):
        w2 = _dc_column(w2_ptr, rows, h, w2_stride, T)
        g = _dc_tile(g_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)
        m_diag = tl.dot(g, tl.trans(_dc_tile(v_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)))
        m_left = tl.dot(g, tl.trans(_dc_tile(v_left_rows, row0 - LEFT, h * H, T, N * H, LEFT, H, ENGINE)))
        dw2 = tl.sum(a_left * m_left, 1) + tl.sum(a_diag * m_diag, 1)
        tl.store(dw2_ptr + rows * N + h, dw2.to(dw2_ptr.dtype.element_ty), mask=rows < T)
        da_left += w2[:, None] * m_left
        da_diag += w2[:, None] * m_diag
    left_ptrs, diag_ptrs = _dc_band(da_ptr, row0, LEFT, BLOCK)  # unmasked: P is zero where dA is meaningless
    tl.store(left_ptrs, da_left.to(da_ptr.dtype.element_ty))
    tl.store(diag_ptrs, da_diag.to(da_ptr.dtype.element_ty))


@jit
def _dc_query_grad_kernel(q_rows, k_rows, k_left_rows, w1_ptr, da_ptr, lse_ptr, first_ptr, dq_ptr, dw1_ptr, ds_ptr,
                          T, w1_stride, scale, scale_log2e,
                          N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
                          ENGINE: tl.constexpr):
    h = tl.program_id(0)  # heads run fastest, so that whole rows are in flight: 6 to 9% faster than blocks first
    row0 = tl.program_id(1) * BLOCK
    padded_T = tl.num_programs(1) * BLOCK
    rows = row0 + tl.arange(0, BLOCK)
    left_ptrs, diag_ptrs = _dc_band(da_ptr, row0, LEFT, BLOCK)
    da_diag = tl.load(diag_ptrs)
    da_left = tl.load(left_ptrs)
    first = tl.load(first_ptr + rows)
    lse = tl.load(lse_ptr + h * padded_T + rows)
    w1 = _dc_column(w1_ptr, rows, h, w1_stride, T)
    q = _dc_tile(q_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)
    k_diag = _dc_tile(k_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE)
    k_left = _dc_tile(k_left_rows, row0 - LEFT, h * H, T, N * H, LEFT, H, ENGINE)
    p_diag = tl.exp2(_dc_scores(q, k_diag, row0, rows, first, scale_log2e, BLOCK, True) - lse[:, None])
    p_left = tl.exp2(_dc_scores(q, k_left, row0 - LEFT, rows, first, scale_log2e, LEFT, False) - lse[:, None])
    dw1 = tl.sum(p_left * da_left, 1) + tl.sum(p_diag * da_diag, 1)
    tl.store(dw1_ptr + rows * N + h, dw1.to(dw1_ptr.dtype.element_ty), mask=rows < T)
    ds_diag = (p_diag * (w1[:, None] * (da_diag - dw1[:, None]))).to(q.dtype)
    ds_left = (p_left * (w1[:, None] * (da_left - dw1[:, None]))).to(q.dtype)
    left_ptrs, diag_ptrs = _dc_band(ds_ptr, h * padded_T + row0, LEFT, BLOCK)
    tl.store(diag_ptrs, ds_diag)
    tl.store(left_ptrs, ds_left)
    dq = tl.dot(ds_diag, k_diag)
    dq = tl.dot(ds_left, k_left, dq)
    _dc_store(dq_ptr, row0, h, dq * scale, T, N, H, BLOCK)


@jit
def _dc_key_grad_kernel(q_rows, g_rows, a_rows, ds_rows, w2_ptr, dk_ptr, dv_ptr, T, w2_stride, scale,
                        N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr,
                        ENGINE: tl.constexpr):
    h = tl.program_id(0)
    key0 = tl.program_id(1) * BLOCK
    padded_T = tl.num_programs(1) * BLOCK
    dk = tl.zeros((BLOCK, H), tl.float32)
    dv = tl.zeros((BLOCK, H), tl.float32)
    for ahead in range(0, tl.minimum(LEFT + BLOCK, padded_T - key0), BLOCK):  # the queries that see these keys
        row0 = key0 + ahead
        w2 = _dc_column(w2_ptr, row0 + tl.arange(0, BLOCK), h, w2_stride, T)
        a = _dc_tile(a_rows, row0, LEFT - ahead, padded_T, LEFT + BLOCK, BLOCK, BLOCK, ENGINE)
        weighted = tl.trans(a) * w2[None, :].to(a.dtype)
        dv = tl.dot(weighted, _dc_tile(g_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE), dv)
        ds = _dc_tile(ds_rows, h * padded_T + row0, LEFT - ahead, N * padded_T, LEFT + BLOCK, BLOCK, BLOCK, ENGINE)
        dk = tl.dot(tl.trans(ds), _dc_tile(q_rows, row0, h * H, T, N * H, BLOCK, H, ENGINE), dk)
    _dc_store(dk_ptr, key0, h, dk * scale, T, N, H, BLOCK)
    _dc_store(dv_ptr, key0, h, dv, T, N, H, BLOCK)


# --- launches ---

LOG2E = math.log2(math.e)


def _dc_rows(x_TNH, card):
    """(T, N, H) as the matrix (T, N * H): a view where the copy engine can read it, or plain pointers (which want a
    contiguous one), else a copy."""
    x = aligned(x_TNH.flatten(1))
    return x if card == "large" else x.contiguous()


def _dc_weights(w_TN):
    return w_TN if w_TN.stride(1) == 1 else w_TN.contiguous()


def _launch_dc(name, kernel, grid, card, matrices, arguments, N, H, LEFT):
    """`matrices`: what the kernel reads by tiles of (rows, columns), in its order."""
    if card == "large":
        matrices = [(TensorDescriptor.from_tensor(x, tile), tile) for x, tile in matrices]
    kernel[grid](*(x for x, _ in matrices), *arguments, N=N, H=H, LEFT=LEFT, BLOCK=DC_BLOCK[card],
                 ENGINE=card == "large", **DC_TILES[card, name])


@torch.library.custom_op("speedrun::dc_forward", mutates_args=())
def dc_forward(
    q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, base: Tensor, cu_seqlens: Tensor, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y (T, N, H), and what the backward pass wants, T rounded up to whole blocks: the band of A (T, LEFT + block), lse
    in units of log 2 (N, T), the first visible key (T,)."""
    y, a, lse, first = results = _dc_empty_results(q, k, v, w1, w2, base, cu_seqlens, scale, window)
    (T, N, H), (card, _) = q.shape, card_of(q.device)
    block = DC_BLOCK[card]
    one, left = [block, H], [a.shape[1] - block, H]
    q, k, v, base = (_dc_rows(x, card) for x in (q, k, v, base))
    w1, w2 = _dc_weights(w1), _dc_weights(w2)
    _launch_dc("forward", _dc_forward_kernel, (len(first) // block,), card,
               [(q, one), (k, one), (k, left), (v, one), (v, left), (base, one)],
               [w1, w2, cu_seqlens.contiguous(), y, a, lse, first, T, len(cu_seqlens), w1.stride(0), w2.stride(0),
                scale * LOG2E, window], N, H, left[0])
    return results


@dc_forward.register_fake
def _dc_empty_results(q, k, v, w1, w2, base, cu_seqlens, scale, window):
    (T, N, _), block = q.shape, DC_BLOCK[card_of(q.device)[0]]
    padded_T = round_up(T, block)
    band = q.new_empty(padded_T, (64 if window <= 65 else 128) + block)  # LEFT, a power of two, holds window - 1 keys
    lse = q.new_empty(N, padded_T, dtype=torch.float32)
    return q.new_empty(q.shape), band, lse, q.new_empty(padded_T, dtype=torch.int32)


@torch.library.custom_op("speedrun::dc_backward", mutates_args=())
def dc_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, w1: Tensor, w2: Tensor, a: Tensor, lse: Tensor, first: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv (T, N, H) and dw1, dw2 (T, N), contiguous."""
    dq, dk, dv, dw1, dw2 = grads = _dc_empty_gradients(g, q, k, v, w1, w2, a, lse, first, scale)
    (T, N, H), (card, _) = q.shape, card_of(q.device)
    block = DC_BLOCK[card]
    blocks, LEFT = len(first) // block, a.shape[1] - block
    one, left, cell = [block, H], [LEFT, H], [block, block]
    q, k, v, g = (_dc_rows(x, card) for x in (q, k, v, g))
    w1, w2 = _dc_weights(w1), _dc_weights(w2)
    da, ds = torch.empty_like(a), a.new_empty(N * len(a), a.shape[1])
    _launch_dc("mixed_grad", _dc_mixed_grad_kernel, (blocks,), card, [(g, one), (v, one), (v, left)],
               [w2, a, da, dw2, T, w2.stride(0)], N, H, LEFT)
    _launch_dc("query_grad", _dc_query_grad_kernel, (N, blocks), card, [(q, one), (k, one), (k, left)],
               [w1, da, lse, first, dq, dw1, ds, T, w1.stride(0), scale, scale * LOG2E], N, H, LEFT)
    _launch_dc("key_grad", _dc_key_grad_kernel, (N, blocks), card, [(q, one), (g, one), (a, cell), (ds, cell)],
               [w2, dk, dv, T, w2.stride(0), scale], N, H, LEFT)
    return grads


@dc_backward.register_fake
def _dc_empty_gradients(g, q, k, v, w1, w2, a, lse, first, scale):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, w1, w2))


class _DCCorrection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, w1, w2, base, cu_seqlens, scale, window):
        y, a, lse, first = dc_forward(q, k, v, w1, w2, base, cu_seqlens, scale, window)
        ctx.save_for_backward(q, k, v, w1, w2, a, lse, first)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx, g):
        return *dc_backward(g, *ctx.saved_tensors, ctx.scale), g, None, None, None


def dc_correction(q, k, v, w1, w2, base, cu_seqlens, *, scale: float, window: int = 112):
    """y_h = base_h + w2_h (A v_h) with A = sum_h w1_h softmax(scale q_h k_h^T) over a short window; see the module.

    q, k, v, base (T, N, H), one floating-point dtype; bf16 and fp16 on a GPU take the kernels, where H is a power of
                  two, 16 to 128; fp32 and fp64 take the reference
    w1, w2        (T, N), the same dtype: each token's weight of each head in A, and of A v_h in y_h
    cu_seqlens    (S,) int32, token positions where documents begin: [0] is 0, never decreasing, padded with T at the
                  end; equal boundaries are empty documents. Its contents are not checked: that costs a device sync.
    scale         of the scores
    window        key s is visible to query t iff in the same document and 0 <= t - s < window; the kernels: up to 128

    Returns y (T, N, H), contiguous. Gradients reach q, k, v, w1, w2 and base, and are bitwise repeatable. Inputs whose
    heads are not adjacent in memory are copied first. Raises ValueError.
    """
    T, N, H = q.shape if q.dim() == 3 else (0, 0, 0)
    require(T > 0 and q.shape == k.shape == v.shape == base.shape,
            f"q, k, v and base must share one non-empty shape (T, N, H), not "
            f"{[tuple(x.shape) for x in (q, k, v, base)]}: reshape")
    require(w1.shape == w2.shape == q.shape[:2],
            f"w1 and w2 must be (T, N) = {(T, N)}, not {tuple(w1.shape)} and {tuple(w2.shape)}: one weight a head")
    require(q.is_floating_point() and all(x.dtype == q.dtype for x in (k, v, w1, w2, base)),
            f"q, k, v, w1, w2 and base must share one floating-point dtype, not "
            f"{[str(x.dtype) for x in (q, k, v, w1, w2, base)]}: cast them alike")
    require(cu_seqlens.dim() == 1 and len(cu_seqlens) >= 2 and cu_seqlens.dtype == torch.int32,
            f"cu_seqlens must be (S,) int32 with S >= 2, not {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}: cast it")
    require(all(x.device == q.device for x in (k, v, w1, w2, base, cu_seqlens)),
            f"all inputs must be on {q.device}, not {[str(x.device) for x in (k, v, w1, w2, base, cu_seqlens)]}: "
            "move them there")
    require(window >= 1, f"window must be at least 1, not {window}: 1 lets each query see only itself")
    without_tensor_cores = q.is_cuda and q.element_size() != 2  # the tiles would not fit the registers
    if without_tensor_cores or not use_kernel(q, k, v, w1, w2, base, cu_seqlens):
        return dc_correction_reference(q, k, v, w1, w2, base, cu_seqlens, scale=scale, window=window)
    require(window <= 128, f"the kernels take windows up to 128, not {window}: use dc_correction_reference "
            "(REFERENCE_OPS=1)")
    require(16 <= H <= 128 and H & (H - 1) == 0,
            f"the kernels take heads of 16, 32, 64 or 128, not {H}: use dc_correction_reference (REFERENCE_OPS=1)")
    return _DCCorrection.apply(q, k, v, w1, w2, base, cu_seqlens, scale, window)
