"""World sizes 1, 2, 4 and 8 give the same losses and parameters, over gloo in fp64.

One process group per world size serves all checks: tests/distributed_worker.py runs them in every rank.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_run, write_random_shards

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(world_size) -> what its worker saved: losses, parameters and the outcome of the error checks."""
    folder = tmp_path_factory.mktemp("distributed")
    write_random_shards(folder, small_run(), seed=1)

    @cache
    def run(world_size: int) -> dict:
        out = folder / f"world{world_size}.pt"
        env = os.environ | {"OMP_NUM_THREADS": "1", "DATA_PATH": str(folder), "PYTHONPATH": f"{HERE.parent}:{HERE}"}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, str(HERE / "distributed_worker.py"), str(out)]
        if world_size > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
            command = [sys.executable, *launcher, *command[1:]]
        done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return torch.load(out, weights_only=True)

    return run


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_same_losses_and_parameters(results, world_size):
    """Twelve steps across all stage boundaries and the split, then two validations."""
    one, many = results(1), results(world_size)
    assert one["split_at"] < len(one["losses"]) - 2, "steps after the split are part of the check"
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-9)
    np.testing.assert_allclose(many["val"], one["val"], rtol=1e-9)
    for name, p in one["params"].items():
        rows = p.shape[0] if p.dim() else None
        q = many["params"][name][:rows] if rows else many["params"][name]
        assert (q - p).abs().max().item() <= 1e-8 * max(1.0, p.abs().max().item()), name


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_padding_stays_zero(results, world_size):
    for name in ("qk_bank", "vo_bank"):
        real = results(1)["params"][name].shape[0]
        assert not results(world_size)["params"][name][real:].any()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_tied_until_the_split(results, world_size):
    tied = results(world_size)["tied"]
    split = results(world_size)["split_at"]
    assert all(tied[: split + 2]) and not any(tied[split + 2 :])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_missing_gradient_on_one_rank_is_one_error_everywhere(results, world_size):
    for told in results(world_size)["missing"]:
        assert "gradients are missing on some ranks only" in told and "smear_gate" in told and "[1]" in told
