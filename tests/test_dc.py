"""Windowed DC correction: the banded reference against dense formulas, the kernels against fp64, the public surface."""
import pytest
import torch
from aot_rows import dc_rows
from kernel_tools import DTYPES, GPU, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import dc_triton_kernels as dc
import triton_kernels as kernels
from dc_triton_kernels import dc_correction, dc_correction_reference

pytestmark = pytest.mark.usefixtures("poisoned")
NAMES = ("q", "k", "v", "w1", "w2", "base")
# name: (tokens, heads, head dim, window, document boundaries)
CASES = {
    "one token": (1, 2, 16, 112, [0, 1]),
    "one-token documents": (67, 3, 16, 112, [0, 1, 2, 3, 66, 67]),
    "document of the window, and one more": (100, 2, 32, 20, [0, 20, 41, 100]),
    "empty documents": (130, 1, 16, 128, [0, 0, 64, 64, 64, 129, 130, 130, 130]),
    "longer than the window": (330, 2, 16, 112, [0, 310, 330]),
    "window of one": (65, 2, 16, 1, [0, 65]),
    "window past the length": (40, 6, 16, 128, [0, 40]),
    "many boundaries": (200, 1, 16, 112, [*range(0, 200), *[200] * 5]),
    "widest window with 64 keys on the left": (150, 1, 16, 65, [0, 150]),
    "narrowest with 128": (150, 1, 16, 66, [0, 150]),
    "wide heads": (130, 2, 128, 112, [0, 70, 130]),
}
if GPU:
    CASES["training shape"] = (4096, 6, 128, 112, [0, 1, 500, 501, 2300, 4000, *[4096] * 58])
    CASES["64 wide"] = (1000, 12, 64, 128, [0, 999, 1000])


def dense_dc(q, k, v, w1, w2, base, cu_seqlens, *, scale, window):
    """The definition, head by head over the full T x T map, in its inputs' own dtype."""
    T, N = w1.shape
    document = sum((torch.arange(T) >= b).long() for b in cu_seqlens.tolist()).to(q.device)
    age = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    valid = (document[:, None] == document) & (age >= 0) & (age < window)
    mixed = 0
    for h in range(N):
        scores = scale * (q[:, h] @ k[:, h].T)
        mixed = mixed + w1[:, h, None] * scores.masked_fill(~valid, float("-inf")).softmax(-1)
    return torch.stack([base[:, h] + w2[:, h, None] * (mixed @ v[:, h]) for h in range(N)], 1)


def make(case, dtype, device, seed=0):
    """Inputs by name, boundaries, and the rest of the arguments."""
    T, N, H, window, boundaries = CASES[case]
    gen = torch.Generator().manual_seed(seed)
    shapes = [(T, N, H)] * 3 + [(T, N)] * 2 + [(T, N, H)]
    inputs = {n: torch.randn(s, generator=gen).to(device, dtype).requires_grad_() for n, s in zip(NAMES, shapes)}
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=device)
    return inputs, cu_seqlens, dict(scale=1.5 * H**-0.5, window=window)


