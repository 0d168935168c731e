"""Read by pytest before any test: kernels are interpreted where there is no GPU, and what kernel tests share."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Triton reads this when a kernel is defined. Other tests do not notice: tensors on the CPU go to the references.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import triton_kernels  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "no_poison: torch.compile traces this test, so torch.empty stays as it is")


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def force_kernels(monkeypatch):
    """The Triton kernels run also on CPU tensors (interpreted)."""
    if triton_kernels.triton is None:
        pytest.skip("Triton is not installed here")
    monkeypatch.setattr(triton_kernels, "FORCE_KERNELS", True)


def poison(tensor):
    """NaN in every floating-point element; bytes 0x7f elsewhere, which is NaN in the 8-bit formats too."""
    if tensor.dtype == torch.bool or tensor.numel() == 0 or tensor.is_meta:
        return tensor
    if tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.fill_(float("nan"))
    torch.empty_strided((0,), (1,), dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).fill_(0x7F)
    return tensor


def poisoning(original):
    return lambda *args, **kwargs: poison(original(*args, **kwargs))


@pytest.fixture
def poisoned(request, monkeypatch):
    """torch.empty and its kin return poison, so that an output which is not written shows."""
    if request.node.get_closest_marker("no_poison"):
        return
    for owner, name in (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
