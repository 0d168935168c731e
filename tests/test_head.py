"""LM head: references against plain formulas, kernels against references, FP8 against its emulation, transposes."""
import pytest
import torch
from aot_rows import head_rows
from kernel_tools import DTYPES, GPU, LOW, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import triton_kernels as kernels

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPE = DTYPES[0]
SIZES = [(1, 16, 32), (100, 48, 160), (130, 64, 144)] + [(2048 + 8, 768, 50304)] * GPU
WEIGHTS = [[1.0], [1.0, 0.5, 0.25]]


def make(T, D, V, device, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=random)
    w = torch.randn(D, V, generator=random) * 2 / D ** 0.5
    targets = torch.randint(-1, V, (T,), generator=random)
    targets[T // 3:T // 3 + 4] = 7 % V  # repeated targets inside one multi-token window, in the middle and at the end
    targets[-2:] = 3
    g = torch.rand(T, generator=random) - 0.3
    return x.to(device, dtype), w.to(device, dtype), targets.to(device), g.to(device)


def gradients(fn, x, w, targets, weights, g, **kwargs):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    weights = torch.as_tensor(weights, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    loss = fn(x, w, targets, weights, **kwargs)
    loss.backward(g.to(loss.dtype))
    return dict(loss=loss.detach(), dx=x.grad, dw=w.grad)


def plain_loss(x, w, targets, weights, dropped_in_gradient=False):
    """The loss by its definition, one row and one target at a time. Its autograd gradient is the specified one where
    the softmax keeps the weights of missing targets, which a term of value 0 sees to."""
    z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
    lse, losses = torch.logsumexp(z, 1), []
    for t in range(len(x)):
        loss = 0 * lse[t]
        for k, weight in enumerate(weights):
            if t + k < len(x) and targets[t + k] >= 0:
                loss = loss + weight * (lse[t] - z[t, targets[t + k]])
            elif not dropped_in_gradient:
                loss = loss + weight * (lse[t] - lse[t].detach())
        losses.append(loss)
    return torch.stack(losses)


@pytest.fixture
def exact_fp8_casts(monkeypatch):
    """Triton's interpreter rounds to FP8 its own way; torch's casts are what the hardware does."""
    if GPU:
        return
    from triton.runtime import interpreter
    types = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp16": torch.float16, "fp32": torch.float32}
    original = interpreter._convert_float

    def convert(data, source, target, rounding):
        if str(source) not in types or str(target) not in types:
            return original(data, source, target, rounding)
        source, target = types[str(source)], types[str(target)]
        cast = torch.tensor(data.view(f"u{data.itemsize}")).view(source).to(target)
        return cast.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[target.itemsize]).numpy()
    monkeypatch.setattr(interpreter, "_convert_float", convert)


# --- references ---

@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("chunk", [7, 64])
def test_reference_is_the_formula_in_fp64(weights, chunk):
    x, w, targets, g = make(33, 12, 20, "cpu")
    got = gradients(kernels.head_loss_reference, x, w, targets, weights, g, fp8=False, chunk=chunk)
    want = gradients(plain_loss, x, w, targets, weights, g)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-12, atol=1e-12, msg=name)


def test_last_rows_keep_the_full_sum_of_weights():
    x, w, targets, g = make(9, 12, 20, "cpu")
    got = gradients(kernels.head_loss_reference, x, w, targets, [1.0, 0.5], g, fp8=False)
    other = gradients(plain_loss, x, w, targets.clamp(min=0), [1.0, 0.5], g, dropped_in_gradient=True)
    same = gradients(kernels.head_loss_reference, x, w, targets.clamp(min=0), [1.0, 0.5], g, fp8=False)
    assert torch.allclose(same["dx"][:-1], other["dx"][:-1]) and not torch.allclose(same["dx"][-1], other["dx"][-1])
    assert got["loss"][targets < 0].isfinite().all()


