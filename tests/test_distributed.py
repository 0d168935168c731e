"""World sizes 1, 2, 4 and 8 give the same losses and parameters, over gloo in fp64, and those of the plain optimizer.

One process group per world size serves all checks: tests/distributed_worker.py runs them in every rank. Where there are
two GPUs, what concerns the optimizer alone runs over NCCL as well.
"""

import fcntl
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_run, write_random_shards

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()
NCCL = [pytest.param(n, "cuda", marks=pytest.mark.skipif(GPUS < 2, reason="two GPUs"), id=f"nccl-{n}") for n in (1, 2)]
RUNS = [pytest.param(n, "cpu", id=f"gloo-{n}") for n in (1, 2, 4, 8)] + NCCL
GROUPS = [run for run in RUNS if run.values[0] > 1]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(world_size, device) -> what its worker saved, by part. Each is run once for all of pytest's processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "distributed"
    folder.mkdir(exist_ok=True)

    @cache
    def run(world_size: int, device: str = "cpu") -> dict:
        out = folder / f"{device}{world_size}.pt"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                write_random_shards(folder, small_run(), seed=1)
                start(world_size, device, out)
        saved = torch.load(out, weights_only=True)
        assert saved["device"] == device
        return saved

    def start(world_size: int, device: str, out: Path) -> None:
        parts = ["plain", "rows", "bad"] + ["train"] * (device == "cpu")
        env = os.environ | {"OMP_NUM_THREADS": "1", "DATA_PATH": str(folder), "PYTHONPATH": f"{HERE.parent}:{HERE}"}
        env |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, str(HERE / "distributed_worker.py"), str(out), *parts]
        if world_size > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
            command = [sys.executable, *launcher, *command[1:]]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_same_losses_and_parameters(results, world_size):
    """Twelve steps across all stage boundaries and the split, then two validations; the bigram rows travel alone."""
    one, many = results(1)["train"], results(world_size)["train"]
    assert one["split_at"] < len(one["losses"]) - 2, "steps after the split are part of the check"
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-9)
    np.testing.assert_allclose(many["val"], one["val"], rtol=1e-9)
    for name, p in one["params"].items():
        rows = p.shape[0] if p.dim() else None
        q = many["params"][name][:rows] if rows else many["params"][name]
        assert (q - p).abs().max().item() <= 1e-8 * max(1.0, p.abs().max().item()), name
    sparse, dense = many["bytes"]
    assert one["bytes"] is None and 0 < sparse < dense
    assert many["told"].startswith("gradients of touched rows travel; a rank and update: 0.")


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_padding_stays_zero(results, world_size):
    for name in ("qk_bank", "vo_bank"):
        real = results(1)["train"]["params"][name].shape[0]
        assert not results(world_size)["train"]["params"][name][real:].any()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_tied_until_the_split(results, world_size):
    tied = results(world_size)["train"]["tied"]
    split = results(world_size)["train"]["split_at"]
    assert all(tied[: split + 2]) and not any(tied[split + 2 :])


# --- the optimizer alone


@pytest.mark.parametrize(("world_size", "device"), RUNS)
def test_step_for_step_the_plain_optimizer(results, world_size, device):
    """Tied, split and on its own, with moments: on every rank, after every step, by rows and densely."""
    for way, result in results(world_size, device)["plain"].items():
        for rank, errors in enumerate(result["errors"]):
            worst = max(errors, key=errors.get)
            assert errors[worst] <= 1, f"{way}, rank {rank}: {worst} is off by {errors[worst]} of what is allowed"


@pytest.mark.parametrize(("world_size", "device"), GROUPS)
def test_rows_travel_where_they_are_fewer_bytes(results, world_size, device):
    ways = results(world_size, device)["plain"]
    assert all(
        ways[way]["bytes"][0] < ways[way]["bytes"][1] for way in ("sparse", "sparse, new gradients, one missing")
    )
    assert ways["sparse, too many rows"]["bytes"][0] >= ways["sparse, too many rows"]["bytes"][1]
    assert ways["dense"]["bytes"] is None
    by_rows, densely = ways["sparse"]["params"]["bigram_embed"], ways["dense"]["params"]["bigram_embed"]
    torch.testing.assert_close(by_rows, densely, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("world_size", "device"), GROUPS)
def test_a_mean_by_rows_is_the_mean(results, world_size, device):
    """A rounding a rank at most, also where a rank sends or receives nothing."""
    for errors in results(world_size, device)["rows"]["errors"]:
        assert len(errors) == 3 and max(errors.values()) <= world_size, errors


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            "missing",
            r"RuntimeError: gradients are missing on some ranks only: {'smear_gate': \[1\], 'table': \[1\]}: use",
        ),
        ("no row", "ValueError: .*parameters without a row: table.*: edit PARAM_TABLE or the model"),
        ("no parameter", "ValueError: .*rows without a parameter: resid_lambdas.*: edit PARAM_TABLE or the model"),
        ("bank", "ValueError: qk_bank has .* matrices, which do not divide among .* ranks: pad it to"),
        ("rows", "ValueError: table has .* rows, which do not divide among .* ranks: pad it to"),
        ("vector", r"ValueError: a sparse parameter must be \(rows, D\)"),
        ("no table", r"ValueError: .*optim or comms unknown: table.*: edit PARAM_TABLE or the model"),
    ],
)
@pytest.mark.parametrize(("world_size", "device"), GROUPS)
def test_bad_uses_are_one_error_everywhere(results, world_size, device, use, sentence):
    told, seconds = results(world_size, device)["bad"][use]
    assert len(told) == world_size and len(set(told)) == 1 and seconds < 10
    assert re.match(sentence, told[0]), told[0]


@pytest.mark.parametrize(("world_size", "device"), GROUPS)
def test_a_gradient_that_vanishes_later_stops_its_rank_at_once(results, world_size, device):
    told, seconds = results(world_size, device)["bad"]["gone"]
    assert (
        told[1] == "RuntimeError: rank 1: the set of gradients changed (smear_gate) since ranks agreed."
        and seconds < 10
    )
    assert set(told[:1] + told[2:]) == {"no error"}
