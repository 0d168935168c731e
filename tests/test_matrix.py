"""Symmetric products, Polar Express, FP8 quantization, MLP: kernels against references, references against fp64."""
from functools import partial

import pytest
import torch
from aot_rows import matrix_rows
from kernel_tools import DTYPES, GPU, LOW, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import triton_kernels as kernels
from triton_kernels import E4M3, ba_plus_caa, mlp, polar_express, quantize, quantize_bank, xtx, xxt

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = [(2, 37, 20), (1, 130, 129), (3, 8, 1), (257, 40)] + [(6, 256, 768), (2, 768, 768), (2, 3072, 768)] * GPU


def values(*shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def symmetric(*shape, dtype, device):
    a = values(*shape, dtype=torch.float64, device=device)
    return ((a + a.mT) / 2).to(dtype)


def sheared(x):
    """The same numbers behind rows that are neither dense nor aligned."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


# --- symmetric products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", [xxt, xtx])
def test_symmetric_product(op, shape, dtype, device, force_kernels):
    x = values(*shape, dtype=dtype, device=device)
    reference = kernels.xxt_reference if op is xxt else kernels.xtx_reference
    got = op(x)
    assert_as_good_as_eager(op.__name__, got, reference(x.double()), reference(x))
    block = kernels.SYMMETRIC_TILES[kernels.card_of(got.device)[0]]["BLOCK"]
    assert torch.equal(got[..., block:, :block], got.mT[..., block:, :block])  # mirrored, not computed again
    assert torch.equal(got, op(sheared(x))) and got.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 20, 20), (1, 130, 130), (39, 39)] + [(3, 768, 768)] * GPU, ids=str)
def test_ba_plus_caa(shape, dtype, device, force_kernels):
    a = symmetric(*shape, dtype=dtype, device=device)
    for diagonal in 0.0, 8.0:
        exact = kernels.ba_plus_caa_reference(a.double(), -2.5, 0.5, diagonal)
        eye = torch.eye(shape[-1], dtype=torch.float64, device=device)
        assert torch.allclose(exact, -2.5 * a.double() + 0.5 * a.double() @ a.double() + diagonal * eye, rtol=1e-12)
        got = ba_plus_caa(a, -2.5, 0.5, diagonal)
        assert_as_good_as_eager("ba + caa", got, exact, kernels.ba_plus_caa_reference(a, -2.5, 0.5, diagonal))


def test_symmetric_products_refuse(device, force_kernels):
    for op in xxt, xtx:
        with pytest.raises(ValueError, match="flatten the leading dimensions"):
            op(torch.ones(2, 2, 3, 3, device=device))
    with pytest.raises(ValueError, match="square"):
        ba_plus_caa(torch.ones(2, 3, device=device), 1.0, 1.0)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=str)
def test_empty_products_are_zero(shape, device, force_kernels):
    x = torch.ones(shape, device=device)
    assert torch.equal(xxt(x), x @ x.mT) and torch.equal(xtx(x), x.mT @ x)


# --- Polar Express


def polar_by_formula(x):
    """Section by section from the formulas, one kernels."""
    x = x / (1.02 * x.square().sum().sqrt() + 1e-6)
    for a, b, c in kernels.POLAR_EXPRESS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(3, 20, 40), (2, 24, 24), (2, 40, 20), (30, 20)], ids=str)
def test_polar_express_reference_is_the_formula_and_orthogonal(shape):
    u, _, vh = torch.linalg.svd(values(*shape, dtype=torch.float64, device="cpu"), full_matrices=False)
    x = u * torch.linspace(3, 0.3, u.shape[-1], dtype=torch.float64) @ vh  # well conditioned
    got = polar_express(x)
    for one, wanted in zip(got.reshape(-1, *shape[-2:]), x.reshape(-1, *shape[-2:])):
        assert torch.allclose(one, polar_by_formula(wanted), rtol=1e-10, atol=1e-12)
        assert torch.allclose(one, polar_by_formula(wanted.T).T, rtol=1e-10, atol=1e-12)  # wide and tall agree
        u, _, vh = torch.linalg.svd(wanted, full_matrices=False)
        singular = torch.linalg.svdvals(one)
        assert torch.allclose(u.T @ one @ vh.T, torch.diag(torch.diag(u.T @ one @ vh.T)), atol=1e-8)
        assert 0.5 < singular.min() and singular.max() < 1.3


@pytest.mark.parametrize("shape", [(8, 20, 40), (8, 33, 33), (8, 40, 20)] +
                         [(4, 256, 768), (2, 768, 768), (2, 3072, 768)] * GPU, ids=str)
def test_polar_express_kernel(shape, device, force_kernels):
    """Enough matrices for the largest error to be typical: that of a single small one varies by a factor of three."""
    dtype = torch.bfloat16 if GPU else torch.float32
    for scale in 1e-4, 1.0, 300.0:
        x = scale * values(*shape, dtype=dtype, device=device)
        got, exact = polar_express(x), kernels.polar_express_reference(x.double())
        assert_as_good_as_eager("polar express", got, exact, kernels.polar_express_reference(x))
        assert got.shape == x.shape and got.dtype == dtype
        assert GPU or torch.equal(polar_express(x[1]), polar_express(x[1:2])[0])  # cuBLAS may sum in another order


@pytest.mark.parametrize("shape", [(2, 20, 40), (2, 40, 20)], ids=str)
def test_polar_express_of_zeros_is_zero(shape, device, force_kernels):
    for dtype in torch.float32, torch.float64, *[torch.bfloat16] * GPU:
        x = torch.zeros(shape, dtype=dtype, device=device)
        assert torch.equal(polar_express(x), x)


def test_polar_express_leaves_its_input_alone(device, force_kernels):
    x = values(2, 20, 40, dtype=torch.float32, device=device)
    before = x.clone()
    polar_express(x)
    assert torch.equal(x, before)


# --- FP8 quantization


def eighths(*shape, device, dtype=torch.float32, seed=0):
    """Numbers that e4m3 holds exactly after scaling by 1/8, the largest being 56 = 448 / 8: the interpreter's e4m3 cast
    loses the carry from mantissa to exponent, so on a CPU the cast is tested where nothing is rounded."""
    x = values(*shape, dtype=torch.float32, device="cpu", seed=seed).mul(8).to(E4M3).float()
    x.view(-1)[0] = 448.0
    return (x / 8).to(device, dtype)


def bits(x8):
    return x8.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 50, 129), (20000,)] + [(16384, 768)] * GPU, ids=str)
def test_quantize(shape, dtype, device, force_kernels):
    for x in [eighths(*shape, device=device, dtype=dtype), *[values(*shape, dtype=dtype, device=device)] * GPU]:
        (x8, scale), (want8, want) = quantize(x), kernels.quantize_reference(x)
        assert torch.equal(bits(x8), bits(want8)) and torch.equal(scale, want)
        assert x8.is_contiguous() and scale.shape == () and scale.data_ptr() % 16 == 0
        assert torch.equal(bits(quantize(sheared(x) if x.ndim > 1 else x)[0]), bits(x8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_quantize_reference(dtype):
    x = 3 * values(100, 64, dtype=dtype, device="cpu")
    x8, scale = kernels.quantize_reference(x)
    assert scale == (x.abs().max().to(torch.float32) / 448).bfloat16()
    error = (x8.double() * scale.double() - x.double()).abs()
    assert (error <= x.double().abs() / 16 * (1 + torch.finfo(torch.bfloat16).eps) + scale * 2**-10).all()
    assert x8.double().abs().max() == 448  # the quotient may pass 448 when the scale was rounded down: clamped, not NaN


def test_quantize_reference_clamps_before_the_cast():
    peaks = torch.linspace(1.0, 2.0, 500).bfloat16()
    quotients = [p.float() / kernels.quantize_reference(p[None])[1] for p in peaks]
    assert max(quotients) > 448  # so the clamp has work to do
    assert all(kernels.quantize_reference(p[None])[0].float() == 448 for p in peaks)


def test_zeros_get_scale_one(device, force_kernels):
    for x8, scale in quantize(torch.zeros(40, 8, device=device)), kernels.quantize_reference(torch.zeros(40, 8)):
        assert scale == 1 and not x8.float().any()


def test_tiny_tensors_share_the_floor(device, force_kernels):
    x = torch.full((64,), 1e-20, device=device)
    for x8, scale in quantize(x), kernels.quantize_reference(x):
        assert torch.allclose(scale, scale.new_tensor(1e-12 / 448), rtol=2**-7, atol=0) and not x8.float().any()


@pytest.mark.skipif(not GPU, reason="the interpreter's e4m3 cast drops NaN")
def test_nan_survives_quantization(device):
    x = torch.ones(100, device=device)
    x[3] = float("nan")
    x8, _ = quantize(x)
    assert x8.float().isnan().sum() == 1


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_quantize_by_few_programs(parts, device, force_kernels, monkeypatch):
    """Each takes several blocks, not all the same number of them."""
    monkeypatch.setattr(kernels, "QUANTIZE_PARTS", parts)
    x = eighths(5 * kernels.QUANTIZE_TILES["BLOCK"] - 7, device=device)
    for given in x, x.flip(0), x * 0.25:
        (x8, scale), (want8, want) = quantize(given), kernels.quantize_reference(given)
        assert torch.equal(bits(x8), bits(want8)) and torch.equal(scale, want)


@pytest.mark.parametrize("forced", [False, True])
def test_quantize_bank(forced, device, force_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "use_kernel", lambda *tensors: forced)
    bank = torch.stack([eighths(2, 33, 17, device=device, seed=b) * 2.0**b for b in range(5)])
    bank[2] = 0
    w, w8 = bank[:, 0], torch.empty(5, 33, 17, dtype=E4M3, device=device)
    scales = torch.empty(5, 4, device=device)
    quantize_bank(w, w8, scales)
    for b in range(5):
        want8, want = kernels.quantize_reference(w[b])
        assert torch.equal(bits(w8[b]), bits(want8)) and scales[b, 0] == want
        assert scales[b, 0].data_ptr() % 16 == 0


def test_quantize_bank_refuses(device):
    w, w8 = torch.ones(2, 4, 6, device=device), torch.empty(2, 4, 6, dtype=E4M3, device=device)
    scales = torch.ones(2, 4, device=device)
    for bad, match in [((w, w8[:1], scales), "w8 must be"), ((w, w8.float(), scales), "w8 must be"),
                       ((w, w8, scales[:, :1]), "16 bytes for each"), ((w, w8, scales.double()), "16 bytes for each"),
                       ((w.mT.contiguous().mT, w8, scales), "each matrix must be contiguous")]:
        with pytest.raises(ValueError, match=match):
            quantize_bank(*bad)


# --- MLP


def mlp_inputs(T, D, F, dtype, device, fp8=False):
    n, w_fc, w_proj, g = (values(T, D, dtype=dtype, device=device, seed=1),
                          values(F, D, dtype=dtype, device=device, seed=2) / D**0.5,
                          values(F, D, dtype=dtype, device=device, seed=3) / F**0.5,
                          values(T, D, dtype=dtype, device=device, seed=4))
    if fp8 and not GPU:  # exact in e4m3, see eighths
        n, w_fc = eighths(T, D, device=device, dtype=dtype, seed=1), eighths(F, D, device=device, dtype=dtype, seed=2)
        w_fc /= 64
    return n, w_fc, w_proj, g


def with_gradients(fn, n, w_fc, w_proj, g, fp8=None):
    inputs = [x.detach().clone().requires_grad_() for x in (n, w_fc, w_proj)]
    out = fn(*inputs, fp8)
    return out.detach(), *torch.autograd.grad(out, inputs, g)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T,D,F", [(1, 16, 16), (37, 48, 192), (130, 20, 260)] + [(16384, 768, 3072)] * GPU)
def test_mlp(T, D, F, dtype, fp8, device, force_kernels):
    n, w_fc, w_proj, g = mlp_inputs(T, D, F, dtype, device, fp8)
    quantized = kernels.QuantizedWeight(*kernels.quantize_reference(w_fc)) if fp8 else None
    got = with_gradients(mlp, n, w_fc, w_proj, g, quantized)
    eager = with_gradients(kernels.mlp_reference, n, w_fc, w_proj, g, quantized)
    wide = [x.double() for x in (n, w_fc, w_proj, g)]
    if fp8:  # quantization of n is part of the op: its rounding must be that of n's own dtype
        n_quantized = kernels.quantize_reference(n)
        exact = with_gradients(lambda a, b, c, _: exact_fp8(a, b, c, n_quantized, quantized), *wide)
    else:
        exact = with_gradients(kernels.mlp_reference, *wide)
    for name, ours, want, low in zip(("out", "dn", "dw_fc", "dw_proj"), got, exact, eager):
        assert_as_good_as_eager(f"mlp {name}", ours, want, low)
        assert ours.dtype == dtype


def exact_fp8(n, w_fc, w_proj, n_quantized, w_quantized):
    """What the FP8 MLP computes from given quantized operands, straight-through gradients, in fp64."""
    value = (n_quantized[0].double() * n_quantized[1]) @ (w_quantized.w8.double() * w_quantized.scale).mT
    pre = n @ w_fc.mT
    return (pre + (value - pre).detach()).relu().square() @ w_proj


def test_mlp_fp8_is_near_the_plain_mlp(device, force_kernels):
    n, w_fc, w_proj, g = mlp_inputs(64, 48, 192, torch.float32, device, fp8=True)
    n = n + n.roll(1, 0) / 3  # no longer exact in e4m3
    plain = with_gradients(kernels.mlp_reference, n, w_fc, w_proj, g)
    emulated = with_gradients(kernels.mlp_reference, n, w_fc, w_proj, g,
                              kernels.QuantizedWeight(*kernels.quantize_reference(w_fc)))
    for a, b in zip(plain, emulated):
        assert 0 < (a - b).norm() / a.norm() < 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, D, F", [(37, 48, 192), (1, 16, 16)] + [(16384, 768, 3072)] * GPU)
def test_mlp_with_peaks_has_the_same_bits(T, D, F, dtype, device, force_kernels):
    """peaks: those that mix gives; the largest of them decides, wherever it stands."""
    n, w_fc, w_proj, g = mlp_inputs(T, D, F, dtype, device, fp8=True)
    quantized = kernels.QuantizedWeight(*kernels.quantize_reference(w_fc))
    own = n.abs().amax().float()[None]
    for op in mlp, kernels.mlp_reference:
        want = with_gradients(op, n, w_fc, w_proj, g, quantized)
        for peaks in own, torch.cat((own / 3, own, own * 0)), torch.cat((torch.zeros(4223, device=device), own)):
            got = with_gradients(partial(op, peaks=peaks), n, w_fc, w_proj, g, quantized)
            assert all(map(torch.equal, got, want))
    scale = kernels.quantize_reference(n, 4 * own)[1]
    assert kernels._launch_quantize(n, 4 * own)[1] == scale == 4 * kernels._launch_quantize(n)[1]


def test_mlp_quantizes_with_the_peaks_of_the_mix(device, force_kernels):
    x, weight = (values(*shape, dtype=LOW, device=device) for shape in ((70, 48), (192, 48)))
    n, peaks = kernels.mix([None], [x], normed=True, peaks=True)[1:]
    (x8, scale), (want8, want) = kernels._launch_quantize(n, peaks), quantize(n)
    assert torch.equal(bits(x8), bits(want8)) and torch.equal(scale, want)
    quantized = kernels.QuantizedWeight(*kernels.quantize_reference(weight))
    assert torch.equal(mlp(n, weight, weight, quantized, peaks=peaks), mlp(n, weight, weight, quantized))


def test_mlp_honours_strides_and_frozen_weights(device, force_kernels):
    n, w_fc, w_proj, g = mlp_inputs(37, 48, 192, LOW if GPU else torch.float32, device)
    want = with_gradients(mlp, n, w_fc, w_proj, g)
    got = with_gradients(lambda a, b, c, _: mlp(sheared(a), sheared(b), sheared(c)), n, w_fc, w_proj,
                         g.mT.contiguous().mT)
    exact = with_gradients(mlp, *(x.double() for x in (n, w_fc, w_proj, g)))
    for name, *three in zip(("out", "dn", "dw_fc", "dw_proj"), got, exact, want):
        assert_as_good_as_eager(f"strided {name}", *three)
    for frozen in range(3):
        inputs = [x.clone().requires_grad_(i != frozen) for i, x in enumerate((n, w_fc, w_proj))]
        mlp(*inputs).backward(g)
        for i, x in enumerate(inputs):
            assert x.grad is None if i == frozen else torch.equal(x.grad, want[1 + i])


def test_mlp_gradient_scales_with_the_incoming_one(device, force_kernels):
    n, w_fc, w_proj, g = mlp_inputs(37, 48, 192, LOW if GPU else torch.float32, device)
    once, twice = (with_gradients(mlp, n, w_fc, w_proj, s * g)[1:] for s in (1, 2))
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T,N,depths", [(1, 8, [16]), (37, 20, [48, 24]), (300, 260, [70])]
                         + [(16384, 768, [1536, 768]), (16384, 768, [3072])] * GPU)
def test_product(T, N, depths, dtype, device, force_kernels):
    """One or two terms, rounded once; rows that are not dense and aligned are no different."""
    lefts = [values(T, K, dtype=dtype, device=device, seed=K) for K in depths]
    rights = [values(K, N, dtype=dtype, device=device, seed=K + 1) for K in depths]
    got, exact, eager = kernels.product(lefts, rights), 0, 0
    for left, right in zip(lefts, rights):
        exact, eager = exact + left.double() @ right.double(), eager + left @ right
    assert_as_good_as_eager("product", got, exact, eager)
    assert torch.equal(got, kernels.product([sheared(x) for x in lefts], [sheared(x) for x in rights]))
    turned = kernels.product(lefts[:1], [rights[0].mT.contiguous()], transposed=True)
    assert_as_good_as_eager("product, transposed", turned, lefts[0].double() @ rights[0].double(), lefts[0] @ rights[0])
    for arguments in (lefts, rights), (lefts[:1], [rights[0].mT.contiguous()], True):
        torch.library.opcheck(kernels.product, arguments, test_utils="test_faketensor")


X, W = torch.ones(5, 16), torch.ones(16, 24)


@pytest.mark.parametrize("kernel", [False, True], ids=["eager", "kernel"])
@pytest.mark.parametrize("call, words", [
    (lambda: kernels.product([], []), "one or two products"),
    (lambda: kernels.product([X, X], [W]), "2 lefts and 1 rights"),
    (lambda: kernels.product([X] * 3, [W] * 3), "one or two products"),
    (lambda: kernels.product([X] * 2, [W.T] * 2, True), "transposed one"),
    (lambda: kernels.product([X], [torch.ones(20, 9)]), "slice"),
    (lambda: kernels.product([X], [W], True), "slice"),
    (lambda: kernels.product([X, X[:4]], [W, W]), "one T"),
    (lambda: kernels.product([X, X], [W, W[:, :9]]), "N and floating"),
    (lambda: kernels.product([X[:, :0]], [W[:0]]), "K at least 1"),
    (lambda: kernels.product([X[None]], [W]), "flatten"),
    (lambda: kernels.product([X], [W.double()]), "cast"),
    (lambda: kernels.product([X.int()], [W.int()]), "floating-point dtype"),
    (lambda: kernels._check_product([X], [W.to("meta")], False), "move them there"),  # the operator would take its fake
    (lambda: kernels.linear(X, []), "one weight or two"),
    (lambda: kernels.linear(X, [W]), "slice"),
    (lambda: kernels.linear(X[None], [W.T]), "flatten"),
    (lambda: kernels.linear(X, [W.T.half()]), "cast"),
    (lambda: kernels.linear(X, [W.T.to("meta")]), "move them there"),
    (lambda: kernels.linear(X, [W.T, W.T], (W.T,)), "one for each"),
    (lambda: kernels.linear(X, [W.T], (W,)), "give None for autograd"),
    (lambda: kernels.linear(X, [W.T], (W.T.double(),)), "give None for autograd"),
    (lambda: kernels.linear(X, [W.T], (W.T.to("meta"),)), "move them there"),
    (lambda: mlp(X.int(), W.T.int(), W.T.int()), "one floating-point dtype"),
    (lambda: mlp(X, W.T, W.T.to("meta")), "move them there"),
    (lambda: mlp(X, W.T, W.T, grads=(W, None)), "give None for autograd"),
    (lambda: mlp(X, W.T, W.T, grads=(None,)), "one for each"),
    (lambda: quantize_bank(X[None], torch.empty(1, 5, 16, dtype=E4M3), torch.ones(1, 4).to("meta")), "move them there"),
    (lambda: ba_plus_caa(torch.ones(3), 1, 1), "flatten"),
    (lambda: polar_express(X.int()), "floating-point matrix"),
])
def test_products_refuse(call, words, kernel, request):
    if kernel:
        request.getfixturevalue("force_kernels")
    with pytest.raises(ValueError, match=words):
        call()


# --- heads


def heads_inputs(T, N, H, D=24, dtype=torch.float32, device="cpu"):
    n, w = values(T, D, dtype=dtype, device=device), values(3 * N * H, D, dtype=dtype, device=device, seed=1)
    angles = 9 * values(2 * T, H // 4, dtype=torch.float64, device=device, seed=2)
    douts = [values(T, N, H, dtype=dtype, device=device, seed=3 + i) for i in range(3)]
    return n, w / 4, angles.cos().to(dtype), angles.sin().to(dtype), douts


def run_heads(op, n, w, cos, sin, douts, grad=None, **options):
    """(q, k, v, dn, dw)"""
    leaves = [x.detach().requires_grad_() for x in (n, w)]
    added = {} if grad is None else dict(grad=grad)
    results = op(*leaves, cos, sin, heads=douts[0].shape[1], **added, **options)
    torch.autograd.backward(results, douts)
    return *(x.detach() for x in results), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired, key_offset", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("T, N, H", [(1, 2, 16), (130, 2, 16), (37, 6, 32)] + [(16384, 6, 128), (1000, 4, 64)] * GPU)
def test_heads(T, N, H, paired, key_offset, dtype, device, force_kernels):
    """In one product, or (a key offset) in two and norm_rotary."""
    *inputs, douts = heads_inputs(T, N, H, 768 if T > 999 else 24, dtype, device)
    options = dict(paired=paired, key_offset=key_offset)
    got = run_heads(kernels.heads, *inputs, douts, **options)
    exact = run_heads(kernels.heads_reference, *(x.double() for x in inputs), [x.double() for x in douts], **options)
    eager = run_heads(kernels.heads_reference, *inputs, douts, **options)
    for name, *results in zip(("q", "k", "v", "dn", "dw"), got, exact, eager):
        assert_as_good_as_eager(name, *results)
    again = run_heads(kernels.heads, *(sheared(x) for x in inputs[:2]), *inputs[2:], douts, **options)
    assert all(map(torch.equal, got[:4], again)), "another layout, other results"  # dw is the library's
    start = values(*inputs[1].shape, dtype=dtype, device=device, seed=9)
    *same, dw = run_heads(kernels.heads, *inputs, douts, grad=(added := start.clone()), **options)
    assert dw is None and all(map(torch.equal, same, got))
    assert_as_good_as_eager("gradient added", added, start.double() + exact[-1], start + eager[-1])


@pytest.mark.parametrize("paired", [False, True], ids=["plain", "paired"])
def test_heads_operators_are_registered_right(paired, device):
    n, w, cos, sin, (dq, dk, _) = heads_inputs(66, 2, 16, dtype=LOW, device=device)
    torch.library.opcheck(kernels.heads_forward, (n, w, cos, sin, 2, paired), test_utils="test_faketensor")
    made = kernels.heads_forward(n, w, cos, sin, 2, paired)
    torch.library.opcheck(kernels.heads_backward, (dq, dk, *made, cos, sin, paired), test_utils="test_faketensor")


def test_heads_refuses(device, force_kernels):
    n, w, cos, sin, _ = heads_inputs(5, 2, 16, device=device)
    for (n_, w_, cos_, heads, paired), words in {
        (n, w[1:], cos, 2, False): "stack those of queries",
        (n[:0], w, cos, 2, False): "stack those of queries",
        (n, w, cos[:9], 2, True): "lay down longer tables",
        (n, w, cos.double(), 2, False): "cast and move them",
        (n, w[:48], cos, 1, True): "pass paired=False",
    }.items():
        with pytest.raises(ValueError, match=words):
            kernels.heads(n_, w_, cos_, sin[:len(cos_)], heads=heads, paired=paired, key_offset=False)
    good = dict(n_TD=n, w_ED=w, cos=cos, sin=sin, heads=2, paired=False, key_offset=False)
    for change, words in [(dict(heads=0), "int from 1 on"), (dict(heads=-2), "int from 1 on"),
                          (dict(w_ED=w[:0]), "stack those"), (dict(n_TD=n.int(), w_ED=w.int()), "floating-point dtype"),
                          (dict(w_ED=w.to("meta")), "move them there"), (dict(grad=w[1:]), "give None for autograd")]:
        with pytest.raises(ValueError, match=words):
            kernels.heads(**good | change)


def test_mlp_reference_gradient_in_double():
    inputs = [x.requires_grad_() for x in mlp_inputs(5, 4, 6, torch.float64, "cpu")[:3]]
    assert torch.autograd.gradcheck(mlp, inputs)


def test_products_add_their_weights_gradients_in_place(device, force_kernels):
    """linear and mlp: with `grads` the weights' gradients are added there, x's is the same; so without kernels."""
    x, *weights = (values(rows, 32, dtype=LOW, device=device, seed=rows) / 4 for rows in (37, 48, 48, 48))
    outs = [values(37, n, dtype=LOW, device=device, seed=9 + n) for n in (48, 48, 32)]

    def gradients(grads):
        leaves = [x.clone().requires_grad_(), *(w.clone().requires_grad_() for w in weights)]
        up, down = grads[1:] if grads else (None, None)
        y = mlp(leaves[0], *leaves[2:], grads=(up, down))
        results = *kernels.linear(leaves[0], leaves[1:3], grads and grads[:2]), y
        torch.autograd.backward(results, outs)
        return [leaf.grad for leaf in leaves]

    exact = [t.double() for t in (x, *weights)]
    leaves = [t.requires_grad_() for t in exact]
    results = leaves[0] @ leaves[1].T, leaves[0] @ leaves[2].T, kernels.mlp_reference(leaves[0], *leaves[2:])
    torch.autograd.backward(results, [out.double() for out in outs])
    plain = gradients(None)
    start = [values(48, 32, dtype=LOW, device=device, seed=5 + i) for i in range(3)]
    added = [s.clone() for s in start]
    left = gradients(added)
    assert torch.equal(left[0], plain[0]) and left[1:] == [None] * 3
    for grad, s, p, leaf in zip(added, start, plain[1:], leaves[1:]):
        assert_as_good_as_eager("gradient added", grad, s.double() + leaf.grad, s + p)


def test_mlp_of_no_tokens(device, force_kernels):
    n, w_fc, w_proj, g = mlp_inputs(0, 16, 32, torch.float32, device)
    out, dn, dw_fc, dw_proj = with_gradients(mlp, n, w_fc, w_proj, g)
    assert out.shape == dn.shape == (0, 16) and not dw_fc.any() and not dw_proj.any()


@pytest.mark.no_poison
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_mlp_compiles_whole(fp8, device, force_kernels):
    n, w_fc, w_proj, g = mlp_inputs(32, 16, 48, torch.float32 if not GPU else LOW, device, fp8)
    quantized = kernels.QuantizedWeight(*quantize(w_fc)) if fp8 else None
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    got, want = (with_gradients(fn, n, w_fc, w_proj, g, quantized) for fn in (compiled, mlp))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    compiled_quantize = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(compiled_quantize(n), quantize(n)))


def test_mlp_custom_ops_keep_their_contracts(device):
    dtype = LOW if GPU else torch.float32
    n, w_fc, w_proj, g = mlp_inputs(37, 20, 52, dtype, device, fp8=True)  # F = 52: the rows of post need padding
    post = kernels.mlp_up(n, w_fc, None, None)  # laid out as mlp_dpre wants it
    for op, arguments in [(kernels.mlp_up, (n, w_fc, None, None)), (kernels.mlp_up, (n, w_fc, *quantize(w_fc))),
                          (kernels.mlp_up, (n, w_fc, *quantize(w_fc), n.abs().amax().float()[None])),
                          (kernels.mlp_dpre, (g, w_proj, post)), (kernels._quantize_tensor, (n,))]:
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")


def test_mlp_refuses(device):
    n, w = torch.ones(4, 16, device=device), torch.ones(32, 16, device=device)
    quantized = kernels.QuantizedWeight(torch.empty(16, 16, dtype=E4M3, device=device), torch.ones(1, device=device))
    for bad, match in [((n[None], w, w), "flatten"), ((n, w.mT, w.mT), "weights"), ((n, w, w[:8]), "weights"),
                       ((n.double(), w, w), "one floating-point dtype"), ((n, w, w, quantized), "quantize w_fc itself"),
                       ((n, w, w, None, (None, None), n), "take them from mix")]:
        with pytest.raises(ValueError, match=match):
            mlp(*bad)


# --- ahead of time


@needs_triton
def test_compiled_kernels_fit():
    for (_, arch), figures in aot_all(matrix_rows()).items():
        assert_fits(figures, arch)
