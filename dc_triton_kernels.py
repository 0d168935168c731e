"""Windowed DC softmax correction."""
import torch
import torch.nn.functional as F

from triton_kernels import jit, require, tl, triton, use_kernel

BLOCK = 64
LOG2E = 1.4426950408889634
DC_TILES = {"forward": (8, 1), "queries": (8, 1), "keys": (4, 2)}


@jit
def _dc_rows(x_ptr, row0, T, stride, ROWS: tl.constexpr, H: tl.constexpr):
    rows = row0 + tl.arange(0, ROWS)
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, H)[None, :]
    return tl.load(x_ptr + row0.to(tl.int64) * stride + offsets, mask=((rows >= 0) & (rows < T))[:, None], other=0.0)


@jit
def _dc_first_key(cu_ptr, S, rows, window):
    start = tl.zeros_like(rows)
    for i in range(0, S, 128):
        cu = tl.load(cu_ptr + i + tl.arange(0, 128), mask=i + tl.arange(0, 128) < S, other=0)
        start = tl.maximum(start, tl.max(tl.where(cu[None, :] <= rows[:, None], cu[None, :], 0), 1))
    return tl.maximum(start, rows - window + 1)


@jit
def _dc_scores(q, k, allowed, scale_log2e):
    return tl.where(allowed, tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2e, float("-inf"))


