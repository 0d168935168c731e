"""Row lookups whose gradient goes straight into the tables' gradient buffers."""

import pytest
import torch
from aot_rows import lookup_rows
from kernel_tools import GPU, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import triton_kernels as kernels

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32, torch.float16]
BIG = [(16384, 50304, 768), (30011, 377280, 768)] if GPU else []
SHAPES = [(1, 1, 16), (37, 50, 48), (75, 3, 24), *BIG]  # T, rows of a plane, D


@pytest.fixture(params=[(4, 2), (8, 8)], ids="{0[0]} rows, {0[1]} steps".format)
def tiles(request, monkeypatch):
    """Short spans, over whose borders runs go in every way, and columns in two blocks; spans as launched."""
    rows, steps = request.param
    columns = 256 if GPU else 32
    for name, more in ("gather", dict(ROWS=rows)), ("add", dict(ROWS=rows, STEPS=steps)), ("borders", dict(ROWS=2)):
        monkeypatch.setitem(kernels.LOOKUP_TILES, name, dict(COLUMNS=columns, num_warps=1) | more)


def zipf_rows(T: int, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (rows * torch.rand(T, generator=generator) ** 8).int().clamp(max=rows - 1).to(DEVICE)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def some_signs(T: int, D: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of 9 rows, and each token's row of it."""
    return randn(9, D, seed=7).sign().to(dtype), zipf_rows(T, 9, 8)


def check_sums(rows, V, D, dtype, planes, signs):
    """Against fp64, as good as eager torch, and with the same bits again."""
    T = len(rows)
    signs = some_signs(T, D, dtype) if signs else None
    ds = [randn(T, D + 8 * plane, seed=plane, dtype=dtype)[:, :D] for plane in range(planes)]
    before = [randn(V, D, seed=10 + plane, dtype=dtype) for plane in range(planes)]
    exact, eager, results = [x.double() for x in before], [x.clone() for x in before], []
    kernels.lookup_add_reference(exact, rows, [d.double() for d in ds], signs)
    kernels.lookup_add_reference(eager, rows, ds, signs)
    for _ in range(2):
        results.append([x.clone() for x in before])
        kernels.lookup_add_(results[-1], kernels.lookup_order(rows), ds, signs)
    for plane, values in enumerate(zip(results[0], exact, eager)):
        assert_as_good_as_eager(f"plane {plane}", *values)
    assert all(map(torch.equal, *results)), "the same inputs give the same bits"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_adds_every_row_once(force_kernels, poisoned, tiles, shape, dtype):
    T, V, D = shape
    planes, signs = (1, True) if dtype == torch.float32 else (2, False)
    check_sums(zipf_rows(T, V, 1), V, D, dtype, planes, signs)


@pytest.mark.parametrize("lengths", [[1] * 40, [8] * 5, [7, 9, 8, 16, 1, 15], [17, 23], [3, 5, 32, 1, 7], [4] * 10])
def test_runs_may_end_anywhere(force_kernels, poisoned, tiles, lengths):
    """On the borders of spans, one beside them, over several; positions in no order."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).int()
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    check_sums(rows.to(DEVICE), len(lengths), 24, torch.float32, 1, False)


@pytest.mark.parametrize("signs", [False, True], ids=["plain", "signs"])
@pytest.mark.parametrize("rows_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_is_the_reference_to_the_bit(force_kernels, poisoned, tiles, shape, rows_dtype, signs):
    T, V, D = shape
    rows, signs = zipf_rows(T, V, 3).to(rows_dtype), some_signs(T, D, DTYPES[-1]) if signs else None
    tables = list(randn(3 * V, D, seed=4, dtype=DTYPES[-1]).chunk(3))
    got, want = (op(rows, tables, signs) for op in (kernels.lookup_gather, kernels.lookup_gather_reference))
    assert all(map(torch.equal, got, want)) and all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("signed", [False, True], ids=["plain", "signs"])
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_gradients_of_planes_accumulate(monkeypatch, kernel, signed):
    """Two tables of one and three planes, looked up twice: values, and gradients added to what is there."""
    if kernel and kernels.triton is None:
        pytest.skip("Triton is not installed here")
    monkeypatch.setattr(kernels, "FORCE_KERNELS", kernel)
    rows, V, D, T = zipf_rows(70, 11, 2), 11, 32, 70
    signs = some_signs(T, D) if signed else None
    factor = signs[0][signs[1].long()].double() if signed else 1
    tables = [randn(n * V, D, seed=n).requires_grad_() for n in (1, 3)]
    twins = [t.detach().double().requires_grad_() for t in tables]
    weights = randn(4, T, D, seed=5)
    for _ in range(2):
        streams = kernels.lookup(rows, tables, [1, 3], signs)
        (torch.stack(streams) * weights).sum().backward()
        plain = [factor * x for x in (twins[0][rows.long()], *twins[1].view(3, V, D)[:, rows.long()])]
        (torch.stack(plain) * weights.double()).sum().backward()
    for stream, expected in zip(streams, plain):
        assert torch.equal(stream.double(), expected)
    for table, twin in zip(tables, twins):
        torch.testing.assert_close(table.grad.double(), twin.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_unused_streams_get_no_gradient(monkeypatch, kernel):
    if kernel and kernels.triton is None:
        pytest.skip("Triton is not installed here")
    monkeypatch.setattr(kernels, "FORCE_KERNELS", kernel)
    table = torch.randn(6, 4, device=DEVICE).requires_grad_()
    first, _ = kernels.lookup(torch.tensor([0, 2, 2], device=DEVICE), [table], [2])
    first.sum().backward()
    assert table.grad[:3].sum(1).tolist() == [4.0, 0.0, 8.0] and not table.grad[3:].any()


@pytest.mark.parametrize(
    ("rows", "planes", "told"),
    [
        (torch.zeros(3, dtype=torch.int32), [4], "whole planes"),
        (torch.zeros(3, dtype=torch.int32), [0], "whole planes"),
        (torch.zeros(3, dtype=torch.int32), [2.0], "whole planes"),
        (torch.zeros(3, dtype=torch.int32), [], "whole planes"),
        (torch.zeros(3, dtype=torch.int32, device="meta"), [2], "move them there"),
        (torch.zeros(3), [2], "int32 or int64"),
        (torch.zeros(3, 1, dtype=torch.int32), [2], "int32 or int64"),
    ],
)
def test_refusals(rows, planes, told):
    with pytest.raises(ValueError, match=told):
        kernels.lookup(rows, [torch.zeros(6, 4, requires_grad=True)], planes)


def test_only_leaves_are_looked_up():
    with pytest.raises(ValueError, match="leaf"):
        kernels.lookup(torch.zeros(3, dtype=torch.int32), [torch.zeros(6, 4, requires_grad=True) * 2], [1])


def test_sums_need_rows_that_fit():
    order = kernels.lookup_order(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"d must be \(3, 4\)"):
        kernels.lookup_add_([torch.zeros(6, 4)], order, [torch.zeros(3, 5)])
    with pytest.raises(ValueError, match="gradient buffer must be contiguous"):
        kernels.lookup_add_([torch.zeros(4, 6).T], order, [torch.zeros(3, 4)])
    with pytest.raises(ValueError, match="move them there"):
        kernels.lookup_add_([torch.zeros(6, 4)], order, [torch.zeros(3, 4, device="meta")])


@pytest.mark.parametrize("second", [torch.zeros(6, 5), torch.zeros(6, 4).double(), torch.zeros(4, 6).T])
def test_tables_are_alike(second):
    tables = [torch.zeros(6, 4, requires_grad=True), second.requires_grad_()]
    with pytest.raises(ValueError, match="contiguous, of one width and dtype"):
        kernels.lookup(torch.zeros(3, dtype=torch.int32), tables, [1, 1])


@pytest.mark.parametrize("signs", [(torch.ones(2, 5), torch.zeros(3)), (torch.ones(2, 4), torch.zeros(2))])
def test_every_token_needs_its_signs(signs):
    rows, table = torch.zeros(3, dtype=torch.int32), torch.zeros(6, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"signs must be .*rows, 4.* and \(3,\) rows of it"):
        kernels.lookup(rows, [table], [1], (signs[0], signs[1].int()))


@needs_triton
def test_compiles_ahead_of_time():
    """Registers for 11 warps on a multiprocessor, each with 8 rows of d, and as many to add to and of signs, under way
    at a time: 8 x 512 bytes of d alone are twice what hides the memory's latency."""
    for (name, arch), figures in aot_all(list(lookup_rows())).items():
        assert_fits(figures, arch, max_registers=184)
        assert figures["shared"] == 0, f"{name}: whole columns lie in one thread"
