"""Gates: the reference against the formula, kernels against fp64, gradients in place and by autograd, figures."""
import math
from functools import partial

import pytest
import torch
from aot_rows import gates_rows
from kernel_tools import DTYPES, GPU, LOW, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import train_gpt
import triton_kernels as kernels
from triton_kernels import GATES_TILES, gates, gates_reference

pytestmark = pytest.mark.usefixtures("poisoned")
AS_LAUNCHED = list(gates_rows()) if kernels.triton else []  # now, for the tests change the table
NAMES = "x", "w1", "w2", "b2", "scale"


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Interpreted, few tokens must do: tiles of 32 of them, each program walks several, sums of two programs meet."""
    if not GPU:
        for name, tiles in GATES_TILES.items():
            changes = dict(ROWS=32, BLOCK_D=32) | ({"WAVES": 1} if "WAVES" in tiles else {})
            monkeypatch.setitem(GATES_TILES, name, tiles | (dict(BLOCK=128) if name == "sums" else changes))


def randn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def inputs_of(T, L, D=48, F=64, dtype=torch.float64, device="cpu"):
    """x (a slice of wider rows), w1, w2 and b2 (the leading lanes of more), all of size one; the gates' weights."""
    make = partial(randn, dtype=dtype, device=device)
    x, w1 = make(T, D + 16)[:, :D], (randn(F, D, seed=1) / D**0.5).to(device, dtype)
    w2, b2 = (randn(L + 3, F, seed=2) / F**0.5).to(device, dtype)[:L], make(L + 3, seed=3)[:L]
    return [x, w1, w2, b2], randn(T, L, seed=4, device=device).bfloat16().half()  # exact in every dtype


def run(op, inputs, weights, scale, dtype=None, grads=(None,) * 4, frozen=()):
    """Gates, then the gradients of every input and of the scale, None where there is none."""
    leaves = [x.detach().requires_grad_(i not in frozen) for i, x in enumerate([*inputs, scale])
              if isinstance(x, torch.Tensor)]
    out = op(*leaves[:4], leaves[4] if len(leaves) > 4 else scale, dtype, *([grads] if op is gates else []))
    out.backward(weights.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def formula(x, w1, w2, b2, scale, dtype=None):
    h = x @ w1.T
    return ((h * (1 + torch.erf(h / math.sqrt(2))) / 2) @ w2.T + b2) * scale


@pytest.mark.parametrize("scale", [0.1, torch.tensor(0.3, dtype=torch.float64)], ids=["number", "learned"])
def test_reference_is_the_formula(scale, force_kernels):
    """In fp64 `gates` is the reference, kernels wanted or not."""
    inputs, weights = inputs_of(7, 5)
    for got, want in zip(*(run(op, inputs, weights, scale) for op in (gates, formula)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def assert_kernels_match(inputs, weights, scale, dtype=None):
    """Gates and gradients against fp64, no further from it than the reference in the same low precision. The scale's
    gradient is one sum over everything: a luckily exact one is no bound, so its terms' sizes are."""
    got, eager = (run(op, inputs, weights, scale, dtype) for op in (gates, gates_reference))
    wide = [x.double() for x in inputs]
    number = scale.to(inputs[0].dtype).double() if isinstance(scale, torch.Tensor) else scale  # rounded, as both do
    exact = run(gates_reference, wide, weights, number)
    assert got[0].dtype == eager[0].dtype == (dtype or inputs[0].dtype)
    for name, *values, x in zip(("gates", *NAMES[:4]), got, exact, eager, [got[0], *inputs]):
        assert values[0].dtype == x.dtype
        assert_as_good_as_eager(name, *values)
    if len(exact) > 5:
        each = weights.double() * gates_reference(*wide, 1.0)
        assert got[5].dtype == scale.dtype and got[5].shape == scale.shape
        assert abs(got[5].double() - exact[5]).item() <= 4 * torch.finfo(LOW).eps * each.norm().item()
    again = run(gates, inputs, weights, scale, dtype)
    assert all(torch.equal(a, b) for a, b in zip(got, again))


def learned(number, device):
    return torch.tensor(number, dtype=torch.float32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, L, D, F", [
    (1, 26, 768, 64), (33, 41, 768, 64), (16384, 41, 768, 64), (49153, 26, 768, 64), (4099, 83, 768, 64),
    (4099, 128, 256, 16),
] if GPU else [
    (1, 26, 48, 64), (33, 41, 48, 64), (130, 5, 48, 64), (130, 83, 16, 64), (33, 14, 80, 16), (130, 1, 32, 32),
])
def test_kernels_match(T, L, D, F, dtype, device, force_kernels):
    inputs, weights = inputs_of(T, L, D, F, dtype, device)
    assert_kernels_match(inputs, weights, learned(0.3, device))


@pytest.mark.parametrize("out", [None, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.1, 1, "learned"])
def test_scales_and_dtypes(scale, out, device, force_kernels):
    inputs, weights = inputs_of(70, 14, dtype=LOW, device=device)
    assert_kernels_match(inputs, weights, learned(0.1, device) if scale == "learned" else scale, out)


def test_a_scale_of_zero_learns(device, force_kernels):
    inputs, weights = inputs_of(40, 5, dtype=LOW, device=device)
    scale = learned(0.0, device)
    out, *grads, dscale = run(gates, inputs, weights, scale)
    assert not out.any() and not any(g.any() for g in grads) and dscale != 0
    assert_kernels_match(inputs, weights, scale)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (4,), (0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4)])
