"""Optimizer updates: kernels against references, references against the formulas, split weights bit by bit."""
import pytest
import torch
from aot_rows import updates_rows
from helpers import golden
from kernel_tools import GPU, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import triton_kernels as kernels
from triton_kernels import adam_update_, cautious_update_, fold_, normalize_variance_, normuon_momentum_, unfold_

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SHAPES = [(3, 20, 40), (2, 40, 20), (2, 24, 24), (1, 1, 7), (2, 70, 33)] + [(4, 256, 768), (2, 3072, 768)] * GPU


def values(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def number(value, like):
    return torch.tensor([value], dtype=kernels._exact_dtype(like), device=like.device)


def assert_rounding_only(got, want, roundings=8):
    """At most as many roundings as there are operations, each by half a unit of the largest value's last place."""
    assert (got.double() - want).abs().max() <= roundings / 2 * torch.finfo(got.dtype).eps * want.abs().max()


# --- Adam


def adam_state(shape, dtype, device, lr=0.01, wd=0.5, count=3):
    p, g = values(*shape, seed=1, dtype=dtype, device=device), values(*shape, seed=2, dtype=dtype, device=device)
    exact = kernels._exact_dtype(p)
    m = values(*shape, seed=3, dtype=exact, device=device) / 4
    v = values(*shape, seed=4, dtype=exact, device=device).square()
    step_size = lr * (1 - 0.95**count)**0.5 / (1 - 0.75**count)
    hyper = torch.tensor([0.75, 0.95, step_size, 1e-10, lr * lr * wd], dtype=exact, device=device)
    return p, g, m, v, hyper


def adam_by_formula(p, g, m, v, hyper):
    beta1, beta2, step_size, eps, decay = hyper.tolist()
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    u = m / (v.sqrt() + eps) * step_size
    return p - u - decay * p * (u * p > 0), m, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5, 7), (3, 50, 31)] + [(768, 50304)] * GPU, ids=str)
