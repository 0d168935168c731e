"""bench/ops.py without a GPU: it refuses in a sentence, and what it would time agrees with the references."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import small_run
from kernel_tools import DTYPES

import train_gpt
import triton_kernels as kernels

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import ops  # noqa: E402


@pytest.fixture
def sizes(device):
    cfg = small_run()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, head_dim=16, dtype=DTYPES[0]))
    return ops.Sizes.of(cfg, 0, T=80, device=device, fp8=False)  # FP8 is rounded otherwise by Triton's interpreter


@pytest.mark.parametrize(
    ("words", "gpu", "references", "told"),
    [
        ([], False, False, "error: kernels are timed on a GPU and this machine shows none: "),
        (["--check", "dc"], False, False, "error: kernels are timed on a GPU"),
        (["hed"], True, False, "error: no operation is called hed: choose among attention, dc, head, "),
        ([], True, True, "error: REFERENCE_OPS=1 leaves no kernel to time: "),
    ],
)
def test_refuses_in_a_sentence(words, gpu, references, told, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(kernels, "REFERENCE_OPS", references)
    assert ops.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(told) and err.endswith(".\n") and err.count("\n") == 1


@pytest.mark.parametrize("name", ops.OPS)
def test_what_is_timed_agrees_with_its_reference(name, sizes, force_kernels):
    torch.manual_seed(0)
    assert ops.check(name, sizes)


def test_what_is_wrong_is_not_timed(sizes, force_kernels, monkeypatch, capsys):
    norm_rotary, transpose_add = kernels.norm_rotary, kernels.transpose_add
    monkeypatch.setattr(kernels, "norm_rotary", lambda *x, **options: [1.1 * y for y in norm_rotary(*x, **options)])
    monkeypatch.setattr(kernels, "transpose_add", lambda src, dst: transpose_add(2 * src, dst))
    assert not ops.check("pointwise", sizes) and not ops.check("transposes", sizes) and ops.check("lookup", sizes)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 2, told
    first, second = told
    assert first.startswith("norm_rotary is wrong, so pointwise is not timed: result 0 errs by ")
    assert second == "transpose_add is wrong, so transposes is not timed: result 1 is not the reference's to the bit."


def test_a_row_of_the_table(sizes, monkeypatch):
    """10 us a call, 40 us for torch's: bytes a second, time at the ceiling over time taken, ratios."""
    (case,) = ops.dc_cases(sizes)
    monkeypatch.setattr(ops, "time_us", lambda op, case, backward: 10.0 if op is case.op else 40.0)
    one = sizes.T * train_gpt.ModelConfig().heads * 16 * DTYPES[0].itemsize
    rows = list(ops.timed_rows(case, sizes, {"copy": 1e6 * one}))
    for row, arrays, v3 in zip(rows, (5, 12), (375, 975), strict=True):
        us, achieved, unit, share, against, ratio = row.split()[-6:]
        assert (float(us), unit, float(against)) == (10.0, "TB/s", 0.25)
        assert float(achieved) == pytest.approx(arrays * one / 1e7, abs=0.005)
        assert share == f"{arrays / 10:.0%}" and float(ratio) == pytest.approx(10 / v3, abs=0.005)


NAMES = {  # in the table, of what is called otherwise
    "attention": "attention",
    "dc_correction": "dc",
    "head_loss": "head fp8",
    "head_cross_entropy": "head evaluation",
    "lookup_add": "lookup_add_",
    "quantize": "quantize activations",
    "mlp": "mlp fp8",
}


def test_the_table_has_every_kernel():
    """Every operation with a reference; and what has none but the reference of a part."""
    cfg = train_gpt.parse_options([])
    s = dataclasses.replace(ops.Sizes.of(cfg, 0, T=16, device="cpu"), model=dataclasses.replace(cfg.model, head_dim=8))
    shown = [case.name for cases, _ in ops.OPS.values() for case in cases(s)]
    modules = vars(kernels) | {"dc_correction_reference": None}
    wanted = {name.replace("_reference", "") for name in modules if name.endswith(("_reference", "_reference_"))}
    wanted |= {"quantize_bank", "quantize_head"}
    lacking = {name for name in wanted if not any(row.startswith(NAMES.get(name, name)) for row in shown)}
    assert not lacking and len(wanted) > 20


def test_the_optimizers_rows(sizes, monkeypatch):
    """A product of each bank takes 10 us, a step 1000 us, at 1 TB/s."""
    steps = []
    is_step = lambda op: getattr(op, "keywords", {}).get("do_adam") is not None  # noqa: E731
    monkeypatch.setattr(ops, "time_us", lambda op, case: (steps.append(op()), 1000.0)[1] if is_step(op) else 10.0)
    rows = list(ops.optimizer_rows(sizes, 1e12))
    assert len(rows) == len(steps) == 3
    plan = {name: math.prod(row.shape) for name, row in train_gpt.parameter_plan(sizes.model).items()}
    matrices = sum(plan[f"{name}_bank"] for name in ("qk", "vo", "mlp"))
    moved = [30 * matrices]
    moved += [moved[0] + 24 * (sum(plan.values()) - matrices - plan["embed"])]
    moved += [moved[1] + 24 * plan["embed"]]
    item = DTYPES[0].itemsize
    moved[1] += (2 + 5 * item) * plan["embed"]
    products = sum(5 * 10 * (1.5 + min(r, c) / (2 * max(r, c))) for _, r, c in ops.banks(sizes).values())
    for row, kind, amount in zip(rows, ("even", "odd, tied", "odd, split"), moved):
        assert row.startswith(f"optimizer, {kind} step:") and "1000 us is" in row
        assert f" {1000 / (products + amount / 1e6):.2f} (at most" in row
        assert f"times {products:.0f} us, " in row and row.endswith(f"+ {amount / 1e6:.0f} us, {amount / 1e9:.2f} GB")
