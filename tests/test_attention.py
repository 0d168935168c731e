"""Attention: the banded reference against dense softmax, the kernels against the reference, compiled figures."""
import math
import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from aot_rows import attention_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import (
    DTYPES,
    GPU,
    LOW,
    aot_all,
    assert_as_good_as_eager,
    assert_fits,
    needs_triton,
    overwritten_operands,
)
from torch.utils._python_dispatch import TorchDispatchMode

import triton_kernels as kernels
from triton_kernels import attention, attention_reference

pytestmark = pytest.mark.usefixtures("poisoned")


def dense(q, k, v, cu_seqlens, *, window, scale, paired=False):
    """The definition, T x T, all in the inputs' dtype."""
    T, N, H = q.shape
    if paired:
        q, k, v = (x.reshape(2 * T, N // 2, H) for x in (q, k, v))
    t = torch.arange(len(q), device=q.device)
    document = (cu_seqlens[None, :] * (2 if paired else 1) <= t[:, None]).sum(1)
    allowed = (document[:, None] == document) & (t <= t[:, None]) & (t[:, None] - t <= window)
    logits = torch.einsum("tnh,snh->nts", q, k) * scale
    y = torch.einsum("nts,snh->tnh", logits.masked_fill(~allowed, -math.inf).softmax(-1), v)
    return y.reshape(T, N, H)


def make(T, ends, N=2, H=16, dtype=torch.float32, device="cpu", pad=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dy = (torch.randn(T, N, H, generator=generator).to(device, dtype) for _ in range(4))
    return q, k, v, dy, torch.tensor([0, *ends] + [T] * pad, dtype=torch.int32, device=device)


def run(op, q, k, v, dy, cu_seqlens, **options):
    """(y, dq, dk, dv)"""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    y = op(*leaves, cu_seqlens, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def in_double(q, k, v, dy, cu_seqlens, **options):
    return run(attention_reference, *(x.double() for x in (q, k, v, dy)), cu_seqlens, **options)


def assert_all_as_good(got, exact, eager):
    for name, *values in zip(("y", "dq", "dk", "dv"), got, exact, eager):
        assert_as_good_as_eager(name, *values)


CASES = {  # T, document ends, window
    "odd length, document longer than the window": (77, [], 20),
    "one-token and empty documents": (70, [1, 2, 2, 2, 3, 40, 41], 16),
    "documents of window and window + 1 tokens": (67, [24, 49], 24),
    "window beyond the stream": (90, [31], 1000),
    "tile-aligned": (128, [64], 64),
    "empty documents first": (50, [0, 0, 17], 9),
    "no padding": (65, [33], 40),
}


# --- the reference ---
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 150), st.lists(st.integers(0, 150), max_size=6), st.integers(0, 200), st.booleans(),
       st.integers(0, 999))
def test_reference_is_dense_attention(T, ends, window, paired, seed):
    case = make(T, sorted(min(end, T) for end in ends), dtype=torch.float64, H=4, seed=seed)
    options = dict(window=window, scale=0.25, paired=paired)
    for got, want in zip(run(attention_reference, *case, **options), run(dense, *case, **options)):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_paired_interleaves_the_halves_of_the_heads():
    q, k, v, _, cu = make(30, [11], N=4)
    y = attention_reference(q, k, v, cu, window=7, scale=0.5, paired=True)
    t, heads = 20, slice(2, 4)  # the second half of token 20 is stream position 41: it sees 34 .. 41, tokens 17 .. 20
    keys = torch.stack([k[17:21, :2], k[17:21, 2:]], 1).flatten(0, 1)
    values = torch.stack([v[17:21, :2], v[17:21, 2:]], 1).flatten(0, 1)
    p = torch.softmax(torch.einsum("nh,snh->ns", q[t, heads], keys) * 0.5, -1)
    torch.testing.assert_close(y[t, heads], torch.einsum("ns,snh->nh", p, values))


class LargestResult(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("T, window", [(2000, 100), (4096, 0), (1024, 640)])
def test_reference_memory_is_banded(T, window):
    N, H = 1, 4
    case = make(T, [], N=N, H=H)
    with LargestResult() as largest:
        run(attention_reference, *case, window=window, scale=1.0)
    block = max(32, window / 2)
    assert largest.numel <= N * (T + block) * (window + 2 * block) * max(1, H // 8)


def v_again(*qkv, **options):
    y, *_, v = attention(*qkv, share=True, **options)
    return y * v


@pytest.mark.no_poison
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("op", [attention, attention_reference, v_again])
def test_traces_whole(op, paired, device, force_kernels):
    """Forward and backward in one graph, reference and kernels alike."""
    case, options = make(80, [30], device=device), dict(window=20, scale=0.25, paired=paired)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for got, want in zip(run(compiled, *case, **options), run(op, *case, **options)):
        torch.testing.assert_close(got, want)


@pytest.mark.no_poison
def test_operators_are_registered_right(device):
    """Fake results agree with real ones in shape, dtype and stride; nothing aliases or is written to."""
    for paired in False, True:
        q, k, v, dy, cu = make(40, [30], device=device)
        forward = q, k, v, cu, 20, 0.25, paired, True
        torch.library.opcheck(torch.ops.speedrun.attention_forward, forward)
        saved = torch.ops.speedrun.attention_forward(*forward)
        torch.library.opcheck(torch.ops.speedrun.attention_backward, (dy, q, k, v, *saved, 0.25, paired))
        torch.library.opcheck(torch.ops.speedrun.attention_backward, (dy, q, k, v, *saved, 0.25, paired, dy.mT.mT))


# --- the kernels ---
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_match(name, paired, dtype, device, force_kernels):
    T, ends, window = CASES[name]
    case, options = make(T, ends, dtype=dtype, device=device), dict(window=window, scale=0.25, paired=paired)
    got = run(attention, *case, **options)
    assert all(x.is_contiguous() and x.dtype == dtype for x in got)
    assert_all_as_good(got, in_double(*case, **options), run(dense, *case, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, window", [(1, 5), (40, 0)])
def test_only_itself_to_look_at(T, window, dtype, device, force_kernels):
    """y = v and dv = dy; dq and dk are what the rounding of two equal numbers, y * dy and dy * v, leaves."""
    q, k, v, dy, cu = make(T, [], dtype=dtype, device=device)
    y, dq, dk, dv = run(attention, q, k, v, dy, cu, window=window, scale=0.25)
    assert torch.equal(y, v)
    assert_as_good_as_eager("dv", dv, dy, dy)
    left = torch.finfo(torch.float32).eps * 0.25 * 16 * (v * dy).abs().max() * torch.stack([q, k]).abs().max()
    assert dq.abs().max() <= left and dk.abs().max() <= left


@pytest.mark.parametrize("H, dtype", [(32, LOW), (64, LOW), (128, LOW), (256, LOW), (128, torch.float32)])
def test_kernels_match_at_head_dim(H, dtype, device, force_kernels):
    case, options = make(100, [37], H=H, device=device, dtype=dtype), dict(window=50, scale=H**-0.5)
    assert_all_as_good(run(attention, *case, **options), in_double(*case, **options), run(dense, *case, **options))


def test_many_boundaries(device, force_kernels):
    case = make(150, list(range(0, 150, 2)), device=device, pad=200)
    options = dict(window=30, scale=0.25)
    assert_all_as_good(run(attention, *case, **options), in_double(*case, **options), run(dense, *case, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits(dtype, device, force_kernels):
    """Logits of several hundred, rising and falling along the keys: the running maximum keeps the sums finite. (fp32
    gradients are left out: exp2(logit - lse) cannot be closer than the last place of an lse of several hundred.)"""
    q, k, v, dy, cu = make(90, [], device=device)
    q, k = q + 3, k * torch.linspace(-8, 8, 90, device=device)[:, None, None].roll(30, 0)
    case, options = [x.to(dtype) for x in (q, k, v, dy)] + [cu], dict(window=60, scale=1.0)
    results = [run(attention, *case, **options), in_double(*case, **options), run(dense, *case, **options)]
    assert_all_as_good(*(result[:1] if dtype == torch.float32 else result for result in results))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("layout", ["slices of one product", "heads first", "every other number", "odd offset"])
def test_strided_inputs(layout, paired, device, force_kernels):
    T, N, H = 60, 2, 16
    q, k, v, dy, cu = make(T, [29], N=N, H=H, device=device)

    def strided(x, index):
        if layout == "slices of one product":
            wide = torch.randn(T, 3 * N, H, device=device)
            out = wide[:, index * N:(index + 1) * N]
        elif layout == "heads first":
            out = torch.empty(N, T, H, device=device).transpose(0, 1)
        elif layout == "every other number":
            out = torch.empty(T, N, 2 * H, device=device)[..., ::2]
        else:
            out = torch.empty(T * N * H + 1, device=device)[1:].view(T, N, H)
        return out.copy_(x)

    views = [strided(x, i) for i, x in enumerate((q, k, v))]
    wide_dy = strided(dy, 0)
    options = dict(window=17, scale=0.25, paired=paired)
    for got, want in zip(run(attention, *views, wide_dy, cu, **options), run(attention, q, k, v, dy, cu, **options)):
        assert torch.equal(got, want) and got.is_contiguous()


def run_shared(op, q, k, v, dy, cu_seqlens, *more, **options):
    """As `run`, where q, k and v are read again: dy reaches op's first result, `more` the q, k, v that it returns (one
    alone: v). Any may be None, and so are the gradients that nothing reaches."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    results = op(*leaves, cu_seqlens, share=True, **options)
    assert all(map(torch.equal, results[1:], (q, k, v)))
    incoming = dy, *(None,) * (3 - len(more)), *more
    read, incoming = zip(*((x, dx) for x, dx in zip(results, incoming) if dx is not None))
    return results[0].detach(), *torch.autograd.grad(read, leaves, incoming, allow_unused=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
@pytest.mark.parametrize("name", ["odd length, document longer than the window", "no padding", "tile-aligned"])
def test_v_read_again(name, paired, dtype, device, force_kernels):
    T, ends, window = CASES[name]
    case, options = make(T, ends, dtype=dtype, device=device), dict(window=window, scale=0.25, paired=paired)
    dv = 3 * case[3].flip(0)
    got = run_shared(attention, *case, dv, **options)
    assert all(x.is_contiguous() and x.dtype == dtype for x in got)
    exact = run_shared(attention_reference, *(x.double() for x in case[:4]), case[4], dv.double(), **options)
    assert_all_as_good(got, exact, run_shared(attention_reference, *case, dv, **options))
    for a, b in zip(got[:3], run(attention, *case, **options)):
        assert torch.equal(a, b), "y, dq or dk depends on the other gradient of v"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
def test_q_k_and_v_read_again(paired, dtype, device, force_kernels):
    case, options = make(77, [30], dtype=dtype, device=device), dict(window=20, scale=0.25, paired=paired)
    more = [case[3].flip(0) * n for n in (1, 2, 3)]
    wide = [*(x.double() for x in case[:4]), case[4], *(x.double() for x in more)]
    exact = run_shared(attention_reference, *wide, **options)
    eager = run_shared(attention_reference, *case, *more, **options)
    assert_all_as_good(run_shared(attention, *case, *more, **options), exact, eager)
    for i in range(3):  # one alone changes only its own gradient
        one = [x if i == j else None for j, x in enumerate(more)]
        pairs = zip(run_shared(attention, *case, *one, **options), run(attention, *case, **options))
        assert [torch.equal(*pair) for pair in pairs] == [j != i + 1 for j in range(4)]


def test_v_read_again_is_rounded_once(device, force_kernels):
    """Less its own rounded gradient, v's is what that rounding left off."""
    case, options = make(77, [30], dtype=LOW, device=device), dict(window=20, scale=0.25)
    dv = run(attention, *case, **options)[3]
    left = run_shared(attention, *case, -dv, **options)[3]
    assert left.abs().max() > 0 and (left.abs() <= torch.finfo(LOW).eps / 2 * dv.abs()).all()


@pytest.mark.parametrize("paired", [False, True])
def test_v_read_again_or_not(paired, device, force_kernels, monkeypatch):
    *case, cu = make(60, [29], device=device)
    options = dict(window=17, scale=0.25, paired=paired)
    for got, want in zip(run_shared(attention, *case, cu, None, **options), run(attention, *case, cu, **options)):
        assert torch.equal(got, want)  # the returned v is not read
    ones = run_shared(attention, *case, cu, torch.ones_like(case[3]), **options)
    expanded = torch.ones((), device=device).expand_as(case[3])
    wide = torch.ones(60, 2, 32, device=device)[..., ::2]
    for dv in expanded, wide:
        for got, want in zip(run_shared(attention, *case, cu, dv, **options), ones):
            assert torch.equal(got, want)
    monkeypatch.setattr(kernels, "attention_backward", None)  # only the returned v is read
    q, k, v, dy = case
    assert run_shared(attention, q, k, v, None, cu, dy, **options)[1:3] == (None, None)
    assert torch.equal(run_shared(attention, q, k, v, None, cu, dy, **options)[3], dy)


def test_gradients_follow_the_incoming_gradient(device, force_kernels):
    *case, dy, cu = make(60, [29], device=device)
    options = dict(window=17, scale=0.25)
    once, fourfold = run(attention, *case, dy, cu, **options), run(attention, *case, 4 * dy, cu, **options)
    for a, b in zip(once[1:], fourfold[1:]):
        assert torch.equal(4 * a, b)
    y = attention(*[x.requires_grad_() for x in case], cu, **options)
    ones = run(attention, *case, torch.ones_like(dy), cu, **options)[1:]
    for grad, want in zip(torch.autograd.grad(y.sum(), case), ones):
        assert torch.equal(grad, want)  # y.sum() hands over an expanded gradient


def test_nothing_outside_document_and_window_matters(device, force_kernels):
    """With other keys and values wherever no allowed key is, results keep their bits."""
    q, k, v, dy, cu = make(96, [40], device=device)
    options = dict(window=10, scale=0.25)
    rows = slice(60, 80)  # these queries see the keys 50 .. 79
    y = attention(q, k, v, cu, **options)
    far = torch.ones(96, dtype=torch.bool, device=device)
    far[50:80] = False
    k, v = (torch.where(far[:, None, None], 1e4, x) for x in (k, v))
    assert torch.equal(attention(q, k, v, cu, **options)[rows], y[rows])


@pytest.mark.parametrize("paired", [False, True])
def test_promised_bound_on_the_logits(paired, device, force_kernels):
    """With no running maximum: logits of up to 60 either way, whole rows of -60 among them."""
    q, k, v, dy, cu = make(90, [], device=device)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    k[40:] = torch.where(torch.arange(50, device=device)[:, None, None] < 25, q[40:], -q[40:])
    case, options = (q, k, v, dy, cu), dict(window=30, scale=60.0, paired=paired)
    got = run(attention, *case, **options, max_logit=60.0)
    assert_as_good_as_eager("y", got[0], in_double(*case, **options)[0], run(dense, *case, **options)[0])
    options["scale"] = 4.0
    got = run(attention, *case, **options, max_logit=4.0)
    assert_all_as_good(got, in_double(*case, **options), run(dense, *case, **options))


def test_bitwise_repeatable(device, force_kernels):
    case, options = make(130, [50, 51], device=device, dtype=LOW), dict(window=40, scale=0.25, paired=True)
    for a, b in zip(run(attention, *case, **options), run(attention, *case, **options)):
        assert torch.equal(a, b)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.no_poison
def test_graph_replays_with_other_documents(device):
    q, k, v, dy, cu = make(4096, [1000, 1500], N=6, H=128, device=device, dtype=torch.bfloat16)
    options = dict(window=384, scale=0.12)
    run(attention, q, k, v, dy, cu, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(attention, q, k, v, dy, cu, **options)
    cu.copy_(torch.tensor([0, 7, 3000, 4096, 4096, 4096], dtype=torch.int32))
    graph.replay()
    for a, b in zip(got, run(attention, q, k, v, dy, cu, **options)):
        assert torch.equal(a, b)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("T, window, paired", [(16384, 128, True), (16384, 384, False), (32768, 896, False)])
def test_real_shapes(T, window, paired, device):
    ends = torch.randint(1, 900, (200,)).cumsum(0)
    case = make(T, ends[ends < T].tolist(), N=6, H=128, device=device, dtype=torch.bfloat16)
    options = dict(window=window, scale=0.12, paired=paired)
    assert_all_as_good(run(attention, *case, **options), in_double(*case, **options),
                       run(attention_reference, *case, **options))


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("by", ["torch", "fa4"])
def test_others_kernels_agree(by, paired, device):
    if by == "fa4":
        pytest.importorskip("flash_attn.cute")
    case = make(4096, [1, 900, 1500, 1500], N=6, H=128, device=device, dtype=torch.bfloat16)
    options = dict(window=384, scale=0.12, paired=paired)
    assert_all_as_good(run(partial(kernels.flash_attention, by=by, max_len=4096), *case, **options),
                       in_double(*case, **options), run(attention_reference, *case, **options))


@pytest.mark.parametrize("paired", [False, True])
def test_the_package_is_asked_for_the_same(paired, monkeypatch):
    """flash-attn-4, as its signature says it, by the reference; max_seqlen_* must cover every document."""
    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale,
                               causal, window_size):
        assert causal and window_size[1] == 0 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert max_seqlen_q == max_seqlen_k >= cu_seqlens_q.diff().max()
        return attention_reference(q, k, v, cu_seqlens_q, window=window_size[0], scale=softmax_scale), None

    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    case, options = make(70, [1, 40], dtype=torch.double), dict(window=16, scale=0.3, paired=paired)
    op = partial(kernels.flash_attention, by="fa4", max_len=39)
    for got, exact in zip(run(op, *case, **options), in_double(*case, **options)):
        torch.testing.assert_close(got, exact)


BAD = {
    "share one non-empty shape": lambda q, k, v, cu: attention(q[:-1], k, v, cu, window=1, scale=1.0),
    "non-empty shape": lambda q, k, v, cu: attention(q[:0], k[:0], v[:0], cu, window=1, scale=1.0),
    ": reshape": lambda q, k, v, cu: attention(q[0], k[0], v[0], cu, window=1, scale=1.0),
    "one floating-point dtype": lambda q, k, v, cu: attention(q, k.double(), v, cu, window=1, scale=1.0),
    "cast them alike": lambda q, k, v, cu: attention(q.int(), k.int(), v.int(), cu, window=1, scale=1.0),
    "cu_seqlens must be": lambda q, k, v, cu: attention(q, k, v, cu.long(), window=1, scale=1.0),
    "S >= 2": lambda q, k, v, cu: attention(q, k, v, cu[:1], window=1, scale=1.0),
    "must be on": lambda q, k, v, cu: attention(q, k, v, cu.to("meta"), window=1, scale=1.0),
    "window must be": lambda q, k, v, cu: attention(q, k, v, cu, window=-1, scale=1.0),
    "int of at least 0, not 2.5": lambda q, k, v, cu: attention(q, k, v, cu, window=2.5, scale=1.0),
    "scale must be": lambda q, k, v, cu: attention(q, k, v, cu, window=1, scale=0.0),
    "even number of heads": lambda q, k, v, cu: attention(*(x[:, :1] for x in (q, k, v)), cu, window=1, scale=1.0,
                                                          paired=True),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_inputs(message, device):
    q, k, v, _, cu = make(20, [7], device=device)
    with pytest.raises(ValueError, match=message):
        BAD[message](q, k, v, cu)


@pytest.mark.parametrize("H, dtype", [(24, torch.float32), (8, torch.float32), (512, torch.half), (16, torch.float64)])
def test_kernels_refuse(H, dtype, device, force_kernels):
    q, k, v, _, cu = make(20, [7], H=H, device=device, dtype=dtype)
    with pytest.raises(ValueError, match="REFERENCE_OPS=1"):
        attention(q, k, v, cu, window=3, scale=1.0)


def test_the_probe_agrees_and_notices(device, force_kernels, monkeypatch):
    assert kernels.probe_attention(torch.device(device), 16, LOW) < 0.02
    monkeypatch.setattr(kernels, "attention", lambda q, k, v, cu, **options: (q * torch.nan + k + v, q, k, v))
    assert kernels.probe_attention(torch.device(device), 16, LOW) == math.inf


# --- compiled ---
@needs_triton
def test_compiled_kernels_fit():
    rows = list(attention_rows())
    names = {name for name in vars(kernels) if name.startswith("_attention") and name.endswith("_kernel")}
    assert {row[1].fn.__name__ for row in rows} == names
    for (_, arch), figures in aot_all(rows).items():
        assert_fits(figures, arch)


def test_overwritten_operands_are_found():
    """What ptxas 12.8 made of heads of 32, cut down; and the same where the second operand is made anew each time."""
    sass = """
        /*0010*/ F2FP.BF16.F32.PACK_AB R60, R25, R24 ;
        .L_x_4:
        /*0020*/ HGMMA.64x32x16.F32.BF16 R24, R60, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0030*/ F2FP.BF16.F32.PACK_AB R61, R56, R25 ;
        /*0040*/ HGMMA.64x32x16.F32.BF16 R40, R60, gdesc[UR4].tnspB, R40, gsb0 ;
        /*0050*/ @!P0 BRA `(.L_x_4) ;
        """
    assert overwritten_operands(sass) == ["HGMMA.64x32x16.F32.BF16 R24, R60, gdesc[UR4], RZ, !UPT, gsb0 ;"]
    assert not overwritten_operands(sass.replace("PACK_AB R61", "PACK_AB R64").replace("R40, R60", "R40, R64"))
