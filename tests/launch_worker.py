"""Compiles every kernel that a step of the record model launches, as it is launched, for sm_90 and without a GPU.

Run by test_kernels_toc.py in a process of its own: Triton must not interpret here. Launches are turned into
compilations and results are what memory held, so only shapes, dtypes, absent arguments and settings count. Prints, as
JSON, how often each kernel was launched and what failed to compile.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train_gpt  # noqa: E402
from train_gpt import kernels  # noqa: E402


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


launched, failed, run = Counter(), {}, jit.JITFunction.run


def compile_only(kernel, *args, grid, warmup, **options):
    launched[kernel.fn.__name__] += 1
    options |= {"HARDWARE": True} if "HARDWARE" in options else {}  # instructions that the interpreter lacks
    try:
        run(kernel, *args, grid=grid, warmup=True, **options)
    except Exception as problem:  # whatever a compiler raises
        failed[kernel.fn.__name__] = repr(problem)[-800:]


def a_step() -> None:
    """Forward and backward of a training micro-batch, the optimizer with Adam, a validation sequence."""
    cfg = train_gpt.ModelConfig(vocab_size=400, bigram_rows=512, sign_rows=64)
    model, (freqs, scale) = train_gpt.GPT(cfg), train_gpt.yarn([384], cfg.head_dim)
    model.rotate_to(freqs, 1024)
    optimizer = train_gpt.NorMuonAndAdam(model.named_parameters())
    optimizer.make_gradients()
    model.refresh(fp8=True)
    tokens = np.random.default_rng(0).integers(0, 400, 257)
    batch = train_gpt.packed_batch(tokens, np.array([0, 30]), 64, cfg.bigram_rows, torch.device("cpu"))
    view = train_gpt.View(128, 384, scale, 256, "triton", fp8=True)
    model(batch, view, torch.tensor([1.0, 0.5])).sum().backward()
    model.unfold()
    optimizer.step(do_adam=True)
    with torch.no_grad():
        model(batch, view._replace(fp8=False))


if __name__ == "__main__":
    driver.set_active(Hopper())
    jit.JITFunction.run = compile_only
    kernels.FORCE_KERNELS = True
    kernels.card_of = lambda device: ("large", 132)
    a_step()
    print(json.dumps({"triton": triton.__version__, "launched": launched, "failed": failed}))