def test_gradients_that_are_not_wanted(frozen, device, force_kernels):
    inputs, weights = inputs_of(40, 5, dtype=LOW, device=device)
    scale = learned(0.5, device)
    want = run(gates, inputs, weights, scale)
    buffers = [torch.zeros_like(x) for x in (*inputs[1:], scale)]
    for grads in (None,) * 4, buffers:
        for i, (got, full) in enumerate(zip(run(gates, inputs, weights, scale, None, grads, frozen)[1:], want[1:])):
            given = grads[0] is not None and i > 0
            assert got is None if i in frozen or given else torch.equal(got, full), NAMES[i]
    for i, buffer in enumerate(buffers, 1):
        assert torch.equal(buffer, torch.zeros_like(buffer) if i in frozen else want[i + 1]), NAMES[i]


def test_gradients_added_in_place(device, force_kernels):
    """Views of larger buffers, of which the rest stays; autograd gets none of them, and x's is the same."""
    inputs, weights = inputs_of(70, 41, dtype=LOW, device=device)
    scale = learned(0.3, device)
    plain = run(gates, inputs, weights, scale)
    exact = run(gates_reference, [x.double() for x in inputs], weights, scale.to(LOW).double())
    start = [randn(2, *shape, seed=9 + i, dtype=dtype, device=device)
             for i, (shape, dtype) in enumerate((((64, 48), LOW), ((44, 64), LOW), ((44,), LOW), ((), torch.float32)))]
    wide = [s.clone() for s in start]
    pick = [(1,), (1, slice(41)), (1, slice(41)), (1,)]
    left = run(gates, inputs, weights, scale, None, [w[at] for w, at in zip(wide, pick)])
    assert torch.equal(left[0], plain[0]) and torch.equal(left[1], plain[1]) and left[2:] == [None] * 4
    for name, got, s, at, p, e in zip(NAMES[1:], wide, start, pick, plain[2:], exact[2:]):
        assert_as_good_as_eager(f"{name} added", got[at], s[at].double() + e, s[at] + p)
        assert torch.equal(got[0], s[0]) and torch.equal(got[1][len(p):] if p.dim() else got[0],
                                                         s[1][len(p):] if p.dim() else s[0])


def test_gradient_scales_with_the_incoming_one(device, force_kernels):
    inputs, weights = inputs_of(40, 26, dtype=LOW if GPU else torch.float32, device=device)
    once, twice = (run(gates, inputs, s * weights, learned(0.3, device))[1:] for s in (1, 2))
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice))


def test_gelu_and_its_slope(device, force_kernels):
    """One hidden unit from -9 to 9: the gates are its gelu, x's gradient the slope."""
    x = torch.zeros(2049, 16, device=device)
    x[:, 0] = torch.linspace(-9, 9, 2049)
    one = torch.zeros(16, 16, device=device)
    one[0, 0] = 1
    value, dx = run(gates, [x, one, one, torch.zeros(16, device=device)], torch.ones(2049, 16, device=device), 1.0)[:2]
    h = x[:, 0].double().requires_grad_()
    exact = torch.nn.functional.gelu(h)
    exact.sum().backward()
    assert (value[:, 0] - exact).abs().max() < 1e-6 and (dx[:, 0] - h.grad).abs().max() < 5e-7


@pytest.mark.parametrize("T, L, D, F", [(0, 5, 48, 64), (9, 5, 40, 64), (9, 5, 48, 24), (9, 129, 48, 64)])
def test_other_sizes_go_to_the_reference(T, L, D, F, device, force_kernels, monkeypatch):
    monkeypatch.setattr(kernels, "gates_forward", None)
    inputs, weights = inputs_of(T, L, D, F, LOW, device)
    got, want = (run(op, inputs, weights, 0.1) for op in (gates, gates_reference))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.no_poison
def test_operators_are_registered_right(device, force_kernels):
    """Fake results agree with real ones in shape, dtype and stride; only what is said to be written to is."""
    ops, rules = torch.ops.speedrun, ("test_schema", "test_autograd_registration", "test_faketensor")
    check = partial(torch.library.opcheck, test_utils=rules)
    inputs, weights = inputs_of(40, 5, dtype=LOW, device=device)
    for scale in learned(0.3, device), None:
        for out in LOW, torch.float32:
            check(ops.gates_forward, (*inputs, scale, 0.1, out))
        _, hidden = kernels.gates_forward(*inputs, scale, 0.1, LOW)
        for needs_x in True, False:
            check(ops.gates_backward, (weights.to(LOW), hidden, *inputs[1:], scale, 0.1, needs_x))
    sums = kernels.gates_backward(weights.to(LOW), hidden, *inputs[1:], None, 0.1, False)[2]
    w2, b2 = (x.clone() for x in inputs[2:])
    for targets in (w2, b2, learned(0.0, device)), (None, b2, None):
        check(ops.gates_sums_, (sums, 5, *targets))


