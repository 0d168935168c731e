"""Row lookups whose gradient goes straight into the tables' gradient buffers."""

import pytest
import torch
from aot_rows import lookup_rows
from kernel_tools import GPU, aot_all, assert_as_good_as_eager, assert_fits, needs_triton

import triton_kernels as kernels

DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if GPU else [torch.float32, torch.float16]
# T, rows of a plane, D; the last one holds runs far longer than one program sums
SHAPES = [(1, 1, 16), (37, 50, 48), (200, 3, 96), (300, 1, 40)] + ([(16384, 50304, 768)] if GPU else [])


def zipf_rows(T: int, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (rows * torch.rand(T, generator=generator) ** 8).int().clamp(max=rows - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_adds_every_row_once(force_kernels, poisoned, shape, dtype):
    T, V, D = shape
    generator = torch.Generator().manual_seed(0)
    rows = zipf_rows(T, V, 1).to(DEVICE)
    d = torch.randn(T, D, generator=generator).to(DEVICE, dtype)
    before = torch.randn(V, D, generator=generator).to(DEVICE, dtype)
    exact = before.double().index_add(0, rows.long(), d.double())
    eager = before.clone().index_add(0, rows.long(), d)
    order = kernels.lookup_order(rows)
    results = []
    for _ in range(2):
        got = before.clone()
        kernels.lookup_add_(got, order, d)
        results.append(got)
    assert_as_good_as_eager("grad", results[0], exact, eager)
    assert torch.equal(*results), "the same inputs give the same bits"


@pytest.mark.parametrize("kernel", [False, True])
def test_gradients_of_planes_accumulate(monkeypatch, kernel):
    """Two tables of one and three planes, looked up twice: values, and gradients added to what is there."""
    monkeypatch.setattr(kernels, "FORCE_KERNELS", kernel)
    generator = torch.Generator().manual_seed(0)
    rows, V, D, T = zipf_rows(70, 11, 2).to(DEVICE), 11, 32, 70
    tables = [torch.randn(n * V, D, generator=generator).to(DEVICE).requires_grad_() for n in (1, 3)]
    twins = [t.detach().double().requires_grad_() for t in tables]
    weights = torch.randn(4, T, D, generator=generator).to(DEVICE)
    for _ in range(2):
        streams = kernels.lookup(rows, tables, [1, 3])
        (torch.stack(streams) * weights).sum().backward()
        plain = [twins[0][rows.long()], *(twins[1].view(3, V, D)[:, rows.long()])]
        (torch.stack(plain) * weights.double()).sum().backward()
    for stream, expected in zip(streams, plain):
        assert torch.equal(stream.double(), expected)
    for table, twin in zip(tables, twins):
        torch.testing.assert_close(table.grad.double(), twin.grad, rtol=1e-5, atol=1e-5)


def test_unused_streams_get_no_gradient():
    table = torch.randn(6, 4, device=DEVICE).requires_grad_()
    first, _ = kernels.lookup(torch.tensor([0, 2, 2], device=DEVICE), [table], [2])
    first.sum().backward()
    assert table.grad[:3].sum(1).tolist() == [4.0, 0.0, 8.0] and not table.grad[3:].any()


@pytest.mark.parametrize(
    ("rows", "planes", "told"),
    [
        (torch.zeros(3, dtype=torch.int32), [4], "whole planes"),
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
        kernels.lookup_add_(torch.zeros(6, 4), order, torch.zeros(3, 5))
    with pytest.raises(ValueError, match="gradient buffer must be contiguous"):
        kernels.lookup_add_(torch.zeros(4, 6).T, order, torch.zeros(3, 4))


@needs_triton
def test_compiles_ahead_of_time():
    for (_, arch), figures in aot_all(list(lookup_rows())).items():
        assert_fits(figures, arch, max_registers=64)
