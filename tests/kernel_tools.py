"""What every kernel test shares: the computed tolerance, and ahead-of-time compilation with the assembler's figures.

Run as a script this file is its own compile worker: TRITON_INTERPRET decides at import whether a kernel can be
compiled, so a test process that interprets kernels compiles them in another one.
"""
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

import triton_kernels

GPU = torch.cuda.is_available()
# On a GPU the tests run the trainer's own dtype. Interpreted, bf16 products are wrong, so there fp16 stands for it.
DTYPES = [torch.bfloat16] if GPU else [torch.float32, torch.float16]
LOW = DTYPES[-1]
needs_triton = pytest.mark.skipif(triton_kernels.triton is None, reason="Triton is not installed here")
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes/block


def rms(x):
    return x.square().mean().sqrt().item()


def assert_as_good_as_eager(name, got, exact, eager, slack=2.0):
    """`got` may err from `exact` (fp64) by at most `slack` times what `eager` torch in the same low precision errs,
    plus two units in the last place (of eager's dtype) of the largest value; the same for the root mean square of the
    error, with one unit of the root mean square of `exact`. Returns both errors as text, for printing."""
    unit = torch.finfo(eager.dtype).eps
    got, exact, eager = (x.detach().to(got.device, torch.float64) for x in (got, exact, eager))
    assert got.shape == exact.shape == eager.shape, f"{name}: shapes {[tuple(x.shape) for x in (got, exact, eager)]}"
    if got.numel() == 0:
        return f"{name}: empty"
    assert torch.isfinite(got).all(), f"{name}: {(~torch.isfinite(got)).sum()} of {got.numel()} values are not finite"
    worst, eager_worst = ((x - exact).abs().max().item() for x in (got, eager))
    spread, eager_spread = (rms(x - exact) for x in (got, eager))
    worst_bound = slack * eager_worst + 2 * unit * exact.abs().max().item()
    spread_bound = slack * eager_spread + unit * rms(exact)
    report = (f"{name}: max error {worst:.3g} (eager {eager_worst:.3g}, bound {worst_bound:.3g}), "
              f"rms {spread:.3g} (eager {eager_spread:.3g}, bound {spread_bound:.3g})")
    assert worst <= worst_bound and spread <= spread_bound, report
    return report


def aot_all(rows):
    """Compile every row for each of its architectures, in one process, with no GPU.

    A row is (name, kernel, signature, constexprs, num_warps, num_stages, archs). `signature` gives the type of each
    run-time argument ("*bf16", "i32", "fp32", ..., a tuple of them for a tuple); pointers count as 16-byte aligned
    unless they say "*bf16:1", integers that are multiples of 16 say so as "i32:16". Constexprs are plain values or
    Triton dtypes.
    Returns {(name, arch): {"registers": a thread, "spills": bytes of its stack, "overwritten": operands of products
    that loops destroy (sm_90), "shared": bytes a block}}.
    """
    jobs = [(kernel.fn.__module__, kernel.fn.__name__, signature, constexprs, warps, stages, arch, name)
            for name, kernel, signature, constexprs, warps, stages, row_archs in rows
            for arch in row_archs]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    worker = subprocess.run([sys.executable, __file__], input=pickle.dumps(jobs), capture_output=True, env=env)
    assert worker.returncode == 0, worker.stderr.decode()[-4000:]
    figures = json.loads(worker.stdout.decode().splitlines()[-1])
    failed = [f"{job[-1]} for sm_{job[-2]}: {f['error']}" for job, f in zip(jobs, figures) if "error" in f]
    assert not failed, "\n".join(failed)
    return {(job[-1], job[-2]): f for job, f in zip(jobs, figures)}


def assert_fits(figures, arch, max_registers=255):
    """No spills, shared memory within the architecture's limit, by the Triton that requirements.txt pins (or newer)."""
    if tuple(map(int, triton_kernels.triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("registers and spills are bounded for the pinned Triton")
    limits = {"registers": max_registers, "spills": 0, "overwritten": 0, "shared": SHARED_LIMIT[arch]}
    assert all(figures[name] <= limits[name] for name in limits), f"sm_{arch}: {figures}, limits {limits}"


def compile_job(module, kernel_name, signature, constexprs, num_warps, num_stages, arch, _name):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(module), kernel_name)
    attrs = {}

    def typed(declared, *path):
        if isinstance(declared, tuple):
            return tuple(typed(part, *path, i) for i, part in enumerate(declared))
        if declared is None:  # an absent member of a tuple
            return "constexpr"
        type_, _, divisor = declared.partition(":")
        if divisor or type_.startswith("*"):
            attrs[path] = [["tt.divisibility", int(divisor or 16)]]
        return type_

    types = {arg: typed("constexpr" if arg in constexprs else signature[arg], i)
             for i, arg in enumerate(kernel.arg_names)}
    source = ASTSource(kernel, types, constexprs, attrs)
    options = dict(num_warps=num_warps, num_stages=num_stages)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return cubin_figures(compiled.asm["cubin"], compiled.asm["ptx"], arch) | {"shared": compiled.metadata.shared}


def cubin_figures(cubin, ptx, arch):
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        run = partial(subprocess.run, capture_output=True, text=True, check=True)
        usage = run([tools / "cuobjdump", "-res-usage", path]).stdout
        holds = arch == 90 and re.search(r"wgmma\.mma_async\S+ \{[^}]*\}, \{", ptx)  # an operand in registers
        sass = run([tools / "nvdisasm", "-c", path]).stdout if holds else ""
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {"registers": int(registers), "spills": int(stack), "overwritten": len(overwritten_operands(sass))}


def overwritten_operands(sass):
    """Lines of products in a loop whose left operand, in registers since before the loop, the loop overwrites.

    ptxas 12.8 does that to what attention holds where heads have 32 numbers."""
    lines = re.sub(r"/\*.*?\*/", "", sass).splitlines()
    labels = {line.strip(": "): i for i, line in enumerate(lines) if re.match(r"\s*\.L_x_\d+:", line)}
    jumps = ((re.search(r"@.*BRA.*`\((\.L_x_\d+)\)", line), i) for i, line in enumerate(lines))  # loops end in an if
    loops = [(labels[jump[1]], i) for jump, i in jumps if jump and labels.get(jump[1], i) < i]
    found = []
    for begin, end in loops:
        body = lines[begin:end]
        for i, line in enumerate(body):
            if operand := re.search(r"GMMA\S*\s+R\d+, R(\d+), gdesc", line):
                held = set(range(int(operand[1]), int(operand[1]) + 4))
                before, after = (set().union(*map(written_registers, part)) for part in (body[:i], body[i + 1:]))
                found += [line.strip()] if held & after - before else []
    return found


def written_registers(line):
    """Numbers of the registers that an instruction writes."""
    code = re.match(r"\s*(?:@!?U?P\d+\s+)?([A-Z][\w.]*)\s+(?:U?P\w+, )?R(\d+)\b", line)
    if not code or re.match(r"ST|RED|BRA|SYNCS|UTMA|ISETP|FSETP|R2UR", code[1]):
        return set()
    tile = re.search(r"GMMA\.64x(\d+)", code[1])
    wide = int(tile[1]) // 2 if tile else 4 if re.search(r"\.128|M88\.4", code[1]) else 2 if "64" in code[1] else 1
    return set(range(int(code[2]), int(code[2]) + wide))


def guarded(job):
    try:
        return compile_job(*job)
    except Exception:
        return {"error": traceback.format_exc(limit=-2)}


if __name__ == "__main__":
    print(json.dumps([guarded(job) for job in pickle.load(sys.stdin.buffer)]))
