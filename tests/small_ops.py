"""All kernels once each, forward and backward, at sizes small enough for a memory checker.

    compute-sanitizer --tool memcheck python tests/small_ops.py attention dc
    compute-sanitizer --tool racecheck python tests/small_ops.py head-fp8

Set PYTORCH_NO_CUDA_MEMORY_CACHING=1 for memcheck, so that every tensor is an allocation of its own. Inputs come from
the CPU: what runs on the GPU is, as far as possible, the kernels.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import triton_kernels as kernels  # noqa: E402
from dc_triton_kernels import dc_correction  # noqa: E402

BOUNDARIES = {  # of 203 tokens
    "documents": [0, 1, 2, 70, 71, 198, 203, 203, 203],  # of one token, longer than windows, none at all
    "one-token documents": [*range(204), 203, 203],
    "one document": [0, 203],
}


def randn(device: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (scale * torch.randn(shape)).to(dtype).to(device)


def backward(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y.dtype).to(y.device))]


def leaves(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [randn(device, *shape).requires_grad_() for shape in shapes]


def attention(device: str, paired: bool, running_max: bool) -> list[torch.Tensor]:
    """Every document layout, windows below, at and beyond the tiles, both head dims; v read again with running_max."""
    made = []
    for heads, width in (2, 128), (4, 64):
        for boundaries in BOUNDARIES.values():
            for window in 0, 40, 128, 1000:
                q, k, v = leaves(device, *[(203, heads, width)] * 3)
                cu_seqlens = torch.tensor(boundaries, dtype=torch.int32).to(device)
                promise = {} if running_max else {"max_logit": 20.0}
                options = dict(window=window, scale=0.1, paired=paired, share=running_max, **promise)
                y = kernels.attention(q, k, v, cu_seqlens, **options)
                made += backward(sum(y) if running_max else y, [q, k, v])
    return made


def dc(device: str) -> list[torch.Tensor]:
    made = []
    for (heads, width), window in (((6, 128), 112), ((3, 64), 128), ((2, 128), 20)):
        for boundaries in BOUNDARIES.values():
            rows, weights = (203, heads, width), (203, heads)
            inputs = leaves(device, rows, rows, rows, weights, weights, rows)
            cu_seqlens = torch.tensor(boundaries, dtype=torch.int32).to(device)
            made += backward(dc_correction(*inputs, cu_seqlens, scale=0.1, window=window), inputs)
    return made


def head(device: str, fp8: bool) -> list[torch.Tensor]:
    """Rows that fill no tile, missing targets, one and three targets a token."""
    made = []
    for T, D, V in (203, 128, 1040), (16, 768, 2064), (1, 64, 272):
        targets = torch.randint(-1, V, (T,)).to(device)
        for mtp in [1.0], [1.0, 0.5, 0.25]:
            x, w = randn(device, T, D).requires_grad_(), randn(device, D, V, scale=D**-0.5).requires_grad_()
            made += backward(kernels.head_loss(x, w, targets, torch.tensor(mtp).to(device), fp8=fp8), [x, w])
        made.append(kernels.head_cross_entropy(x, w, targets, chunk=100))
    return made


def products(device: str) -> list[torch.Tensor]:
    """A weight or two, heads of which a key offset keeps half, banks of odd sizes."""
    made, (cos, sin) = [], (randn(device, 406, 32) for _ in range(2))
    n, *weights = leaves(device, (203, 96), (80, 96), (48, 96))
    made += backward(torch.cat(kernels.linear(n, tuple(weights)), 1), [n, *weights])
    for paired, key_offset in (False, False), (True, False), (False, True):
        n, w = leaves(device, (203, 96), (3 * 2 * 128, 96))
        heads = kernels.heads(n, w, cos, sin, heads=2, paired=paired, key_offset=key_offset)
        made += backward(torch.cat(heads, 1), [n, w])
    for bank in randn(device, 2, 130, 200), randn(device, 3, 200, 72):
        made += [kernels.xxt(bank), kernels.xtx(bank), kernels.polar_express(bank)]
    return made


def mlp(device: str, fp8: bool) -> list[torch.Tensor]:
    made = []
    for T in 203, 16, 1:
        n, up, down = leaves(device, (T, 96), (208, 96), (208, 96))
        w8 = kernels.QuantizedWeight(*kernels.quantize(up.detach())) if fp8 else None
        made += backward(kernels.mlp(n, up, down, w8), [n, up, down])
        peaks = kernels.mix([None], [n], normed=True, peaks=True)[2]
        made += backward(kernels.mlp(n, up, down, w8, peaks=peaks), [n, up, down]) if fp8 else []
    return made


def pointwise(device: str) -> list[torch.Tensor]:
    """Gates that are columns, rows that fill no tile, lambdas that are left to the next sum."""
    made = []
    for T in 203, 1:
        x, y, z, gates, w = leaves(device, (T, 768), (T, 768), (T, 768), (T, 6), (6, 12))
        lam = torch.tensor(0.7).to(device).requires_grad_()
        first, n = kernels.mix([None, gates[:, 1]], [x, y], normed=True, leave=lam)
        made += backward(kernels.mix([None, None], [first, z + n], normed=True)[1], [x, y, z, gates, lam])
        made += backward(kernels.mix([lam, *gates.unbind(1)[:4]], [x, y, z, x, y], normed=True)[1], [x, gates, lam])
        sums = kernels.injections([(gates[:, 0], gates[:, 1]), (None, gates[:, 2])], x, y)
        made += backward(torch.cat(sums, 1), [x, y, gates])
        made += backward(kernels.smear(x, w[:1], lam), [x, w, lam])
        v, u = x.view(T, 6, 128), y.view(T, 6, 128)
        made += backward(kernels.add_values(v, y, gates, w), [x, y, gates, w])
        made += backward(kernels.finish_heads(v, u, gates, gates), [x, y, gates])
        for lanes in 5, 41, 83:
            parameters = leaves(device, (64, 768), (lanes, 64), (lanes,))
            made += backward(kernels.gates(x, *parameters, lam), [x, *parameters, lam])
    return made


def tables(device: str) -> list[torch.Tensor]:
    """Rows that repeat, with signs and without; transposes; quantized banks and heads."""
    rows = (torch.rand(203) ** 4 * 50).int().to(device)
    one, many = leaves(device, (50, 768), (150, 768))
    for table in one, many:
        table.grad = torch.zeros_like(table)
    signs = randn(device, 8, 768).sign(), rows % 8
    found = *kernels.lookup(rows, [one, many], [1, 3]), *kernels.lookup(rows, [one], [1], signs)
    torch.autograd.backward(found, [randn(device, 203, 768) for _ in found])
    made, matrix, turned = [one.grad, many.grad], randn(device, 130, 72), randn(device, 72, 130)
    kernels.transpose_add(matrix, turned)
    bank, scales = randn(device, 3, 130, 72), torch.empty(3, 4, device=device)
    w8 = torch.empty(bank.shape, dtype=torch.float8_e4m3fn, device=device)
    kernels.quantize_bank(bank, w8, scales)
    return [*made, turned, w8, *kernels.quantize_head(randn(device, 96, 272, scale=0.1))]


def updates(device: str) -> list[torch.Tensor]:
    fp32 = lambda *shape: randn(device, *shape, dtype=torch.float32)  # noqa: E731
    number = lambda x: torch.tensor([x], dtype=torch.float32, device=device)  # noqa: E731
    p, g, moments = randn(device, 33, 70), randn(device, 33, 70), (fp32(33, 70), fp32(33, 70).square())
    kernels.adam_update_(p, g, *moments, torch.tensor([0.75, 0.95, 0.01, 1e-10, 1e-3], device=device))
    bank, gradient, buffer = randn(device, 3, 130, 72), randn(device, 3, 130, 72), fp32(3, 130, 72)
    x = kernels.normuon_momentum_(gradient, buffer, number(0.9))
    kernels.normalize_variance_(x, fp32(3, 130, 1).square(), number(0.9))
    low = torch.zeros(bank.shape, dtype=torch.uint16, device=device)
    kernels.cautious_update_(bank, low, x, torch.full((3,), 0.02, device=device), number(0.01))
    folded, scale = randn(device, 3, 130, 72), fp32(3)
    kernels.fold_(folded, bank, scale)
    return [p, bank, x, kernels.unfold_(folded, bank, scale, gradient), gradient]


OPS = {
    "attention": lambda device: attention(device, paired=False, running_max=False),
    "attention-paired": lambda device: attention(device, paired=True, running_max=False),
    "attention-max": lambda device: attention(device, paired=False, running_max=True) + attention(device, True, True),
    "dc": dc,
    "head-bf16": lambda device: head(device, fp8=False),
    "head-fp8": lambda device: head(device, fp8=True),
    "products": products,
    "mlp-bf16": lambda device: mlp(device, fp8=False),
    "mlp-fp8": lambda device: mlp(device, fp8=True),
    "pointwise": pointwise,
    "tables": tables,
    "updates": updates,
}


def run(name: str, device: str) -> None:
    """Raises AssertionError where a result is not finite."""
    torch.manual_seed(0)
    assert all(result.float().isfinite().all() for result in OPS[name](device)), f"{name} gives values not finite"


if __name__ == "__main__":
    for name in sys.argv[1:] or OPS:
        run(name, "cuda" if torch.cuda.is_available() else "cpu")
        print(f"{name} ran", flush=True)
