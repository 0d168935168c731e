"""GPT against the golden numbers and against a model written from the formulas alone."""

import pytest
import torch
from helpers import GOLDEN, batch_of, golden, view_of

from train_gpt import GPT

EPS = 2.0**-52
CASES = ("s0_mtp3", "s0_mtp2", "s1_mtp3", "s1_mtp1")


@pytest.fixture(scope="module")
def model() -> GPT:
    z, model = golden("model"), GPT(GOLDEN)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(z["param_" + name]))
        model.sign_table.copy_(torch.from_numpy(z["sign_table"]))
    return model


def prepare(model: GPT, stage: str, boundaries: str = "train"):
    z = golden("model")
    freqs = torch.from_numpy(z[f"{stage}_yarn_freqs"])
    model.rotate_to(freqs[: GOLDEN.head_dim // 2 : 2], 2 * len(z["input_tokens"]))
    batch = batch_of(z["input_tokens"], z["targets"], z[f"cu_seqlens_{boundaries}"], z["bigram_rows"])
    return batch, view_of(z[f"{stage}_windows"], z[f"{stage}_attn_scale"])


@pytest.mark.parametrize("boundaries", ["train", "eval"])
@pytest.mark.parametrize("stage", ["s0", "s1"])
def test_evaluation_loss(model, stage, boundaries):
    batch, view = prepare(model, stage, boundaries)
    with torch.no_grad():
        loss = model(batch, view)
    expected = torch.from_numpy(golden("model")[f"{stage}_eval_loss_cu_{boundaries}"])
    torch.testing.assert_close(loss, expected, rtol=0, atol=80 * EPS * expected.max().item())


@pytest.mark.parametrize("case", CASES)
def test_training_loss_and_every_gradient(model, case):
    z = golden("model")
    batch, view = prepare(model, case[:2])
    model.zero_grad()
    loss = model(batch, view, torch.from_numpy(z[f"{case}_mtp_weights"]))
    (loss * float(z["meta_grad_scale"])).sum().backward()
    expected = torch.from_numpy(z[f"{case}_loss"])
    torch.testing.assert_close(loss.detach(), expected, rtol=0, atol=80 * EPS * expected.max().item())
    for name, p in model.named_parameters():
        flat = p.grad.flatten()
        if f"{case}_grad_{name}" in z:
            exact = torch.from_numpy(z[f"{case}_grad_{name}"])
            stored = 2.0**-24 * exact.double().abs() if exact.dtype == torch.float32 else 0
            error = ((p.grad - exact).abs() - stored).max().item()
            assert error <= 200 * EPS * exact.abs().max().item(), f"{name}: {error}"
        else:
            probe = flat @ torch.cos(torch.arange(len(flat), dtype=torch.float64))
            length = float(z[f"{case}_gradnorm_{name}"])
            budget = (200 * EPS + 2.0**-23) * length
            assert abs(flat.norm().item() - length) <= budget, name
            assert abs(probe.item() - float(z[f"{case}_gradprobe_{name}"])) <= budget, name