def test_fp8_reference_is_the_specified_scheme():
    """For a uniform incoming gradient: x8, w8, g8 and the three products by the specified formulas, in fp64."""
    x, w, targets, _ = make(40, 16, 32, "cpu")
    scale, weights = 0.125, torch.tensor([1.0, 0.5], dtype=torch.float64)
    got = gradients(kernels.head_loss_reference, x, w, targets, weights, torch.full((40,), scale), fp8=True)
    x_s, w_s, g_s = 100 / 448, 1.6 / 448, scale * 0.75 / 448
    x8, w8 = (x / x_s).to(kernels.E4M3).double(), (w / w_s).clamp(-448, 448).to(kernels.E4M3).double()
    logits = x8 @ w8 * (x_s * w_s)
    sigma = torch.round(254 * torch.sigmoid((logits + 5) / 7.5)) / 254
    z, wanted = 23 * sigma, torch.zeros_like(sigma)
    for t in range(40):
        for k in range(2):
            if t + k < 40 and targets[t + k] >= 0:
                wanted[t, targets[t + k]] += weights[k]
    g = 1.5 * torch.softmax(z, 1) - wanted
    g8 = (scale / g_s * 23 / 7.5 * g * sigma * (1 - sigma)).to(kernels.E5M2).double()
    torch.testing.assert_close(got["dx"], g8 @ w8.T * (g_s * w_s), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(got["dw"], x8.T @ g8 * (x_s * g_s), rtol=1e-9, atol=1e-12)
    lse = torch.logsumexp(z, 1)
    torch.testing.assert_close(got["loss"], (wanted * (lse[:, None] - z)).sum(1), rtol=1e-9, atol=1e-12)


def test_eval_reference_is_cross_entropy():
    x, w, targets, _ = make(33, 12, 20, "cpu")
    z = 23 * torch.sigmoid((x @ w + 5) / 7.5)
    want = torch.nn.functional.cross_entropy(z, targets.clamp(min=0), reduction="none").where(targets >= 0, 0)
    for chunk in 5, 100:
        torch.testing.assert_close(kernels.head_cross_entropy(x, w, targets, chunk), want, rtol=1e-12, atol=1e-12)


# --- kernels ---

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS, ids=len)
@pytest.mark.parametrize("size", [*SIZES, (31, 19, 53)], ids=str)
def test_kernels(size, weights, dtype, device, force_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "HEAD_CHUNK", 64)
    x, w, targets, g = make(*size, device, dtype)
    got = gradients(kernels.head_loss, x, w, targets, weights, g, fp8=False)
    eager = gradients(kernels.head_loss_reference, x, w, targets, weights, g, fp8=False)
    exact = gradients(kernels.head_loss_reference, x.double(), w.double(), targets, weights, g, fp8=False)
    for name in got:
        assert got[name].dtype == eager[name].dtype
        assert_as_good_as_eager(name, got[name], exact[name], eager[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fp8_kernels(size, dtype, device, force_kernels, exact_fp8_casts, monkeypatch):
    monkeypatch.setattr(kernels, "HEAD_CHUNK", 64)
    x, w, targets, g = make(*size, device, dtype)
    got = gradients(kernels.head_loss, x, w, targets, WEIGHTS[1], g, fp8=True)
    eager = gradients(kernels.head_loss_reference, x, w, targets, WEIGHTS[1], g, fp8=True)
    exact = gradients(kernels.head_loss_reference, x.double(), w.double(), targets, WEIGHTS[1], g, fp8=False)
    for name in got:
        assert got[name].dtype == eager[name].dtype
        assert_as_good_as_eager(name, got[name], exact[name], eager[name])
        if dtype == torch.float32 and not GPU:  # same grid, same casts: only what fp32 moves across a tie differs
            off = (got[name] - eager[name]).norm() / (eager[name].double() - exact[name]).norm()
            assert off < 0.02, (name, off)


@pytest.mark.parametrize("fp8", [False, True])
def test_incoming_gradient_scales_every_gradient(fp8, device, force_kernels, exact_fp8_casts):
    x, w, targets, g = make(50, 48, 96, device, DTYPE)
    one, eight, none = (gradients(kernels.head_loss, x, w, targets, WEIGHTS[1], s * g, fp8=fp8) for s in (1, 8, 0))
    for name in "dx", "dw":
        assert torch.equal(8 * one[name], eight[name]) and not none[name].any()
    g[10:20] = 0
    assert not gradients(kernels.head_loss, x, w, targets, WEIGHTS[1], g, fp8=fp8)["dx"][10:20].any()


@pytest.mark.parametrize("fp8", [False, True])
def test_not_a_number_stays_visible(fp8, device, force_kernels, exact_fp8_casts):
    x, w, targets, g = make(50, 48, 96, device, DTYPE)
    targets.clamp_(min=0)
    x[11, 3] = float("nan")
    got = gradients(kernels.head_loss, x, w, targets, [1.0], g, fp8=fp8)
    assert got["loss"][11].isnan() and got["loss"].isnan().sum() == 1
    assert got["dx"][11].isnan().all() and got["dx"].isnan().any(1).sum() == 1 and got["dw"].isnan().any()


def test_quantized_head_is_the_one_computed_when_absent(device, force_kernels, exact_fp8_casts):
    x, w, targets, g = make(50, 48, 96, device, DTYPE)
    quantized = kernels.quantize_head(w)
    want = gradients(kernels.head_loss, x, w, targets, [1.0], g, fp8=True)
    got = gradients(kernels.head_loss, x, w, targets, [1.0], g, fp8=True, quantized=quantized)
    assert all(torch.equal(got[name], want[name]) for name in got)
    reference = gradients(kernels.head_loss_reference, x, 0 * w, targets, [1.0], g, fp8=True, quantized=quantized)
    emulated = gradients(kernels.head_loss_reference, x, w, targets, [1.0], g, fp8=True)
    assert all(torch.equal(reference[name], emulated[name]) for name in got)


@pytest.mark.parametrize("forced", [False, True])
def test_quantize_head(forced, device, request, exact_fp8_casts):
    if forced or GPU:
        request.getfixturevalue("force_kernels")
    w = make(1, 48, 160, device, LOW if GPU else torch.float32)[1] * 3  # some values past 1.6: they saturate
    w8 = kernels.quantize_head(w)
    want = (w.float() / (1.6 / 448)).clamp(-448, 448).to(kernels.E4M3)
    assert want.float().abs().max() == 448
    off = (w8.w8_DV.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
    assert off.max() <= 1 and off.float().mean() < 0.01  # times 448 / 1.6 may tie elsewhere than over 1.6 / 448
    assert torch.equal(w8.w8_VD.view(torch.uint8), w8.w8_DV.view(torch.uint8).T) and w8.w8_VD.is_contiguous()


@pytest.mark.parametrize("fp8", [False, True])
def test_only_what_is_asked_for(fp8, device, force_kernels, exact_fp8_casts):
    x, w, targets, g = make(50, 48, 96, device, DTYPE)
    both = gradients(kernels.head_loss, x, w, targets, WEIGHTS[1], g, fp8=fp8)
    weights = torch.tensor(WEIGHTS[1], device=device)
    with torch.no_grad():
        assert torch.equal(kernels.head_loss(x, w.requires_grad_(), targets, weights, fp8=fp8), both["loss"])
    assert torch.equal(torch.autograd.grad(kernels.head_loss(x, w, targets, weights, fp8=fp8), w, g)[0], both["dw"])
    x.requires_grad_(), w.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(kernels.head_loss(x, w, targets, weights, fp8=fp8), x, g)[0], both["dx"])


def test_library_product_where_the_fused_one_cannot_run(device, force_kernels, exact_fp8_casts, monkeypatch):
    x, w, targets, g = make(50, 48, 96, device, DTYPE)
    want = gradients(kernels.head_loss, x, w, targets, WEIGHTS[1], g, fp8=True)
    monkeypatch.setattr(kernels, "card_of", lambda device: ("small", 1))
    got = gradients(kernels.head_loss, x, w, targets, WEIGHTS[1], g, fp8=True)
    exact = gradients(kernels.head_loss_reference, x.double(), w.double(), targets, WEIGHTS[1], g, fp8=False)
    for name in got:
        assert_as_good_as_eager(name, got[name], exact[name], want[name])


def test_strided_inputs(device, force_kernels):
    x, w, targets, g = make(50, 48, 96, device, DTYPE)
    want = gradients(kernels.head_loss, x, w, targets, [1.0], g, fp8=False)
    strided = x.T.contiguous().T, w.T.contiguous().T, targets.repeat_interleave(2)[::2]
    got = gradients(kernels.head_loss, *strided, [1.0], g.repeat_interleave(2)[::2], fp8=False)
    assert all(torch.equal(got[name], want[name]) for name in got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, (31, 19, 53)], ids=str)
def test_eval_kernels(size, dtype, device, force_kernels):
    x, w, targets, _ = make(*size, device, dtype)
    got = kernels.head_cross_entropy(x.requires_grad_(), w, targets, 48)
    eager = kernels.head_cross_entropy_reference(x, w, targets)
    exact = kernels.head_cross_entropy_reference(x.double(), w.double(), targets)
    assert not got.requires_grad
    assert_as_good_as_eager("loss", got, exact, eager)


@pytest.mark.no_poison
@pytest.mark.parametrize("fp8", [False, True])
def test_compiler_traces_it_whole(fp8, device, force_kernels, exact_fp8_casts):
    x, w, targets, g = make(48, 48, 96, device, DTYPE)
    weights, quantized = torch.ones(1, device=device), kernels.quantize_head(w) if fp8 else None

    def both(x, w):
        return kernels.head_loss(x * 1, w, targets, weights, fp8=fp8, quantized=quantized)
    want = gradients(lambda x, w, *_: both(x, w), x, w, targets, [1.0], g)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    got = gradients(lambda x, w, *_: compiled(x, w), x, w, targets, [1.0], g)
    assert all(torch.equal(got[name], want[name]) for name in got)
    evaluate = torch.compile(kernels.head_cross_entropy, fullgraph=True, backend="aot_eager")
    assert torch.equal(evaluate(x, w, targets), kernels.head_cross_entropy(x, w, targets))


@pytest.mark.parametrize("fp8", [False, True])
def test_operations_keep_the_rules_of_custom_operations(fp8, device, force_kernels, exact_fp8_casts):
    x, w, targets, g = make(48, 48, 96, device, DTYPE)
    w8 = kernels.quantize_head(w) if fp8 else (None, None)
    rules = ["test_faketensor"] + ["test_schema"] * (not fp8)  # the schema check compares values: not in FP8
    inputs = x, w, targets, torch.ones(2, device=device), *w8
    for training in True, False:
        torch.library.opcheck(kernels.head_forward, (*inputs, training), test_utils=rules)
    _, dx, g_saved = kernels.head_forward(*inputs, True)
    for needs in (True, True), (True, False), (False, True):
        torch.library.opcheck(kernels.head_backward, (x, dx, g_saved, g, *needs), test_utils=rules)
    torch.library.opcheck(kernels._quantize_head, (w,), test_utils="test_faketensor")
    torch.library.opcheck(kernels._head_cross_entropy, (x, w, targets, 32), test_utils=rules)


@pytest.mark.skipif(not GPU, reason="captures a CUDA graph")
@pytest.mark.no_poison
def test_captures_in_a_graph():
    x, w, targets, g = make(256, 64, 128, "cuda", torch.bfloat16)
    want = gradients(kernels.head_loss, x, w, targets, [1.0], g, fp8=True)
    x.requires_grad_(), w.requires_grad_()
    weights, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = kernels.head_loss(x, w, targets, weights, fp8=True)
        dx, dw = torch.autograd.grad(loss, (x, w), g)
    graph.replay()
    assert torch.equal(loss, want["loss"]) and torch.equal(dx, want["dx"]) and torch.equal(dw, want["dw"])


# --- transposes ---

@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float16, torch.bfloat16, torch.uint8,
                                   torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (3, 200), (130, 65)], ids=str)