def test_adam(shape, dtype, device, force_kernels):
    state = adam_state(shape, dtype, device)
    exact = adam_by_formula(*(x.double() for x in state))
    eager = [x.clone() for x in state]
    kernels.adam_update_reference_(*eager)
    before = state[1].clone()
    adam_update_(*state)
    for name, got, want, low in zip("pmv", (state[0], *state[2:4]), exact, (eager[0], *eager[2:4])):
        assert_as_good_as_eager(f"adam {name}", got, want, low)
        if dtype != torch.bfloat16:
            assert_rounding_only(low, want)
    assert torch.equal(state[1], before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_of_zeros_does_nothing(dtype, device, force_kernels):
    p = values(4, 5, dtype=dtype, device=device)
    m, v, g = (torch.zeros(4, 5, dtype=kernels._exact_dtype(p), device=device) for _ in range(3))
    hyper, before = adam_state((), dtype, device)[4], p.clone()
    adam_update_(p, g, m, v, hyper)
    assert torch.equal(p, before)  # no update, so no decay either: the test is strict


def test_adam_takes_strided_and_fp32_gradients(device, force_kernels):
    p, g, m, v, hyper = adam_state((6, 10), torch.bfloat16, device)
    other = [x.clone() for x in (p, m, v)]
    adam_update_(p, g, m, v, hyper)
    adam_update_(other[0], g.float().mT.contiguous().mT, *other[1:], hyper)
    assert torch.equal(p, other[0]) and torch.equal(m, other[1]) and torch.equal(v, other[2])


def flat_adam_state(sizes, dtype, device):
    """Parameters of so many elements end to end in reverse order of their numbers, whose rows lie apart in `hyper`."""
    segments = [kernels.round_up(size, kernels.ADAM_SEGMENT) // kernels.ADAM_SEGMENT for size in sizes]
    p, g, m, v, _ = adam_state((sum(segments) * kernels.ADAM_SEGMENT,), dtype, device)
    rows = [adam_state((), dtype, device, lr=0.01 * (i + 1), wd=0.5 * i, count=i + 1)[4] for i in range(len(sizes))]
    hyper = torch.cat([torch.nn.functional.pad(row, (0, 3), value=torch.nan) for row in rows])
    starts = [8 * (len(sizes) - 1 - i) for i, n in enumerate(segments) for _ in range(n)]
    return p, g, m, v, hyper, torch.tensor(starts, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[1], [12, 3 * kernels.ADAM_SEGMENT + 1, 5]] + [[24, 98304, 5248]] * GPU, ids=str)
def test_flat_adam_is_adam_of_each_part(sizes, dtype, device, force_kernels):
    """Bit for bit what one launch a parameter gives."""
    *state, hyper, starts = flat_adam_state(sizes, dtype, device)
    parts = [[x.clone() for x in xs] for xs in zip(*(x.split(kernels.ADAM_SEGMENT) for x in state))]
    for part, start in zip(parts, starts.tolist()):
        adam_update_(*part, hyper[start:start + 5].clone())
    eager = [x.clone() for x in state]
    kernels.adam_update_reference_(*eager, hyper, starts)
    adam_update_(*state, hyper, starts)
    for got, want, low in zip(state, map(torch.cat, zip(*parts)), eager):
        assert torch.equal(got, want)
        torch.testing.assert_close(got, low)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flat_adam_rests_where_its_numbers_say_so(dtype, device, force_kernels):
    p, g, m, v, hyper, starts = flat_adam_state([7, 9], dtype, device)
    hyper[8:13] = torch.tensor([1, 1, 0, 1e-10, 0])  # of the first segment
    before = [x.clone().chunk(2) for x in (p, m, v)]
    adam_update_(p, g, m, v, hyper, starts)
    for (first, second), x in zip(before, (p, m, v)):
        assert torch.equal(x.chunk(2)[0], first) and not torch.equal(x.chunk(2)[1], second)


def test_flat_adam_refuses(device):
    names = ("p", "g", "exp_avg", "exp_avg_sq", "hyper", "starts")
    state = dict(zip(names, flat_adam_state([7, 9], torch.float32, device)))
    for argument, spoil, match in (
        ("starts", lambda s: s[:1], "with starts p must be flat"), ("starts", torch.Tensor.long, "starts must be"),
        ("hyper", torch.Tensor.double, "hyper must be"), ("starts", lambda s: s[:, None], "starts must be")):
        with pytest.raises(ValueError, match=match):
            adam_update_(**state | {argument: spoil(state[argument])})


# --- NorMuon


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_momentum(shape, dtype, device, force_kernels):
    g = values(*shape, seed=1, dtype=dtype, device=device)
    buf = values(*shape, seed=2, dtype=kernels._exact_dtype(g), device=device)
    want_buf = buf.double() + (1 - 0.9) * (g.double() - buf.double())
    want = g.double() + 0.9 * (want_buf - g.double())
    eager_buf = buf.clone()
    eager = kernels.normuon_momentum_reference_(g, eager_buf, number(0.9, g))
    got = normuon_momentum_(g, buf, number(0.9, g))
    assert got.dtype == dtype
    assert_as_good_as_eager("X", got, want, eager)
    assert_as_good_as_eager("buf", buf, want_buf, eager_buf)


def test_momentum_gives_bf16_for_16_bit_gradients(device, force_kernels):
    g = values(6, 10, dtype=torch.float16, device=device)
    assert normuon_momentum_(g, torch.zeros(6, 10, device=device), torch.tensor([0.9], device=device)).dtype \
        == torch.bfloat16


def normalize_by_formula(x, v2, beta2):
    """One matrix at a time, straight from the formulas."""
    for i in range(len(x)):
        axis = 1 if v2.shape[2] == 1 else 0
        n, mean = x[i].shape[axis], (x[i]**2).mean(axis, keepdim=True)
        v2[i] = v2[i] + (1 - beta2) * (mean - v2[i])
        s = v2[i].clamp(min=1e-10)**-0.5
        norm, scaled_norm = (n * mean.sum()).sqrt(), (n * mean * s**2).sum().sqrt()
        x[i] = x[i] * (s * norm / scaled_norm.clamp(min=1e-10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_variance(shape, axis, dtype, device, force_kernels):
    x = values(*shape, seed=1, dtype=dtype, device=device)
    small = [1 if i == axis else n for i, n in enumerate(shape)]
    v2 = values(*small, seed=2, dtype=kernels._exact_dtype(x), device=device).square()
    want, want_v2 = x.double(), v2.double()
    normalize_by_formula(want, want_v2, 0.9)
    eager, eager_v2, norms = x.clone(), v2.clone(), x.double().norm(dim=(1, 2))
    kernels.normalize_variance_reference_(eager, eager_v2, number(0.9, x))
    normalize_variance_(x, v2, number(0.9, x))
    assert_as_good_as_eager("x", x, want, eager)
    assert_as_good_as_eager("v2", v2, want_v2, eager_v2)
    assert torch.allclose(want.norm(dim=(1, 2)), norms, rtol=1e-12)


@pytest.mark.parametrize("forced", [False, True])
def test_variance_of_zeros_is_zero(forced, device, force_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "use_kernel", lambda *tensors: forced)
    x, v2 = torch.zeros(2, 8, 5, device=device), torch.zeros(2, 8, 1, device=device)
    normalize_variance_(x, v2, number(0.9, x))
    assert torch.equal(x, torch.zeros_like(x)) and torch.equal(v2, torch.zeros_like(v2))


# --- the weights


@pytest.mark.parametrize("forced", [False, True])
def test_split_weights_match_the_golden_bits(forced, device, force_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "use_kernel", lambda *tensors: forced)
    bits = golden("optimizer")
    before, low, update, after, low_after = (
        torch.from_numpy(bits[f"bits_{name}"])[None].to(device).clone()
        for name in ("param_before", "low_before", "update", "param_after", "low_after"))
    lr, wd = (torch.from_numpy(bits[f"bits_{name}_eff"].reshape(1)).to(device) for name in ("lr", "wd"))
    p = before.view(torch.bfloat16)
    cautious_update_(p, low, update.view(torch.bfloat16), lr, wd)
    assert torch.equal(p.view(torch.int16), after.view(torch.int16))
    assert torch.equal(low.view(torch.int16), low_after.view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_split_weights_are_fp32_weights(shape, device, force_kernels):
    """bf16 + 16 bits takes the very steps of an fp32 weight, in kernel and reference alike; one rate a matrix."""
    weight = values(*shape, seed=1, dtype=torch.float32, device=device)
    x = values(*shape, seed=2, dtype=torch.bfloat16, device=device)
    lr, wd = torch.rand(shape[0], device=device) / 10 + 0.01, torch.tensor([0.03], device=device)
    whole = weight.clone()
    bits = weight.view(torch.int32)
    high, low = (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16).view(torch.uint16)
    reference = [high.clone(), low.clone()]
    for _ in range(3):
        cautious_update_(whole, None, x, lr, wd)
        cautious_update_(high, low, x, lr, wd)
        kernels.cautious_update_reference_(*reference, x, lr, wd)
    joined = (high.view(torch.int16).int() << 16 | low.int()).view(torch.float32)
    assert torch.equal(joined, whole) and not torch.equal(whole, weight)
    assert torch.equal(high, reference[0]) and torch.equal(low.int(), reference[1].int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cautious_update_is_the_formula(dtype, device, force_kernels):
    p, x = values(3, 8, 5, seed=1, dtype=dtype, device=device), values(3, 8, 5, seed=2, dtype=dtype, device=device)
    p[0, 0], x[1, 0] = 0, 0
    lr, wd = values(3, seed=3, dtype=dtype, device=device).abs() / 10, number(0.3, p)
    mask = (x.double() * p.double() >= 0).double()
    want = p.double() - (0.3 * mask * p.double() + x.double()) * lr.double()[:, None, None]
    cautious_update_(p, None, x.mT.contiguous().mT, lr, wd)
    assert_rounding_only(p, want)


# --- matrices times their lambdas


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (2, 70, 130)] + [(11, 3072, 768)] * GPU, ids=str)
def test_folding_and_the_way_back(shape, dtype, device, force_kernels):
    """Banks are slices of others, which stay as they are."""
    B, F, D = shape
    w = values(B, 2, F, D, seed=1, dtype=dtype, device=device)[:, 1]
    around, dw_around = (values(B, F + 3, D, seed=s, dtype=dtype, device=device) for s in (2, 3))
    scale = values(B, seed=4, dtype=kernels._exact_dtype(w), device=device)
    folded, dw, exact_scale = around[:, 1:-2], dw_around[:, 2:-1], scale.double()[:, None, None]

    eager, kept = folded.clone(), around.clone()
    kernels.fold_reference_(eager, w, scale)
    fold_(folded, w, scale)
    assert_as_good_as_eager("folded", folded, w.double() * exact_scale, eager)
    assert torch.equal(around[:, :1], kept[:, :1]) and torch.equal(around[:, -2:], kept[:, -2:])

    kept = dw_around.clone()
    exact = dw.double() + folded.double() * exact_scale, (folded.double() * w.double()).sum((1, 2))
    tries = [(folded.clone(), dw_around.clone()) for _ in range(3)]
    results = [op(d, w, scale, whole[:, 2:-1]) for op, (d, whole) in
               zip((unfold_, unfold_, kernels.unfold_reference_), tries)]
    (d, ours), (_, again), (cleared, eager) = tries
    assert_as_good_as_eager("dw", ours[:, 2:-1], exact[0], eager[:, 2:-1])
    assert_as_good_as_eager("dscale", results[0], exact[1], results[2])
    assert torch.equal(ours, again) and torch.equal(results[0], results[1])
    assert torch.equal(ours[:, :2], kept[:, :2]) and torch.equal(ours[:, -1:], kept[:, -1:])
    assert not d.any() and not cleared.any()


# --- all of them


def every_update(device, dtype=torch.bfloat16, shape=(2, 6, 10)):
    """(function, named arguments) of each update."""
    p, g, m, v, hyper = adam_state(shape, dtype, device)
    one = torch.full((1,), 0.9, device=device)
    yield adam_update_, dict(p=p, g=g, exp_avg=m, exp_avg_sq=v, hyper=hyper)
    yield normuon_momentum_, dict(g=g, buf=m, momentum=one)
    yield normalize_variance_, dict(x_BRC=p, v2=v[:, :, :1].contiguous(), beta2=one)
    low = torch.zeros(shape, dtype=torch.uint16, device=device)
    yield cautious_update_, dict(p_BRC=p, low=low, x=g, lr_B=torch.ones(len(p), device=device), wd=one)
    scale = torch.ones(len(p), device=device)
    yield fold_, dict(folded_BFD=g, w_BFD=p, scale_B=scale)
    yield unfold_, dict(dfolded_BFD=g, w_BFD=p, scale_B=scale, dw_BFD=p.clone())


REFUSALS = [("p", torch.Tensor.mT.__get__, "p must be contiguous"), ("g", lambda g: g[:1], "g must have p's shape"),
            ("exp_avg", torch.Tensor.double, "exp_avg must be contiguous torch.float32"),
            ("exp_avg_sq", lambda v: v[0], "exp_avg_sq must be"), ("hyper", lambda h: h[:4], "hyper must be"),
            ("buf", torch.Tensor.bfloat16, "buf must be"), ("momentum", torch.Tensor.double, "momentum must be one"),
            ("x_BRC", torch.Tensor.mT.__get__, "x must be contiguous"), ("v2", lambda v: v[:, :3], "v2 must be"),
            ("v2", torch.Tensor.double, "v2 must be contiguous"), ("beta2", lambda b: b.repeat(2), "beta2 must be one"),
            ("p_BRC", torch.Tensor.float, "for bf16 only"), ("low", lambda low: None, "for bf16 only"),
            ("low", torch.Tensor.int, "low must be contiguous torch.uint16"), ("lr_B", lambda lr: lr[:1], "lr must be"),
            ("wd", torch.Tensor.double, "wd must be one"), ("x", lambda x: x[:1], "x must have p's shape"),
            ("folded_BFD", torch.Tensor.mT.__get__, "folding takes"), ("w_BFD", lambda w: w[0], "folding takes"),
            ("scale_B", lambda scale: scale[:1], "folding takes"), ("dw_BFD", torch.Tensor.float, "folding takes")]


@pytest.mark.parametrize("argument,spoil,match", REFUSALS, ids=[f"{a}-{m}" for a, _, m in REFUSALS])
def test_updates_refuse(argument, spoil, match, device):
    tried = 0
    for update, arguments in every_update(device):
        if argument in arguments:
            with pytest.raises(ValueError, match=match):
                update(**arguments | {argument: spoil(arguments[argument])})
            tried += 1
            break
    assert tried


def test_updates_of_nothing(device, force_kernels):
    for update, arguments in every_update(device, shape=(0, 6, 10)):
        update(**arguments)


@needs_triton
def test_compiled_kernels_fit():
    for (_, arch), figures in aot_all(updates_rows()).items():
        assert_fits(figures, arch)