@jit
def _dc_forward_kernel(q_ptr, k_ptr, v_ptr, w1_ptr, w2_ptr, base_ptr, cu_ptr, y_ptr, a_ptr, lse_ptr, first_ptr,
                       T, S, q_t, q_n, k_t, k_n, v_t, v_n, w1_t, w2_t, base_t, base_n, scale_log2e, window,
                       N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    row0 = tl.program_id(0) * BLOCK
    rows = row0 + tl.arange(0, BLOCK)
    first = _dc_first_key(cu_ptr, S, rows, window)
    tl.store(first_ptr + rows, first)
    left = row0 - LEFT + tl.arange(0, LEFT)
    in_left = left[None, :] >= first[:, None]
    in_diag = (rows[None, :] >= first[:, None]) & (rows[None, :] <= rows[:, None])
    a_left = tl.zeros((BLOCK, LEFT), tl.float32)
    a_diag = tl.zeros((BLOCK, BLOCK), tl.float32)
    pad_T = tl.num_programs(0) * BLOCK
    for h in range(N):
        q = _dc_rows(q_ptr + h * q_n, row0, T, q_t, BLOCK, H)
        k_left = _dc_rows(k_ptr + h * k_n, row0 - LEFT, T, k_t, LEFT, H)
        k_diag = _dc_rows(k_ptr + h * k_n, row0, T, k_t, BLOCK, H)
        s_left = _dc_scores(q, k_left, in_left, scale_log2e)
        s_diag = _dc_scores(q, k_diag, in_diag, scale_log2e)
        top = tl.maximum(tl.max(s_left, 1), tl.max(s_diag, 1))
        p_left = tl.exp2(s_left - top[:, None])
        p_diag = tl.exp2(s_diag - top[:, None])
        total = tl.sum(p_left, 1) + tl.sum(p_diag, 1)
        tl.store(lse_ptr + h * pad_T + rows, top + tl.log2(total))
        weight = tl.load(w1_ptr + rows * w1_t + h, mask=rows < T, other=0.0) / total
        a_left += weight[:, None] * p_left
        a_diag += weight[:, None] * p_diag
    a_left = a_left.to(q_ptr.dtype.element_ty)
    a_diag = a_diag.to(q_ptr.dtype.element_ty)
    band = a_ptr + rows[:, None] * (LEFT + BLOCK)
    tl.store(band + tl.arange(0, LEFT)[None, :], a_left)
    tl.store(band + LEFT + tl.arange(0, BLOCK)[None, :], a_diag)
    y_ptrs = y_ptr + rows[:, None] * (N * H) + tl.arange(0, H)[None, :]
    for h in range(N):
        base = _dc_rows(base_ptr + h * base_n, row0, T, base_t, BLOCK, H)
        v_left = _dc_rows(v_ptr + h * v_n, row0 - LEFT, T, v_t, LEFT, H)
        v_diag = _dc_rows(v_ptr + h * v_n, row0, T, v_t, BLOCK, H)
        u = tl.dot(a_left, v_left, input_precision="ieee")
        u = tl.dot(a_diag, v_diag, u, input_precision="ieee")
        w2 = tl.load(w2_ptr + rows * w2_t + h, mask=rows < T, other=0.0)
        y = base + w2[:, None].to(tl.float32) * u
        tl.store(y_ptrs + h * H, y.to(y_ptr.dtype.element_ty), mask=(rows < T)[:, None])


@jit
def _dc_backward_queries_kernel(q_ptr, k_ptr, v_ptr, w1_ptr, w2_ptr, g_ptr, a_ptr, lse_ptr, first_ptr,
                                dq_ptr, dw1_ptr, dw2_ptr, ds_ptr,
                                T, q_t, q_n, k_t, k_n, v_t, v_n, w1_t, w2_t, g_t, g_n, scale, scale_log2e,
                                N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    row0 = tl.program_id(0) * BLOCK
    rows = row0 + tl.arange(0, BLOCK)
    first = tl.load(first_ptr + rows)
    left = row0 - LEFT + tl.arange(0, LEFT)
    in_left = left[None, :] >= first[:, None]
    in_diag = (rows[None, :] >= first[:, None]) & (rows[None, :] <= rows[:, None])
    pad_T = tl.num_programs(0) * BLOCK
    band = rows[:, None] * (LEFT + BLOCK)
    left_band = band + tl.arange(0, LEFT)[None, :]
    diag_band = band + LEFT + tl.arange(0, BLOCK)[None, :]
    a_left = tl.load(a_ptr + left_band)
    a_diag = tl.load(a_ptr + diag_band)
    da_left = tl.zeros((BLOCK, LEFT), tl.float32)
    da_diag = tl.zeros((BLOCK, BLOCK), tl.float32)
    for h in range(N):
        g = _dc_rows(g_ptr + h * g_n, row0, T, g_t, BLOCK, H)
        v_left = _dc_rows(v_ptr + h * v_n, row0 - LEFT, T, v_t, LEFT, H)
        v_diag = _dc_rows(v_ptr + h * v_n, row0, T, v_t, BLOCK, H)
        w2 = tl.load(w2_ptr + rows * w2_t + h, mask=rows < T, other=0.0).to(tl.float32)
        m_left = tl.dot(g, tl.trans(v_left), input_precision="ieee")
        m_diag = tl.dot(g, tl.trans(v_diag), input_precision="ieee")
        da_left += w2[:, None] * m_left
        da_diag += w2[:, None] * m_diag
        dw2 = tl.sum(a_left * m_left, 1) + tl.sum(a_diag * m_diag, 1)
        tl.store(dw2_ptr + rows * N + h, dw2.to(dw2_ptr.dtype.element_ty), mask=rows < T)
    for h in range(N):
        q = _dc_rows(q_ptr + h * q_n, row0, T, q_t, BLOCK, H)
        k_left = _dc_rows(k_ptr + h * k_n, row0 - LEFT, T, k_t, LEFT, H)
        k_diag = _dc_rows(k_ptr + h * k_n, row0, T, k_t, BLOCK, H)
        lse = tl.load(lse_ptr + h * pad_T + rows)
        w1 = tl.load(w1_ptr + rows * w1_t + h, mask=rows < T, other=0.0).to(tl.float32)
        p_left = tl.exp2(_dc_scores(q, k_left, in_left, scale_log2e) - lse[:, None])
        p_diag = tl.exp2(_dc_scores(q, k_diag, in_diag, scale_log2e) - lse[:, None])
        dw1 = tl.sum(p_left * da_left, 1) + tl.sum(p_diag * da_diag, 1)
        tl.store(dw1_ptr + rows * N + h, dw1.to(dw1_ptr.dtype.element_ty), mask=rows < T)
        ds_left = (p_left * (w1[:, None] * (da_left - dw1[:, None]))).to(q.dtype)
        ds_diag = (p_diag * (w1[:, None] * (da_diag - dw1[:, None]))).to(q.dtype)
        ds_head = ds_ptr + (h * pad_T).to(tl.int64) * (LEFT + BLOCK)
        tl.store(ds_head + left_band, ds_left)
        tl.store(ds_head + diag_band, ds_diag)
        dq = tl.dot(ds_left, k_left, input_precision="ieee")
        dq = tl.dot(ds_diag, k_diag, dq, input_precision="ieee")
        dq_ptrs = dq_ptr + rows[:, None] * (N * H) + h * H + tl.arange(0, H)[None, :]
        tl.store(dq_ptrs, (dq * scale).to(q.dtype), mask=(rows < T)[:, None])


@jit
def _dc_backward_keys_kernel(q_ptr, w2_ptr, g_ptr, a_ptr, ds_ptr, dk_ptr, dv_ptr,
                             T, q_t, q_n, w2_t, g_t, g_n, scale,
                             N: tl.constexpr, H: tl.constexpr, LEFT: tl.constexpr, BLOCK: tl.constexpr):
    key0 = tl.program_id(0) * BLOCK
    h = tl.program_id(1)
    pad_T = tl.num_programs(0) * BLOCK
    dk = tl.zeros((BLOCK, H), tl.float32)
    dv = tl.zeros((BLOCK, H), tl.float32)
    ds_head = ds_ptr + (h * pad_T).to(tl.int64) * (LEFT + BLOCK)
    for row0 in range(key0, tl.minimum(key0 + LEFT + BLOCK, T), BLOCK):
        rows = row0 + tl.arange(0, BLOCK)
        band = rows[:, None] * (LEFT + BLOCK) + (LEFT + key0 - row0) + tl.arange(0, BLOCK)[None, :]
        q = _dc_rows(q_ptr + h * q_n, row0, T, q_t, BLOCK, H)
        g = _dc_rows(g_ptr + h * g_n, row0, T, g_t, BLOCK, H)
        w2 = tl.load(w2_ptr + rows * w2_t + h, mask=rows < T, other=0.0)
        a = tl.load(a_ptr + band) * w2[:, None]
        ds = tl.load(ds_head + band)
        dv = tl.dot(tl.trans(a), g, dv, input_precision="ieee")
        dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
    keys = key0 + tl.arange(0, BLOCK)
    out = keys[:, None] * (N * H) + h * H + tl.arange(0, H)[None, :]
    tl.store(dk_ptr + out, (dk * scale).to(q_ptr.dtype.element_ty), mask=(keys < T)[:, None])
    tl.store(dv_ptr + out, dv.to(q_ptr.dtype.element_ty), mask=(keys < T)[:, None])


def dc_correction(q, k, v, w1, w2, base, cu_seqlens, *, scale, window=112):  # TEMPORARY
    import torch
    T, N, H = q.shape
    t = torch.arange(T, device=q.device)
    doc = torch.searchsorted(cu_seqlens, t.to(cu_seqlens.dtype), right=True)
    ok = (doc[:, None] == doc) & (t[:, None] >= t) & (t[:, None] - t < window)
    p = (torch.einsum("thd,shd->hts", q, k) * scale).masked_fill(~ok, float("-inf")).softmax(-1)
    a = torch.einsum("th,hts->ts", w1, p)
    return base + w2[..., None] * torch.einsum("ts,shd->thd", a, v)