def test_transpose_copy(size, dtype, forced, device, request):
    if forced:
        request.getfixturevalue("force_kernels")
    m, n = size
    wide = torch.randint(0, 256, (m, 2 * n * dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)
    whole = torch.zeros(n, 2 * m, dtype=dtype, device=device)
    kernels.transpose_copy(wide[:, ::2], whole[:, :m])
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]  # bit patterns: some are NaN
    assert torch.equal(whole[:, :m].view(words), wide[:, ::2].view(words).T) and not whole[:, m:].view(words).any()


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transpose_add(dtype, forced, device, request):
    if forced:
        request.getfixturevalue("force_kernels")
    src, dst = torch.randn(70, 33, device=device).to(dtype), torch.randn(33, 140, device=device).to(dtype)[:, ::2]
    want = dst + src.T
    kernels.transpose_add(src, dst)
    assert torch.equal(dst, want)


# --- errors and compilation ---

def bad(change):
    x, w, targets, _ = make(8, 48, 96, "cpu", torch.float32)
    kwargs = dict(x=x, lm_head=w, targets=targets, mtp_weights=torch.ones(1), fp8=False)
    return kwargs | change(kwargs)


@pytest.mark.parametrize("change, match", [
    (lambda a: dict(x=a["x"][:, :-1]), "lm_head"),
    (lambda a: dict(x=a["x"][None]), "flatten"),
    (lambda a: dict(x=a["x"][:0], targets=a["targets"][:0]), "flatten"),
    (lambda a: dict(x=a["x"].half()), "one floating-point dtype"),
    (lambda a: dict(targets=a["targets"][1:]), "targets"),
    (lambda a: dict(targets=a["targets"].int()), "int64"),
    (lambda a: dict(mtp_weights=torch.ones(0)), "mtp_weights"),
    (lambda a: dict(mtp_weights=torch.ones(1, 1)), "mtp_weights"),
    (lambda a: dict(mtp_weights=torch.ones(1).long()), "mtp_weights"),
    (lambda a: dict(mtp_weights=torch.ones(1, device="meta")), "move them there"),
    (lambda a: dict(lm_head=a["lm_head"].to("meta")), "move them there"),
    (lambda a: dict(targets=a["targets"].to("meta")), "move them there"),
    (lambda a: dict(quantized=kernels.quantize_head(a["lm_head"])), "pass fp8=True"),
    (lambda a: dict(quantized=kernels.quantize_head(a["lm_head"][:, :-16]), fp8=True), "quantize_head"),
], ids=range(14))
def test_head_loss_refuses(change, match):
    with pytest.raises(ValueError, match=match):
        kernels.head_loss(**bad(change))


