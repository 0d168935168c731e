"""Windowed DC softmax correction."""
import torch
import torch.nn.functional as F


def dc_correction_reference(q, k, v, w1, w2, base, cu_seqlens, *, scale, window=112):
    T, N, H = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    block = min(window, T)
    blocks = -(-T // block)
    tail = blocks * block - T
    span = block + window - 1  # keys one block of queries can see

    def query_blocks(x):
        return F.pad(x.to(wide).movedim(0, -1), (0, tail)).movedim(-1, 0).unflatten(0, (blocks, block))

    def key_spans(x_TNH):  # (blocks, N, H, span): views of one padded copy, `window - 1` rows of overlap
        return F.pad(x_TNH.to(wide), (0, 0, 0, 0, window - 1, tail)).unfold(0, span, block)

    t_T = torch.arange(blocks * block, device=q.device)
    start_T = cu_seqlens.long()[torch.searchsorted(cu_seqlens.long(), t_T, right=True) - 1]
    t_BM1 = t_T.view(blocks, block, 1)
    s_BK = t_T[::block, None] - (window - 1) + torch.arange(span, device=q.device)
    s_B1K = s_BK[:, None]
    first_BM1 = torch.maximum(start_T.view(blocks, block, 1), t_BM1 - window + 1)
    hidden_BMK = (s_B1K < first_BM1) | (s_B1K > t_BM1)

    scores_BNMK = torch.einsum("bmnh,bnhk->bnmk", query_blocks(q), key_spans(k)) * scale
    p_BNMK = scores_BNMK.masked_fill(hidden_BMK[:, None], float("-inf")).softmax(-1)
    mixed_BMK = torch.einsum("bmn,bnmk->bmk", query_blocks(w1), p_BNMK)
    u_BMNH = torch.einsum("bmk,bnhk->bmnh", mixed_BMK, key_spans(v))
    y_BMNH = query_blocks(base) + query_blocks(w2)[..., None] * u_BMNH
    return y_BMNH.flatten(0, 1)[:T].to(q.dtype)


dc_correction = dc_correction_reference  # provisional
