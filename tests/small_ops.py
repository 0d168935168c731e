"""The attention, DC and head kernels once each, forward and backward, at sizes small enough for a memory checker.

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


OPS = {
    "attention": lambda device: attention(device, paired=False, running_max=False),
    "attention-paired": lambda device: attention(device, paired=True, running_max=False),
    "attention-max": lambda device: attention(device, paired=False, running_max=True) + attention(device, True, True),
    "dc": dc,
    "head-bf16": lambda device: head(device, fp8=False),
    "head-fp8": lambda device: head(device, fp8=True),
}


def run(name: str, device: str) -> None:
    """Raises AssertionError where a result is not finite."""
    torch.manual_seed(0)
    assert all(result.float().isfinite().all() for result in OPS[name](device)), f"{name} gives values not finite"


if __name__ == "__main__":
    for name in sys.argv[1:] or OPS:
        run(name, "cuda" if torch.cuda.is_available() else "cpu")
        print(f"{name} ran", flush=True)
