"""Pointwise ops: references against the formulas, kernels against the references in fp64, compiled figures."""
import itertools
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from aot_rows import pointwise_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import DTYPES, GPU, LOW, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import triton_kernels as kernels
from triton_kernels import (
    POINTWISE_TILES,
    add_values,
    add_values_reference,
    finish_heads,
    finish_heads_reference,
    mix,
    mix_reference,
    norm_rotary,
    norm_rotary_reference,
    smear,
    smear_reference,
)

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 2.0**-23
AS_LAUNCHED = list(pointwise_rows()) if kernels.triton else []  # now, for the tests change the tables


@pytest.fixture(autouse=True)
def several_rows(monkeypatch):
    """Interpreted, programs are slow: let each take eight rows. That also masks the last program's. Mixes: two programs
    walk all rows."""
    if not GPU:
        for name, tiles in POINTWISE_TILES.items():
            several = dict(BLOCK=512, WAVES=1) if "WAVES" in tiles else dict(ROWS=8)
            monkeypatch.setitem(POINTWISE_TILES, name, tiles | several)


def randn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def results_and_gradients(op, inputs, weights, **options):
    """Every result of op(*inputs) that is not None, then the gradient of every input, for the results' `weights`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = op(*leaves, **options)
    results = [r for r in (results if isinstance(results, (tuple, list)) else (results,)) if r is not None]
    return [r.detach() for r in results], torch.autograd.grad(results, leaves, [w.to(results[0]) for w in weights])


def assert_same_in_double(op, formula, inputs, weights, **options):
    for got, want in zip(*(sum(map(list, results_and_gradients(f, inputs, weights, **options)), [])
                           for f in (op, formula)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def assert_kernels_match(op, reference, inputs, weights, **options):
    """Results and gradients against fp64, no further from it than the reference in the same low precision; each
    gradient has its input's dtype and shape, and the same bits come again."""
    got, got_grads = results_and_gradients(op, inputs, weights, **options)
    eager, eager_grads = results_and_gradients(reference, inputs, weights, **options)
    exact, exact_grads = results_and_gradients(reference, [x.double() for x in inputs], weights, **options)
    assert all(x.is_contiguous() and x.dtype == inputs[-1].dtype for x in got)
    assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(got_grads, inputs))
    for i, values in enumerate(zip(got, exact, eager, strict=True)):
        assert_as_good_as_eager(f"result {i}", *values)
    for i, values in enumerate(zip(got_grads, exact_grads, eager_grads)):
        if inputs[i].numel() > 1:
            assert_as_good_as_eager(f"gradient {i}", *values)
    again = results_and_gradients(op, inputs, weights, **options)
    assert all(torch.equal(a, b) for a, b in zip([*got, *got_grads], [*again[0], *again[1]]))
    return got_grads, exact_grads


# --- mix ---
def mix_formula(coefs, streams, *, normed):
    coefs = [torch.ones(1, dtype=streams[0].dtype, device=streams[0].device) if c is None else c for c in coefs]
    x = sum((c if c.numel() == 1 else c.view(-1, 1)) * s for c, s in zip(coefs, streams))
    return x, x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() if normed else None


def flat(op, kinds):
    """op(coefs, streams) as a function of all of them in a row, without coefficients of kind 1, which are None."""
    def call(*inputs, **options):
        coefs, streams = iter(inputs[:-len(kinds)]), inputs[-len(kinds):]
        return op([None if kind == "1" else next(coefs) for kind in kinds], streams, **options)
    return call


def mix_inputs(kinds, T, D, dtype=torch.float64, device="cpu", scalar_dtype=None, seed=0):
    """Coefficients by letter (s: 0-d, o: one element, g: a column (T,) of a gate tensor, c: a column (T, 1), 1: none),
    then streams, of which every other one is a slice of a wider tensor."""
    lanes = randn(T, 11, seed=seed + 1, dtype=dtype, device=device) / 2 + 1
    scalars = randn(8, seed=seed + 2, dtype=scalar_dtype or dtype, device=device) / 4 + 1
    make = {"s": lambda i: scalars[i], "o": lambda i: scalars[i:i + 1], "g": lambda i: lanes[:, 2 * i],
            "c": lambda i: lanes[:, i:i + 1]}
    wide = [randn(T, D + 16 * (i % 2), seed=seed + 3 + i, dtype=dtype, device=device) for i in range(len(kinds))]
    return [make[kind](i) for i, kind in enumerate(kinds) if kind != "1"] + [x[:, :D] for x in wide]