def test_refuses_what_the_kernels_cannot_take(force_kernels):
    x, w, targets, _ = make(8, 48, 90, "cpu", torch.float32)
    with pytest.raises(ValueError, match="multiples of 16"):
        kernels.head_loss(x, w, targets, torch.ones(1), fp8=True)
    with pytest.raises(ValueError, match="multiples of 16"):
        kernels.quantize_head(w)
    with pytest.raises(ValueError, match="positive"):
        kernels.head_cross_entropy(x, w, targets, 0)


@pytest.mark.parametrize("op", [kernels.transpose_copy, kernels.transpose_add])
def test_transposes_refuse(op):
    with pytest.raises(ValueError, match="allocate dst"):
        op(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="one dtype"):
        op(torch.zeros(2, 3), torch.zeros(3, 2).half())
    with pytest.raises(ValueError, match="device"):
        op(torch.zeros(2, 3), torch.zeros(3, 2, device="meta"))


def test_transpose_copy_of_wide_elements(force_kernels):
    src, dst = torch.randn(5, 3, dtype=torch.float64), torch.empty(3, 5, dtype=torch.float64)
    kernels.transpose_copy(src, dst)
    assert torch.equal(dst, src.T)


@needs_triton
def test_compiled_kernels_fit():
    for (_, arch), figures in aot_all(head_rows()).items():
        assert_fits(figures, arch)