def outputs_and_grads(fn, inputs, cu_seqlens, options, dtype=None, seed=1):
    """y and every gradient under a random incoming one, by name."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs.values()]
    y = fn(*leaves, cu_seqlens, **options)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.device, inputs["q"].dtype)
    grads = torch.autograd.grad(y, leaves, g.to(y.dtype))
    return {"y": y, **{f"d{n}": g for n, g in zip(NAMES, grads)}}


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_definition(case, device):
    inputs, cu_seqlens, options = make(case, torch.float64, device)
    got = outputs_and_grads(dc_correction_reference, inputs, cu_seqlens, options)
    for name, exact in outputs_and_grads(dense_dc, inputs, cu_seqlens, options).items():
        assert (got[name] - exact).abs().max() <= 1e-12 * exact.abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels(case, dtype, device, force_kernels):
    inputs, cu_seqlens, options = make(case, dtype, device)
    got = outputs_and_grads(dc_correction, inputs, cu_seqlens, options)
    exact = outputs_and_grads(dense_dc, inputs, cu_seqlens, options, dtype=torch.float64)
    eager = outputs_and_grads(dense_dc, inputs, cu_seqlens, options)
    for name in got:
        assert got[name].dtype == dtype and got[name].is_contiguous()
        assert_as_good_as_eager(f"{case}, {name}", got[name], exact[name], eager[name])


def test_kernels_of_cards_without_a_copy_engine(device, force_kernels, monkeypatch):
    """The second row of the table: smaller blocks, plain pointers."""
    monkeypatch.setattr(dc, "card_of", lambda device: ("small", 1))
    inputs, cu_seqlens, options = make("longer than the window", DTYPES[0], device)
    got = outputs_and_grads(dc_correction, inputs, cu_seqlens, options)
    exact = outputs_and_grads(dense_dc, inputs, cu_seqlens, options, dtype=torch.float64)
    eager = outputs_and_grads(dense_dc, inputs, cu_seqlens, options)
    for name in got:
        assert_as_good_as_eager(name, got[name], exact[name], eager[name])


def packed_qkv(x):
    return torch.stack([x, x, x], 1)[:, 1]  # (T, N, H) with gaps between tokens


def heads_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)  # heads not adjacent: must be copied


def shifted(x):
    return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)  # off the copy engine's 16 bytes


def lanes(x):
    return torch.cat([x.new_zeros(len(x), 5, *x.shape[2:]), x], 1)[:, 5:]  # a slice of a wider gate output


@pytest.mark.parametrize("card", ["large"] if GPU else ["large", "small"])
@pytest.mark.parametrize("layout", [packed_qkv, heads_first, shifted, lanes])
def test_layouts(layout, card, device, force_kernels, monkeypatch):
    """Any strides, of inputs and of the incoming gradient, give the same bits as contiguous tensors."""
    monkeypatch.setattr(dc, "card_of", lambda device: (card, 1))
    inputs, cu_seqlens, options = make("document of the window, and one more", DTYPES[0], device)
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    expected = dc_correction(*leaves, cu_seqlens, **options)
    y = dc_correction(*(layout(x) for x in leaves), cu_seqlens, **options)
    assert torch.equal(y, expected)
    g = torch.randn_like(y)
    for got, exact in zip(torch.autograd.grad(layout(y), leaves, layout(g)), torch.autograd.grad(expected, leaves, g)):
        assert torch.equal(got, exact)


def test_gradients_follow_the_incoming_one(device, force_kernels):
    """Twice the gradient, twice the gradients, bit for bit; an expanded one of ones counts like a dense one."""
    inputs, cu_seqlens, options = make("one-token documents", DTYPES[0], device)
    leaves = list(inputs.values())
    y = dc_correction(*leaves, cu_seqlens, **options)
    once, twice, summed = (torch.autograd.grad(loss, leaves, retain_graph=True)
                           for loss in ((y * torch.ones_like(y)).sum(), (2 * y).sum(), y.sum()))
    for name, a, b, c in zip(NAMES, once, twice, summed):
        assert a.abs().max() > 0 or name in "qk", name
        assert torch.equal(2 * a, b) and torch.equal(a, c), name


def test_zero_w2_leaves_base_alone(device, force_kernels):
    """At initialisation w2 is zero: y is base to the bit, and only w2 and base receive gradient."""
    inputs, cu_seqlens, options = make("longer than the window", DTYPES[0], device)
    inputs["w2"] = torch.zeros_like(inputs["w2"]).requires_grad_()
    got = outputs_and_grads(dc_correction, inputs, cu_seqlens, options)
    assert torch.equal(got["y"], inputs["base"])
    assert {n for n, x in got.items() if x.abs().max() > 0} == {"y", "dw2", "dbase"}


def test_repeatable_and_blind_to_other_documents(device, force_kernels):
    inputs, cu_seqlens, options = make("longer than the window", DTYPES[0], device)
    first, second = (outputs_and_grads(dc_correction, inputs, cu_seqlens, options) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    changed = {n: torch.cat([x[:310], x[310:] + 1]).detach().requires_grad_() for n, x in inputs.items()}
    other = outputs_and_grads(dc_correction, changed, cu_seqlens, options)
    assert all(torch.equal(first[n][:310], other[n][:310]) for n in first)
    assert not torch.equal(first["y"][310:], other["y"][310:])


def test_reference_in_low_precision(device):
    inputs, cu_seqlens, options = make("empty documents", torch.bfloat16, device)
    exact = outputs_and_grads(dense_dc, inputs, cu_seqlens, options, dtype=torch.float64)
    eager = outputs_and_grads(dense_dc, inputs, cu_seqlens, options)
    got = outputs_and_grads(dc_correction_reference, inputs, cu_seqlens, options)
    for name in got:
        assert got[name].dtype == torch.bfloat16
        assert_as_good_as_eager(name, got[name], exact[name], eager[name])


def test_dispatch(device, monkeypatch, force_kernels):
    """fp64 works everywhere; without the switch a CPU tensor takes the reference, which takes any window and head."""
    inputs, cu_seqlens, options = make("one-token documents", torch.float32, device)
    called = []
    monkeypatch.setattr(dc, "dc_correction_reference", lambda *args, **kw: called.append(kw) or args[5])
    dc_correction(*inputs.values(), cu_seqlens, **options)
    assert bool(called) == GPU  # fp32 has no tensor cores there
    monkeypatch.setattr(kernels, "FORCE_KERNELS", False)
    monkeypatch.setattr(kernels, "REFERENCE_OPS", True)
    called.clear()
    dc_correction(*inputs.values(), cu_seqlens, **options | {"window": 500})
    assert called == [{"scale": options["scale"], "window": 500}]


@pytest.mark.parametrize("change, words", [
    (dict(q=lambda x: x[0]), "one non-empty shape"),
    (dict(k=lambda x: x[1:]), "one non-empty shape"),
    (dict(base=lambda x: x.flatten(1)), "one non-empty shape"),
    ({n: lambda x: x[:0] for n in NAMES}, "one non-empty shape"),
    (dict(w1=lambda x: x[:, :1]), "one weight a head"),
    (dict(w2=lambda x: x.half()), "one floating-point dtype"),
    ({n: lambda x: x.long() for n in NAMES}, "one floating-point dtype"),
    (dict(cu_seqlens=lambda x: x.long()), "int32"),
    (dict(cu_seqlens=lambda x: x[:1]), "S >= 2"),
    (dict(v=lambda x: x.to("meta")), "move them there"),
    (dict(window=lambda x: 0), "at least 1"),
    (dict(window=lambda x: 129), "up to 128"),
    ({n: lambda x: x.repeat(1, 1, 9)[..., :130] for n in ("q", "k", "v", "base")}, "heads of 16"),
    ({n: lambda x: x[..., :8] for n in ("q", "k", "v", "base")}, "heads of 16"),
    ({n: lambda x: x[..., :10].repeat(1, 1, 2) for n in ("q", "k", "v", "base")}, "heads of 16"),
])
def test_errors(change, words, device, force_kernels):
    inputs, cu_seqlens, options = make("one-token documents", torch.bfloat16, device)
    arguments = {n: x.detach() for n, x in inputs.items()} | options | {"cu_seqlens": cu_seqlens}
    for name, fn in change.items():
        arguments[name] = fn(arguments[name])
    with pytest.raises(ValueError, match=words):
        dc_correction(**arguments)


@pytest.mark.no_poison
def test_traces_whole(device, force_kernels):
    """torch.compile sees the kernels as two opaque ops: no graph break, same bits, forward and backward."""
    inputs, cu_seqlens, options = make("longer than the window", DTYPES[0], device)
    compiled = torch.compile(lambda *x: dc_correction(*x, **options) * 2, fullgraph=True, backend="aot_eager")
    got = outputs_and_grads(lambda *x, **_: compiled(*x), inputs, cu_seqlens, options)
    expected = outputs_and_grads(lambda *x, **kw: dc_correction(*x, **kw) * 2, inputs, cu_seqlens, options)
    assert all(torch.equal(got[n], expected[n]) for n in expected)


@needs_triton
def test_compiled_kernels_fit():
    """Every kernel compiles for every card without spills, within its shared memory."""
    for (_, arch), figures in aot_all(dc_rows()).items():
        assert_fits(figures, arch)