@pytest.mark.no_poison
def test_compiles_whole(device, force_kernels):
    inputs, weights = inputs_of(40, 5, dtype=LOW, device=device)
    compiled = torch.compile(gates, fullgraph=True, backend="aot_eager")
    leaves = [x.detach().requires_grad_() for x in (*inputs, learned(0.3, device))]
    grads = torch.autograd.grad(compiled(*leaves), leaves, weights.to(LOW))
    assert all(map(torch.equal, grads, run(gates, inputs, weights, learned(0.3, device))[1:]))


@pytest.mark.parametrize("change, words", [
    (dict(x=(2, 3, 16)), "flatten x's leading dimensions"),
    (dict(w1=(16, 32)), "w1 \\(F, D\\)"),
    (dict(w2=(6, 16)), "as many lanes of both"),
    (dict(b2=(5, 1)), "as many lanes of both"),
    (dict(scale=(2,)), "one element"),
    (dict(scale=(1, 1, 1)), "one element"),
])
def test_refused_in_a_sentence(change, words):
    shapes = dict(x=(3, 16), w1=(16, 16), w2=(5, 16), b2=(5,), scale=()) | change
    with pytest.raises(ValueError, match=words):
        gates(*(torch.ones(shapes[name]) for name in NAMES))


@pytest.mark.parametrize("which, change, words", [
    (0, lambda x: x.half(), "one floating-point dtype"),
    (1, lambda x: x.int(), "one floating-point dtype"),
    (4, lambda x: x.int(), "floating-point tensor of one element"),
])
def test_refuses_dtypes(which, change, words):
    tensors = [torch.ones(shape) for shape in ((3, 16), (16, 16), (5, 16), (5,), ())]
    tensors[which] = change(tensors[which])
    with pytest.raises(ValueError, match=words):
        gates(*tensors)


@pytest.mark.parametrize("which", range(1, 5))
def test_refuses_other_devices_and_results(which):
    tensors = [torch.ones(shape) for shape in ((3, 16), (16, 16), (5, 16), (5,), ())]
    with pytest.raises(ValueError, match="dtype must be a floating-point one, not torch.int32"):
        gates(*tensors, dtype=torch.int32)
    tensors[which] = tensors[which].to("meta")
    with pytest.raises(ValueError, match="move them there"):
        gates(*tensors)


@pytest.mark.parametrize("grads", [
    [None] * 3, [torch.ones(16, 8), None, None, None], [torch.ones(16, 32)[:, ::2], None, None, None],
    [None, None, None, torch.ones(())],
], ids=["three", "shape", "strides", "of a number"])
def test_refuses_gradients(grads, device, force_kernels):
    tensors = [torch.ones(shape, device=device, dtype=LOW) for shape in ((3, 16), (16, 16), (5, 16), (5,))]
    with pytest.raises(ValueError, match="give None for autograd"):
        gates(*tensors, 0.1, None, grads)


def test_lanes_of_the_model(device, force_kernels):
    """gate_lanes adds a block's gradients in place where parameters have some, else hands them to autograd."""
    lanes = [train_gpt.Lane("a", 0, 2, 0.0), train_gpt.Lane("b", 0, 3, 0.0)]
    inputs, weights = inputs_of(40, 5, dtype=LOW, device=device)
    want = run(gates, inputs, weights, learned(0.3, device))
    for held in False, True:
        mlp = [torch.nn.Parameter(torch.stack((torch.zeros_like(x), x))) for x in inputs[1:]]
        scale = torch.nn.Parameter(learned(0.3, device))
        for p in (*mlp, scale) if held else ():
            p.grad = torch.zeros_like(p)
        buffers = [p.grad for p in (*mlp, scale)]
        parts = train_gpt.lane_values(inputs[0], lanes, mlp, 1, scale, LOW)
        assert torch.equal(torch.cat(parts, 1), want[0]) and [part.shape[1] for part in parts] == [2, 3]
        torch.autograd.backward(parts, weights.to(LOW).split([2, 3], dim=1))
        for p, buffer, g in zip((*mlp, scale), buffers, want[2:]):
            assert torch.equal(p.grad[1] if p is not scale else p.grad, g) and (not held or p.grad is buffer)
            assert p is scale or not p.grad[0].any()


# --- compiled ---
@needs_triton
def test_compiled_kernels_fit():
    for (_, arch), figures in aot_all(AS_LAUNCHED).items():
        assert_fits(figures, arch)
        assert figures["shared"] <= 99 << 10  # of the smallest card