def weights_of(T, *shape, device="cpu"):
    return [randn(T, *shape, seed=20 + i, device=device).bfloat16().half() for i in range(2)]  # exact in every dtype


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kinds", ["s", "1", "sg", "s1g1", "ogcs", "cgsgoc"])
@pytest.mark.parametrize("T", [1, 23])
def test_mix_reference_is_the_formula(T, kinds, normed):
    inputs, weights = mix_inputs(kinds, T, 24), weights_of(T, 24)[:1 + normed]
    assert_same_in_double(flat(mix, kinds), flat(mix_formula, kinds), inputs, weights, normed=normed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("kinds, T, D", [
    ("s", 1, 16), ("ss", 4096, 768), ("ssgg", 4099, 768), ("gcogsg", 1024, 768), ("og", 3, 2048), ("ss1", 4096, 768),
    ("1g1", 1001, 768),
] if GPU else [
    ("s", 1, 16), ("ss", 37, 96), ("ssgg", 35, 64), ("gcogsg", 16, 40), ("gggggg", 5, 130), ("og", 3, 2048),
    ("ss1", 9, 48), ("1g1", 11, 40), ("1", 3, 16),
])
def test_mix_kernels_match(kinds, T, D, normed, dtype, device, force_kernels):
    inputs = mix_inputs(kinds, T, D, dtype, device, scalar_dtype=torch.float32)
    weights = weights_of(T, D, device=device)[:1 + normed]
    got, exact = assert_kernels_match(flat(mix, kinds), flat(mix_reference, kinds), inputs, weights, normed=normed)
    scaled = [k for k, kind in enumerate(kinds) if kind != "1"]
    for k, c, g, want in zip(scaled, inputs[:-len(kinds)], got, exact):
        s, ds = inputs[-len(kinds):][k], exact[-len(kinds):][k]
        if c.numel() == 1:  # a sum of T * D numbers: random roundings of log2(T * D) levels, four standard deviations
            size = (ds * s.double() / c.double()).norm().item()  # of the terms total * s, for ds is c * total
            bound = 4 * torch.finfo(torch.float32).eps * (math.log2(T * D) * size + want.abs().item())
            assert abs(g.double() - want).item() <= bound


@needs_triton
@settings(max_examples=5 if GPU else 15, deadline=None)  # a GPU compiles each
@given(kinds=st.text("sogc1", min_size=1, max_size=6), T=st.integers(1, 12), D=st.integers(1, 40), normed=st.booleans(),
       wanted=st.integers(0, 2**12 - 1), seen=st.sampled_from([(0,), (1,), (0, 1)]))
def test_mix_gives_the_gradients_that_are_wanted(kinds, T, D, normed, wanted, seen):
    """Any subset of inputs may want gradients, any subset of the results may be used."""
    device = "cuda" if GPU else "cpu"
    inputs, weights = mix_inputs(kinds, T, D, torch.float32, device), weights_of(T, D, device=device)
    used = [i for i in seen if normed or i == 0] or [0]
    wanted = [i for i in range(len(inputs)) if wanted >> i & 1] or [0]

    def gradients(op):
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "FORCE_KERNELS", True)
            results = flat(op, kinds)(*leaves, normed=normed)
            loss = sum((results[i] * weights[i]).sum() for i in used)
            loss.backward()
        assert all((x.grad is not None) == (i in wanted) for i, x in enumerate(leaves))
        return [leaves[i].grad for i in wanted]

    for got, want in zip(gradients(mix), gradients(mix_reference)):
        scale = want.abs().max().item() + 1  # tiny cases: all roundings are of numbers of this size
        torch.testing.assert_close(got, want, rtol=0, atol=64 * EPS * scale * (1 + math.sqrt(T * D)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kinds, T, D", [("ss1", 4099, 768), ("1ggggg", 1001, 768)] if GPU else
                         [("ss1", 37, 96), ("1ggggg", 5, 130), ("s", 1, 16)])
def test_mix_of_which_the_norm_alone_is_read(kinds, T, D, dtype, device, force_kernels):
    """The same bits, gradients included; x is None."""
    inputs = mix_inputs(kinds, T, D, dtype, device, scalar_dtype=torch.float32)
    weights = weights_of(T, D, device=device)
    for op in mix, mix_reference:
        (n,), grads = results_and_gradients(flat(op, kinds), inputs, weights[:1], normed=True, keep_x=False)
        leaves = [x.detach().requires_grad_() for x in inputs]
        want = flat(op, kinds)(*leaves, normed=True)[1]
        assert torch.equal(n, want)
        assert all(map(torch.equal, grads, torch.autograd.grad(want, leaves, weights[0].to(want))))
        assert flat(op, kinds)(*inputs, normed=True, keep_x=False)[0] is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keep_x", [True, False])
@pytest.mark.parametrize("kinds, T, D", [("ss1", 4099, 768), ("sg", 16384, 768), ("s", 1, 2048)] if GPU else
                         [("ss1", 37, 96), ("sg", 16, 40), ("s", 1, 2048)])
def test_mix_gives_peaks(kinds, T, D, keep_x, dtype, device, force_kernels):
    """The largest is that of n as it was rounded; gradients have the bits they have without."""
    inputs = mix_inputs(kinds, T, D, dtype, device, scalar_dtype=torch.float32)
    weights = weights_of(T, D, device=device)
    for op in mix, mix_reference:
        leaves = [x.detach().requires_grad_() for x in inputs]
        x, n, peaks = flat(op, kinds)(*leaves, normed=True, keep_x=keep_x, peaks=True)
        assert peaks.max() == n.abs().max() and peaks.dtype == torch.float32 and peaks.ndim == 1
        assert not peaks.requires_grad and (x is not None) == keep_x
        want = flat(op, kinds)(*leaves, normed=True)
        exact = flat(mix_reference, kinds)(*(x.double() for x in inputs), normed=True)
        for name, *values in zip("xn", (x, n), exact, want):
            if values[0] is not None:
                assert_as_good_as_eager(name, *values)
        grads, wanted = (torch.autograd.grad(r, leaves, weights[0].to(r)) for r in (n, want[1]))
        assert all(map(torch.equal, grads, wanted))


def test_mix_peaks_of_zeros_and_of_the_last_row(device, force_kernels):
    x = torch.zeros(19, 48, device=device)
    assert mix([None], [x], normed=True, peaks=True)[2].max() == 0
    x[18, 3] = -5.0
    n, peaks = mix([None], [x], normed=True, peaks=True)[1:]
    assert peaks.max() == -n[18, 3] > 6


def test_mix_takes_streams_whose_rows_are_not_contiguous(device, force_kernels):
    inputs = mix_inputs("sg", 9, 32, torch.float32, device)
    turned = [*inputs[:2], *(x.T.contiguous().T for x in inputs[2:])]
    for got, want in zip(flat(mix, "sg")(*turned, normed=True), flat(mix, "sg")(*inputs, normed=True)):
        assert torch.equal(got, want)


def test_mix_norms_the_sum_before_it_is_rounded(device, force_kernels):
    inputs = mix_inputs("sg", 40, 64, LOW, device, scalar_dtype=torch.float32)
    x, n = flat(mix, "sg")(*inputs, normed=True)
    exact = flat(mix_formula, "sg")(*(x.double() for x in inputs), normed=True)[1].to(n.dtype)
    of_rounded = mix_formula([None], [x.double()], normed=True)[1].to(n.dtype)
    assert (n == exact).float().mean() > 0.99 > 0.9 > (n == of_rounded).float().mean()


def test_mix_streams_without_coefficients_share_one_gradient(device, force_kernels):
    streams = [randn(5, 16, seed=i, dtype=LOW, device=device).requires_grad_() for i in range(3)]
    lam = torch.ones((), device=device)
    for normed in False, True:
        results = mix([None, lam, None], streams, normed=normed)
        first, other, last = torch.autograd.grad(results[normed].sum(), streams)
        assert first.data_ptr() == last.data_ptr() != other.data_ptr()


# --- mixes that leave a lambda to the next ---
def chain_formula(coefs, streams, *, normed, keep_x=True, leave=None):
    """The formula with products made at once, which are kept beside the lambdas."""
    coefs, streams = zip(*((None, s.product) if hasattr(s, "product") else (c, s) for c, s in zip(coefs, streams)))
    x, n = mix_formula(coefs, streams, normed=normed)
    x = x if leave is None else SimpleNamespace(stream=x, product=leave * x)
    return x if keep_x else None, n


def chained(op, links, normed=None, read_x=True):
    """A chain of mixes as a function of its lambdas, then of each link's coefficients, then of all streams: each link
    but the last leaves its sum, times a lambda, to the next, which adds streams to it. links: the kinds of each link's
    own streams; normed: which give n (default: all). Gives every n, and the last x."""
    kinds, normed = "".join(links), normed or [True] * len(links)

    def call(*inputs):
        lams, coefs = inputs[:len(links) - 1], iter(inputs[len(links) - 1:-len(kinds)])
        streams, x, results = iter(inputs[-len(kinds):]), None, []
        for link, gives_n, lam in zip(links, normed, [*lams, None], strict=True):
            own = [(None if kind == "1" else next(coefs), next(streams)) for kind in link]
            last = dict(keep_x=read_x) if lam is None else dict(leave=lam)
            x, n = op(*zip(*([] if x is None else [(None, x)]), *own), normed=gives_n, **last)
            results.append(n)
        return [*results, x]
    return call


def chain_inputs(links, T, D, dtype=torch.float64, device="cpu", scalar_dtype=None):
    lams = randn(len(links) - 1, 1, seed=30, dtype=scalar_dtype or dtype, device=device) / 4 + 1
    lams = [lam if i % 2 else lam[0] for i, lam in enumerate(lams)]  # one element, or none of its own dimension
    each = [mix_inputs(link, T, D, dtype, device, scalar_dtype, seed=40 + 10 * i) for i, link in enumerate(links)]
    coefs = [c for link, inputs in zip(links, each) for c in inputs[:-len(link)]]
    return lams + coefs + [x for link, inputs in zip(links, each) for x in inputs[-len(link):]]


def chain_weights(number, T, D, device="cpu"):
    return [randn(T, D, seed=20 + i, device=device).bfloat16().half() for i in range(number)]


CHAINS = [  # as in the model: all but the first lambda deferred, skip connections, sums whose norm nobody reads
    (["11", "1"], [1, 1], True), (["1", "1"], [0, 0], True), (["11", "1", "11"], [1, 0, 1], True),
    (["s11", "1", "11"], [1, 1, 1], False), (["s", "1g", "11"], [1, 1, 0], True), (["1", "gs", "c"], [0, 1, 1], False),
    (["gcogsg", "1s1cg"], [1, 1], True),
]


@pytest.mark.parametrize("links, normed, read_x", CHAINS)
@pytest.mark.parametrize("T", [1, 23])
def test_chain_of_references_is_the_formula(links, normed, read_x, T):
    inputs, weights = chain_inputs(links, T, 24), chain_weights(sum(normed) + read_x, T, 24)
    assert_same_in_double(*(chained(op, links, normed, read_x) for op in (mix, chain_formula)), inputs, weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, D", [(4099, 768), (1, 16)] if GPU else [(37, 96), (1, 16)])
@pytest.mark.parametrize("links, normed, read_x", CHAINS)
def test_chain_of_kernels_matches(links, normed, read_x, T, D, dtype, device, force_kernels):
    inputs = chain_inputs(links, T, D, dtype, device, scalar_dtype=torch.float32)
    weights = chain_weights(sum(normed) + read_x, T, D, device)
    ops = (chained(op, links, normed, read_x) for op in (mix, mix_reference))
    got, exact = assert_kernels_match(*ops, inputs, weights)
    terms = []  # of every lambda's gradient: the products' gradients times the sums

    def noted(*arguments, leave=None, **options):
        x, n = chain_formula(*arguments, leave=leave, **options)
        if leave is not None:
            x.product.register_hook(lambda dx, x=x: terms.append(dx * x.stream.detach()))
        return x, n

    results_and_gradients(chained(noted, links, normed, read_x), [x.double() for x in inputs], weights)
    assert len(terms) == len(links) - 1
    for g, want, of in zip(got, exact, reversed(terms)):
        torch.testing.assert_close(want.sum(), of.sum())
        # A term takes up to a dozen roundings on its way, each of a third of a unit: one unit; four deviations.
        assert abs(g.double() - want).item() <= 4 * torch.finfo(dtype).eps * (of.norm() + want.abs()).item()


@needs_triton
@settings(max_examples=5 if GPU else 15, deadline=None)  # a GPU compiles each
@given(links=st.lists(st.text("sogc1", min_size=1, max_size=3), min_size=2, max_size=3), T=st.integers(1, 12),
       D=st.integers(1, 40), wanted=st.integers(0, 2**14 - 1), seen=st.integers(1, 2**4 - 1))
def test_chain_gives_the_gradients_that_are_wanted(links, T, D, wanted, seen):
    """Any subset of inputs may want gradients, any subset of the results may be used: the same have none."""
    device = "cuda" if GPU else "cpu"
    inputs, weights = chain_inputs(links, T, D, torch.float32, device), chain_weights(len(links) + 1, T, D, device)

    def gradients(op):
        leaves = [x.detach().requires_grad_(bool(wanted >> i & 1)) for i, x in enumerate(inputs)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "FORCE_KERNELS", True)
            results = chained(op, links)(*leaves)
            loss = sum((r * w).sum() for i, (r, w) in enumerate(zip(results, weights)) if seen >> i & 1 or i == 0)
        if loss.requires_grad:
            loss.backward()
        return [x.grad for x in leaves]

    for got, want in zip(gradients(mix), gradients(mix_reference)):
        assert (got is None) == (want is None)
        if want is not None:
            scale = want.abs().max().item() + 1  # tiny cases: all roundings are of numbers of this size
            torch.testing.assert_close(got, want, rtol=0, atol=256 * EPS * scale * (1 + math.sqrt(T * D)))


def test_mix_gives_peaks_and_leaves_a_lambda(device, force_kernels):
    x, lam = randn(9, 48, dtype=LOW, device=device), torch.tensor([0.5], device=device)
    for op in mix, mix_reference:
        scaled, n, peaks = op([None], [x], normed=True, peaks=True, leave=lam)
        assert peaks.max() == n.abs().max()
        torch.testing.assert_close(op([None], [scaled], normed=False)[0], x / 2, rtol=2 * torch.finfo(LOW).eps, atol=0)
        scaled, _ = op([None], [x], normed=False, leave=lam)
        assert torch.equal(scaled.stream, x) and scaled.by is lam
        assert torch.equal(op([None], [scaled], normed=False)[0], x / 2)


def test_mix_leaves_its_norm_in_place_of_the_sum(device, force_kernels):
    x, lam = randn(9, 48, seed=1, dtype=LOW, device=device), torch.tensor(-0.5, device=device)
    scaled, n = mix([None], [x], normed=True, leave=lam)
    assert scaled.stream.data_ptr() == n.data_ptr()
    by = lam * x.double().square().mean(1).sqrt()
    torch.testing.assert_close(scaled.by, by.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_chain_writes_one_gradient_and_keeps_one_stream(gated, device, force_kernels, monkeypatch):
    """Of the product and of its companions; where no coefficient wants one, backward reads no stream but the sum."""
    streams = [randn(5, 16, seed=i, dtype=LOW, device=device).requires_grad_() for i in range(4)]
    lams = [randn(1, seed=9 + i, device=device).float()[0].requires_grad_() for i in range(2)]
    calls, backward = [], kernels.mix_backward
    monkeypatch.setattr(kernels, "mix_backward", lambda *args: calls.append(args) or backward(*args))
    first, n = mix([None, None], streams[:2], normed=True, leave=lams[0])
    rms, *kept = first.stream.grad_fn.saved_tensors
    assert rms.shape == (5,) and [x.data_ptr() for x in kept] == [lams[0].data_ptr(), n.data_ptr()]
    coefs = [None, None, randn(5, dtype=LOW, device=device).requires_grad_() if gated else None]
    second, _ = mix(coefs, [first, *streams[2:]], normed=True, leave=lams[1])
    _, n = mix([None], [second], normed=True)
    inputs = [first.stream, *streams, second.stream, *lams]
    dfirst, d0, d1, d2, d3, _, *dlams = torch.autograd.grad(n.float().sum(), inputs)
    assert dfirst.data_ptr() == d2.data_ptr() and d0.data_ptr() == d1.data_ptr() != d2.data_ptr()
    assert (d3.data_ptr() == d2.data_ptr()) != gated
    assert [len(args[3]) for args in calls] == [1, 3 if gated else 1, 1]
    assert all(d.shape == () and d.dtype == torch.float32 for d in dlams)


# --- injections ---
def injections_formula(gates, x, y):
    return [sum((g.view(-1, 1) * s for g, s in zip(pair, (x, y)) if g is not None)) for pair in gates]


def flat_injections(op, kinds):
    """op(gates, x, y) as a function of all gates, then x and y; kinds: of each pair, which gates there are."""
    def call(*inputs):
        gates = iter(inputs[:-2])
        return op([tuple(next(gates) if has in kind else None for has in "xy") for kind in kinds], *inputs[-2:])
    return call


def injection_inputs(kinds, T, D, dtype=torch.float64, device="cpu"):
    lanes = randn(T, 20, seed=1, dtype=dtype, device=device)
    gates = [lanes[:, i] if i % 2 else lanes[:, i:i + 1] for i in range(len("".join(kinds)))]
    return [*gates, randn(T, D, seed=3, dtype=dtype, device=device),
            randn(T, D + 16, seed=4, dtype=dtype, device=device)[:, :D]]


@pytest.mark.parametrize("kinds", [["xy"], ["x", "xy", "y"], ["xy"] * 8], ids=len)
@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
def test_injections(kinds, dtype, device, request):
    device = "cpu" if dtype == torch.float64 else device
    T, D = (4099, 768) if device == "cuda" else (11, 24)
    inputs = injection_inputs(kinds, T, D, dtype, device)
    weights = [randn(T, D, seed=20 + i, device=device).bfloat16().half() for i in range(len(kinds))]
    if dtype == torch.float64:
        ops = (flat_injections(f, kinds) for f in (kernels.injections, injections_formula))
        return assert_same_in_double(*ops, inputs, weights)
    request.getfixturevalue("force_kernels")
    ops = (flat_injections(f, kinds) for f in (kernels.injections, kernels.injections_reference))
    assert_kernels_match(*ops, inputs, weights)


def test_injections_nobody_reads(device, force_kernels):
    """Gates of an output without a gradient get none, x and y get the others'."""
    gates = [randn(5, 1, seed=i, dtype=LOW, device=device).requires_grad_() for i in range(2)]
    x, y = (randn(5, 16, seed=i, dtype=LOW, device=device).requires_grad_() for i in (3, 4))
    outs = kernels.injections([(gates[0], None), (gates[1], gates[1])], x, y)
    outs[0].sum().backward()
    assert gates[1].grad is None and gates[0].grad is not None
    torch.testing.assert_close(x.grad, gates[0].detach().expand(5, 16))
    assert not y.grad.any()


# --- gradients that meet ---
def test_fan_and_leading_keep_gradients(device, force_kernels):
    """As without them, for any number of reads."""
    for reads in (0, 1, 2, 3, 5, 6, 12):
        x = randn(7, 16, dtype=torch.float32, device=device).requires_grad_()
        y, near = kernels.leading(x * 2, 5)
        assert near.data_ptr() == y.data_ptr() and near.shape == (7, 5)  # no copy
        aliases = kernels.fan(y)
        parts = [(next(aliases) * (i + 1)).sum() for i in range(reads)]
        (sum(parts) + (near * 10).sum()).backward()
        want = torch.full((7, 16), 2.0 * sum(range(1, reads + 1)), device=device)
        want[:, :5] += 20
        assert torch.equal(x.grad, want)


# --- smear ---
def smear_formula(gate_w, lam, e):
    """One token at a time."""
    W, rows = gate_w.shape[1], [e[0] + 0 * lam * gate_w.sum()]
    for t in range(1, len(e)):
        rows.append(e[t] + lam * torch.sigmoid((gate_w[0] * e[t, :W]).sum()) * e[t - 1])
    x = torch.stack(rows)
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def embedding_last(op):
    return lambda gate_w, lam, e: op(e, gate_w, lam)


def smear_inputs(T, D, W, dtype=torch.float64, device="cpu", scalar_dtype=None, extra=0):
    """Gate weights, lambda, and e, whose rows lie `extra` numbers apart."""
    lam = randn(3, seed=2, dtype=scalar_dtype or dtype, device=device)[1]
    return [randn(1, W, seed=1, dtype=dtype, device=device), lam,
            randn(T, D + extra, seed=3, dtype=dtype, device=device)[:, :D]]


SMEAR = [embedding_last(smear), embedding_last(smear_reference)]


@pytest.mark.parametrize("T, D, W", [(1, 24, 12), (2, 24, 1), (23, 16, 16)])
def test_smear_reference_is_the_formula(T, D, W):
    assert_same_in_double(SMEAR[0], smear_formula, smear_inputs(T, D, W), weights_of(T, D)[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, D, W, extra", [
    (1, 768, 12, 0), (4099, 768, 12, 16), (16384, 768, 12, 0), (33, 100, 5, 3),
] if GPU else [
    (1, 16, 12, 0), (2, 40, 12, 16), (33, 100, 5, 3), (16, 48, 16, 0), (3, 2048, 1, 0),
])
def test_smear_kernels_match(T, D, W, extra, dtype, device, force_kernels):
    """Lambda's gradient is a sum over tokens, in fp32: a random rounding a token, four standard deviations."""
    inputs = smear_inputs(T, D, W, dtype, device, torch.float32, extra)
    weights = [4 * w for w in weights_of(T, D, device=device)[:1]]
    got, exact = assert_kernels_match(*SMEAR, inputs, weights)
    gate = torch.sigmoid(inputs[2].double()[:, :W] @ inputs[0].double().T)
    before = torch.nn.functional.pad(inputs[2].double()[:-1], (0, 0, 1, 0))
    size = (exact[2] * gate * before).norm().item()
    bound = 4 * torch.finfo(torch.float32).eps * (math.log2(T * D) * size + exact[1].abs().item())
    assert abs(got[1].double() - exact[1]).item() <= bound


def test_smear_of_rows_that_are_not_contiguous(device, force_kernels):
    gate_w, lam, e = smear_inputs(9, 32, 12, torch.float32, device)
    assert torch.equal(smear(e.T.contiguous().T, gate_w, lam), smear(e, gate_w, lam))


def test_smear_gives_the_gradients_that_are_wanted(device, force_kernels):
    """Any of its inputs may want none; a gradient may come in whose rows are not contiguous."""
    inputs, weight = smear_inputs(11, 24, 6, torch.float32, device), weights_of(24, 11, device=device)[0].float().T
    want = torch.autograd.grad(SMEAR[1](*(leaves := [x.clone().requires_grad_() for x in inputs])), leaves, weight)
    for wanted in range(1, 8):
        leaves = [x.detach().requires_grad_(wanted >> i & 1 == 1) for i, x in enumerate(inputs)]
        SMEAR[0](*leaves).backward(weight)
        for x, g in zip(leaves, want):
            assert (x.grad is not None) == x.requires_grad
            if x.requires_grad:
                torch.testing.assert_close(x.grad, g, rtol=1e-5, atol=1e-5)


# --- norm_rotary ---
def rotary_formula(qk, cos, sin, *, paired, key_offset):
    """One number at a time: pair j of head h of token t turns by row t (paired: 2t + h mod 2) of the tables."""
    T, _, N, H = qk.shape
    x = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt()
    row = (2 * torch.arange(T)[:, None] + torch.arange(N) % 2) if paired else torch.arange(T)[:, None].expand(T, N)
    c, s = (table[row][:, None].repeat_interleave(2, -1) for table in (cos, sin))  # (T, 1, N, H/2)
    half = x[..., :H // 2]
    swapped = torch.stack((half[..., 1::2], -half[..., ::2]), -1).flatten(-2)
    q, k = torch.cat((c * half + s * swapped, x[..., H // 2:]), -1).unbind(1)
    if key_offset:
        earlier = (torch.arange(T) - 1).clamp(min=0)
        k = torch.cat((k[..., :H // 2], k[earlier][..., H // 2:]), -1)
    return q, k


def rotary_inputs(T, N, H, positions, dtype=torch.float64, device="cpu", extra=0):
    """qk as a view of a wider linear output, and tables that are no rotation, so that cos and sin are told apart."""
    qk = randn(T, 2 * N * H + extra, dtype=dtype, device=device)[:, :2 * N * H].view(T, 2, N, H)
    return [qk, *(randn(positions, H // 4, seed=s, dtype=dtype, device=device) for s in (5, 6))]


def with_tables(op, cos, sin):
    return lambda qk, **options: op(qk, cos.to(qk.dtype), sin.to(qk.dtype), **options)


FLAGS = list(itertools.product([False, True], [False, True]))


@pytest.mark.parametrize("paired, key_offset", FLAGS)
@pytest.mark.parametrize("T, N, H", [(1, 2, 4), (11, 4, 16)])
def test_norm_rotary_reference_is_the_formula(T, N, H, paired, key_offset):
    qk, cos, sin = rotary_inputs(T, N, H, 2 * T + 3)
    assert_same_in_double(with_tables(norm_rotary, cos, sin), with_tables(rotary_formula, cos, sin), [qk],
                          weights_of(T, N, H), paired=paired, key_offset=key_offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired, key_offset", FLAGS)
@pytest.mark.parametrize("T, N, H, extra", [(1, 2, 16, 0), (4099, 6, 128, 16), (1001, 12, 64, 3)] if GPU
                         else [(1, 2, 16, 0), (33, 2, 32, 0), (7, 6, 128, 16), (20, 4, 16, 3)])
def test_norm_rotary_kernels_match(T, N, H, extra, paired, key_offset, dtype, device, force_kernels):
    qk, cos, sin = rotary_inputs(T, N, H, 2 * T + 1, dtype, device, extra)
    assert_kernels_match(with_tables(norm_rotary, cos, sin), with_tables(norm_rotary_reference, cos, sin), [qk],
                         weights_of(T, N, H, device=device), paired=paired, key_offset=key_offset)


def test_norm_rotary_with_one_result_unused(device, force_kernels):
    qk, cos, sin = rotary_inputs(6, 2, 16, 6, torch.float32, device)
    for used in 0, 1:
        grads = []
        for op in norm_rotary, norm_rotary_reference:
            leaf = qk.detach().requires_grad_()
            op(leaf, cos, sin, paired=False, key_offset=True)[used].sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
        assert not grads[0][:, 1 - used].any()


# --- finish_heads ---
def finish_formula(y, v, alpha=None, gate=None):
    if alpha is not None:
        u = v / v.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-4)
        y = y - alpha.tanh()[..., None] * (y * u).sum(-1, keepdim=True) * u
    return y if gate is None else y * gate[..., None]


GIVEN = ["alpha gate", "alpha", "gate"]


def finish_inputs(given, T, N, H, dtype=torch.float64, device="cpu", extra=0):
    """y and v (tokens `extra` numbers apart), then columns of one gate tensor."""
    y, v = (randn(T, N * H + extra, seed=s, dtype=dtype, device=device)[:, :N * H].view(T, N, H) for s in (1, 2))
    lanes = randn(T, 3 * N + 1, seed=3, dtype=dtype, device=device)
    return [y, v] + [lanes[:, 1:N + 1]] * ("alpha" in given) + [lanes[:, 2 * N:3 * N]] * ("gate" in given)


def named(op, given):
    """op(y, v, *columns), where `given` names the columns; v takes part in the graph even if it is not read."""
    def call(y, v, *columns):
        columns = dict(zip(given.split(), columns))
        return op(y, v, columns.get("alpha"), columns.get("gate")) + (0 if "alpha" in given else 0 * v)
    return call


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("T, N, H", [(1, 1, 5), (13, 3, 16)])
def test_finish_heads_reference_is_the_formula(T, N, H, given):
    inputs = finish_inputs(given, T, N, H)
    assert_same_in_double(named(finish_heads, given), named(finish_formula, given), inputs, weights_of(T, N, H)[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("T, N, H, extra", [(1, 1, 16, 0), (4099, 6, 128, 16), (1001, 12, 64, 1)] if GPU
                         else [(1, 1, 16, 0), (21, 3, 32, 0), (5, 6, 128, 16), (18, 2, 16, 1)])
def test_finish_heads_kernels_match(T, N, H, extra, given, dtype, device, force_kernels):
    inputs = finish_inputs(given, T, N, H, dtype, device, extra)
    assert_kernels_match(named(finish_heads, given), named(finish_heads_reference, given), inputs,
                         weights_of(T, N, H, device=device)[:1])


def test_finish_heads_with_values_too_small_to_normalize(device, force_kernels):
    """Below |v| = 1e-4 the direction is v / 1e-4, and v's gradient keeps its part along v; v = 0 gives no NaN."""
    y, v, alpha, gate = finish_inputs("alpha gate", 6, 2, 16, torch.float32, device)
    v = v * torch.tensor([0, 1e-6, 1e-5, 1e-3, 1, 1e3], device=device).view(-1, 1, 1)
    inputs, weights = [y, v, alpha, gate], weights_of(6, 2, 16, device=device)[:1]
    _, got = results_and_gradients(finish_heads, inputs, weights)
    _, exact = results_and_gradients(finish_formula, [x.double() for x in inputs], weights)
    for g, e in zip(got, exact):
        if e.isnan().any():  # the formula's own derivative at v = 0
            g, e = g[1:], e[1:]
        largest = e.abs().amax(-1, keepdim=True)
        assert ((g - e).abs() <= 64 * EPS * largest).all()
    assert all(x.isfinite().all() for x in got)


def test_full_exclusion_leaves_nothing_along_the_value(device, force_kernels):
    y, v, alpha = finish_inputs("alpha", 9, 2, 32, torch.float32, device)
    z = finish_heads(y, v, torch.full_like(alpha, 40.0), None)
    along = (z.double() * torch.nn.functional.normalize(v.double(), dim=-1)).sum(-1)
    assert along.abs().max() <= 16 * EPS * y.abs().max()
    assert torch.equal(finish_heads(y, v, torch.zeros_like(alpha), None), y)


# --- add_values ---
def values_formula(v, ve, near, w):
    """One head at a time."""
    (_, N, H), W, heads = v.shape, near.shape[1], []
    for h in range(N):
        gate = 2 * torch.sigmoid(near @ w[h, :W] + ve[:, :W] @ w[h, W:])
        heads.append(v[:, h] + gate[:, None] * ve[:, h * H:(h + 1) * H])
    return torch.stack(heads, 1)


def values_inputs(T, N, H, W, dtype=torch.float64, device="cpu", extra=0):
    """v, ve and near as columns of wider tensors, `extra` numbers apart."""
    v, ve = (randn(T, N * H + extra, seed=s, dtype=dtype, device=device)[:, :N * H] for s in (1, 2))
    near = randn(T, 2 * H, seed=3, dtype=dtype, device=device)[:, :W]
    return [v.view(T, N, H), ve, near, randn(N, 2 * W, seed=4, dtype=dtype, device=device)]


@pytest.mark.parametrize("T, N, H, W", [(1, 1, 5, 5), (2, 3, 8, 1), (13, 3, 16, 6)])
def test_add_values_reference_is_the_formula(T, N, H, W):
    assert_same_in_double(add_values, values_formula, values_inputs(T, N, H, W), weights_of(T, N, H)[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, N, H, W, extra", [
    (1, 6, 128, 6, 0), (16384, 6, 128, 6, 0), (4099, 6, 128, 6, 16), (1001, 12, 64, 5, 1),
] if GPU else [
    (1, 1, 16, 6, 0), (2, 3, 32, 1, 0), (33, 6, 16, 6, 16), (5, 6, 128, 6, 0), (18, 2, 16, 16, 1),
])
def test_add_values_kernels_match(T, N, H, W, extra, dtype, device, force_kernels):
    inputs = values_inputs(T, N, H, W, dtype, device, extra)
    weights = [4 * w for w in weights_of(T, N, H, device=device)[:1]]
    assert_kernels_match(add_values, add_values_reference, inputs, weights)


def test_add_values_gives_the_gradients_that_are_wanted(device, force_kernels):
    """Any of its inputs may want none; v's is the one that came in, whose tokens need not be contiguous."""
    inputs = values_inputs(7, 2, 16, 4, torch.float32, device)
    weight = weights_of(7, 2, 32, device=device)[0].float()[..., :16]
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(values_formula(*leaves), leaves, weight)
    for wanted in range(1, 16):
        leaves = [x.detach().requires_grad_(wanted >> i & 1 == 1) for i, x in enumerate(inputs)]
        needed = [x for x in leaves if x.requires_grad]
        got = torch.autograd.grad(add_values(*leaves), needed, weight)
        for g, full in zip(got, (g for x, g in zip(leaves, want) if x.requires_grad)):
            torch.testing.assert_close(g, full, rtol=1e-5, atol=1e-5)
        assert wanted % 2 == 0 or got[0].data_ptr() == weight.data_ptr()


# --- all of them ---
ONE_RESULT = "finish", "smear", "add_values"


def every_op(device, dtype=torch.float32):
    """(op, reference, inputs, options, number of results)"""
    qk, cos, sin = rotary_inputs(16, 2, 16, 32, dtype, device)
    rotary = [with_tables(op, cos, sin) for op in (norm_rotary, norm_rotary_reference)]
    mixes = (flat(op, "sg1o") for op in (mix, mix_reference))
    yield "mix", *mixes, mix_inputs("sg1o", 16, 32, dtype, device), dict(normed=True), (32,)
    chains = (chained(op, ["s11", "1", "1g"], [1, 0, 0]) for op in (mix, mix_reference))
    yield "chain", *chains, chain_inputs(["s11", "1", "1g"], 16, 32, dtype, device), {}, (32,)
    spread = (flat_injections(op, ["xy", "y"]) for op in (kernels.injections, kernels.injections_reference))
    yield "injections", *spread, injection_inputs(["xy", "y"], 16, 32, dtype, device), {}, (32,)
    yield "smear", *SMEAR, smear_inputs(16, 32, 12, dtype, device), {}, (32,)
    yield "norm_rotary", *rotary, [qk], dict(paired=True, key_offset=True), (2, 16)
    inputs = finish_inputs("alpha gate", 16, 2, 16, dtype, device)
    yield "finish", finish_heads, finish_heads_reference, inputs, {}, (2, 16)
    yield "add_values", add_values, add_values_reference, values_inputs(16, 2, 16, 6, dtype, device), {}, (2, 16)


@pytest.mark.parametrize("rows", [2, 32] if GPU else [1, 2, 4, 32])
def test_rows_of_a_program_change_nothing(rows, device, force_kernels, monkeypatch):
    for name, tiles in POINTWISE_TILES.items():
        size = dict(BLOCK=32 * rows, WAVES=1) if "WAVES" in tiles else dict(ROWS=rows)
        monkeypatch.setitem(POINTWISE_TILES, name, tiles | size | dict(num_warps=4 if rows > 4 else 1))
    for name, op, reference, inputs, options, shape in every_op(device):
        weights = weights_of(16, *shape, device=device)[:1 if name in ONE_RESULT else 2]
        assert_kernels_match(op, reference, inputs, weights, **options)


@pytest.mark.no_poison
@pytest.mark.parametrize("which", [0, 1], ids=["kernels", "references"])
def test_trace_whole(which, device, force_kernels):
    """Forward and backward in one graph, references and kernels alike."""
    for name, *ops, inputs, options, shape in every_op(device):
        op = ops[which]
        weights = weights_of(16, *shape, device=device)[:1 if name in ONE_RESULT else 2]
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        for got, want in zip(*(sum(map(list, results_and_gradients(f, inputs, weights, **options)), [])
                               for f in (compiled, op))):
            torch.testing.assert_close(got, want)


@pytest.mark.no_poison
def test_operators_are_registered_right(device):
    """Fake results agree with real ones in shape, dtype and stride; nothing aliases or is written to."""
    ops, rules = torch.ops.speedrun, ("test_schema", "test_autograd_registration", "test_faketensor")
    check = partial(torch.library.opcheck, test_utils=rules)  # not dynamic shapes: sympy fails there in torch 2.11
    inputs = mix_inputs("sgc", 8, 32, torch.float32, device)
    coefs, streams, (dx, dn) = inputs[:3], inputs[3:], (w.float() for w in weights_of(8, 32, device=device))
    for normed in False, True:
        check(ops.mix_forward, (coefs, streams, normed))
        check(ops.mix_forward, ([None, *coefs[1:]], streams, normed))
        check(ops.mix_forward, (coefs, streams, True, normed, True))
        for last in None, coefs[0]:
            needs = [True, False, True, last is not None] + [normed] * 4
            check(ops.mix_backward, (dx, dn if normed else None, [*coefs, last], streams, needs))
    check(ops.mix_backward, (dx, dn, [None, coefs[0]], streams[:1], [False, True, False, True]))
    gates = [coefs[1], None, None, coefs[2]]
    check(ops.injections_forward, (gates, *streams[:2]))
    check(ops.injections_backward, ([dx, None], gates, *streams[:2]))
    gate_w, lam, e = smear_inputs(8, 32, 12, torch.float32, device)
    check(ops.smear_forward, (e, gate_w, lam))
    check(ops.smear_backward, (dn, e, gate_w, lam))
    qk, cos, sin = rotary_inputs(8, 2, 16, 16, torch.float32, device)
    dq, dk = (w.float() for w in weights_of(8, 2, 16, device=device))
    for flags in FLAGS:
        check(ops.norm_rotary_forward, (qk, cos, sin, *flags))
        check(ops.norm_rotary_backward, (dq, dk, qk, cos, sin, *flags))
    y, v, alpha, gate = finish_inputs("alpha gate", 8, 2, 16, torch.float32, device)
    for columns in (alpha, gate), (alpha, None), (None, gate):
        check(ops.finish_heads_forward, (y, v, *columns))
        check(ops.finish_heads_backward, (dq, y, v, *columns))
    v, ve, near, w = values_inputs(8, 2, 16, 6, torch.float32, device)
    check(ops.add_values_forward, (v, ve, near, w))
    check(ops.add_values_backward, (dq, ve, near.contiguous(), w))


def rotated(x, N, cos, sin=None, paired=False):
    return norm_rotary(x.view(-1, 2, N, 16), cos, cos if sin is None else sin, paired=paired, key_offset=False)


@pytest.mark.parametrize("call, words", [
    (lambda x, c: mix([], [], normed=False), "1 to 6 streams"),
    (lambda x, c: mix([c], [x, x], normed=False), "as many coefficients"),
    (lambda x, c: mix([c, c], [x, x[1:]], normed=False), "share one non-empty shape"),
    (lambda x, c: mix([c, c], [x, x.double()], normed=False), "share one floating-point dtype"),
    (lambda x, c: mix([c[1:]], [x], normed=False), "one number, or one for each token"),
    (lambda x, c: mix([c], [x.to("meta")], normed=False), "move them there"),
    (lambda x, c: mix([c], [x], normed=False, keep_x=False), "must be kept"),
    (lambda x, c: mix([c], [x], normed=False, peaks=True), "has no peaks"),
    (lambda x, c: mix([c], [x], normed=True, leave=c), "must be one element"),
    (lambda x, c: mix([c], [x], normed=True, keep_x=False, leave=c[:1]), "keep_x=True"),
    (lambda x, c: mix([c], [x], normed=True, leave=c[:1].to("meta")), "move them there"),
    (lambda x, c: mix([c], [kernels.Scaled(x, c[:1])], normed=True), "give None with it"),
    (lambda x, c: mix([None], [kernels.Scaled(x, c.clone().requires_grad_())], normed=True), "must be constants"),
    (lambda x, c: mix([c[:1].view(1, 1, 1)], [x], normed=True), "one number, or one for each token"),
    (lambda x, c: mix([0.5], [x], normed=True), r"not \['0.5'\]: give one number"),
    (lambda x, c: mix([None] * 2, [x, x.to("meta")], normed=True), "move them there"),
    (lambda x, c: kernels.injections([(c, c)], x, x[1:]), "alike"),
    (lambda x, c: kernels.injections([(c, 0.5)], x, x), "one number, or one for each token"),
    (lambda x, c: kernels.injections([(c, c.to("meta"))], x, x), "move them there"),
    (lambda x, c: smear(x, c[None], 0.5), "one floating-point number"),
    (lambda x, c: smear(x, c[None], c[:1].view(1, 1, 1)), "one floating-point number"),
    (lambda x, c: finish_heads(x[None], x[None], 0.5, None), "one number for each head"),
    (lambda x, c: kernels.injections([(None, None)], x, x), "one may be None"),
    (lambda x, c: kernels.injections([], x, x), "1 to 8 pairs"),
    (lambda x, c: kernels.injections([(c[:1], c)], x, x), "each of 8 tokens"),
    (lambda x, c: smear(c, c[None], c[0]), "non-empty"),
    (lambda x, c: smear(x, c, c[0]), "one weight for each column"),
    (lambda x, c: smear(x[:, :7], c[None], c[0]), "7 or fewer"),
    (lambda x, c: smear(x, c[None].half(), c[0]), "torch.float32, not"),
    (lambda x, c: smear(x, c[None], c), "one floating-point number"),
    (lambda x, c: smear(x, c[None].to("meta"), c[0]), "move them there"),
    (lambda x, c: norm_rotary(x, c, c, paired=False, key_offset=False), r"\(T, 2, N, H\)"),
    (lambda x, c: rotated(x, 1, x[:, :4], paired=True), "even number"),
    (lambda x, c: rotated(x, 1, x[:3, :4]), "longer tables"),
    (lambda x, c: rotated(x, 2, x[:3, :4], paired=True), "4 or more"),
    (lambda x, c: rotated(x, 1, x[:, :4], x[:, :4].half()), "cast"),
    (lambda x, c: finish_heads(x, x, c, None), "share one non-empty shape"),
    (lambda x, c: finish_heads(x[None], x[None].half(), c, None), "share one floating-point dtype"),
    (lambda x, c: finish_heads(x[None], x[None], None, None), "not both be None"),
    (lambda x, c: finish_heads(x[None], x[None], c, None), "one number for each head"),
    (lambda x, c: finish_heads(x[None], x[None], c[None].to("meta"), None), "move them there"),
    (lambda x, c: add_values(x, x, x, x), "view them so"),
    (lambda x, c: add_values(x[:, None], x[1:], x, x), "view them so"),
    (lambda x, c: add_values(x[:, None], x, x[1:], x), "one weight for each column"),
    (lambda x, c: add_values(x[:, None], x, x[:, :6], x), "one weight for each column"),
    (lambda x, c: add_values(x.view(8, 4, 4), x, x[:, :5], x[:4, :10]), "W up to 4"),
    (lambda x, c: add_values(x[:, None], x.half(), x[:, :6], x[:1, :12]), "cast and move"),
    (lambda x, c: add_values(x[:, None], x, x[:, :6], x[:1, :12].to("meta")), "cast and move"),
])
def test_refused_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.randn(8, 16), torch.randn(8))


@pytest.mark.parametrize("call", [
    lambda: mix([torch.ones(1)], [torch.ones(2, 2049)], normed=True),
    lambda: mix([torch.ones(1)], [torch.ones(2, 8).double()], normed=True),
    lambda: kernels.injections([(torch.ones(2), None)], *[torch.ones(2, 8).double()] * 2),
    lambda: smear(torch.ones(2, 2049), torch.ones(1, 12), torch.ones(())),
    lambda: smear(torch.ones(2, 8).double(), torch.ones(1, 8).double(), torch.ones(())),
    lambda: norm_rotary(torch.ones(2, 2, 2, 24), *[torch.ones(4, 6)] * 2, paired=False, key_offset=False),
    lambda: finish_heads(*[torch.ones(2, 2, 8)] * 2, torch.ones(2, 2), None),
    lambda: add_values(torch.ones(2, 2, 24), torch.ones(2, 48), torch.ones(2, 6), torch.ones(2, 12)),
    lambda: add_values(torch.ones(2, 33, 64), torch.ones(2, 2112), torch.ones(2, 6), torch.ones(33, 12)),
])
def test_kernels_name_their_limits(call, force_kernels):
    with pytest.raises(ValueError, match="the kernels take .*REFERENCE_OPS=1"):
        call()


# --- compiled ---
@needs_triton
def test_compiled_kernels_fit():
    """No spills, and registers for 16 warps on a multiprocessor, whose loads in flight keep device memory busy. (The
    smear's backward fetches ahead instead: 8 warps with 255 registers were quicker there than 16 with 128.)"""
    for (name, arch), figures in aot_all(AS_LAUNCHED).items():
        assert_fits(figures, arch, max_registers=255 if name == "smear backward" else 128)
        # the pairs of a head and their angles lie in the same threads: no shared memory, no barrier
        assert figures["shared"] == 0 or not name.startswith("norm_rotary"), name
