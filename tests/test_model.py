"""GPT against the golden numbers and against a model written from the formulas alone."""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import GOLDEN, batch_of, golden, randomize, view_of
from plain_model import plain_forward, plain_sign_rows, plain_yarn

import train_gpt
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


def awkward_batch(cfg, seed: int, lengths=(1, 16, 17, 40, 1, 90, 3)):
    """Documents of one token, of a window, of one more, and longer than all windows; then empty ones."""
    rng = np.random.default_rng(seed)
    T = sum(lengths)
    tokens = rng.integers(0, cfg.vocab_size, T + 1)
    boundaries = np.concatenate(([0], np.cumsum(lengths)))
    return train_gpt.packed_batch(tokens, boundaries, len(lengths) + 5, cfg.bigram_rows, torch.device("cpu"))


@pytest.mark.parametrize("seed", [0, 1])
def test_agrees_with_the_plain_model_on_fresh_parameters(seed):
    model = GPT(GOLDEN, seed=seed)
    randomize(model, seed)
    freqs, scale = train_gpt.yarn([32, 64], GOLDEN.head_dim)
    plain_freqs, plain_scale = plain_yarn([32, 64], GOLDEN.head_dim)
    batch, view = awkward_batch(GOLDEN, seed), view_of((16, 64), scale)
    model.rotate_to(freqs, 2 * len(batch.inputs))
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    signs = torch.tensor(plain_sign_rows(batch.inputs.tolist(), GOLDEN.sign_rows))
    setting = dict(windows_tokens=(16, 64), attn_scale=plain_scale, freqs=plain_freqs)
    inputs = (batch.inputs, batch.targets, batch.cu_seqlens, batch.bigram_rows, signs, model.sign_table)
    weights = torch.tensor([1.0, 0.6, 0.2], dtype=torch.float64)

    exact = plain_forward(params, *inputs, **setting, mtp_weights=weights)
    exact.sum().backward()
    loss = model(batch, view, weights)
    loss.sum().backward()
    # What rounding may do to each gradient is measured: the same model in fp32, scaled to fp64's precision.
    single = copy.deepcopy(model).float()
    single.rotate_to(freqs, 2 * len(batch.inputs))
    single.zero_grad()
    rough_loss = single(batch, view, weights.float())
    rough_loss.sum().backward()
    loss_budget = 10 * (rough_loss.double() - exact).abs().max().item() * EPS / 2.0**-23
    torch.testing.assert_close(loss, exact, rtol=0, atol=loss_budget)
    for (name, p), rough in zip(model.named_parameters(), single.parameters()):
        grad = params[name].grad if params[name].grad is not None else torch.zeros_like(p)
        rounding = (rough.grad.double() - grad).abs().max().item() * EPS / 2.0**-23
        budget = 10 * rounding + 200 * EPS * grad.abs().max().item()
        assert (p.grad - grad).abs().max().item() <= budget, name
    with torch.no_grad():
        plain_eval = plain_forward(params, *inputs, **setting)
        torch.testing.assert_close(model(batch, view), plain_eval, rtol=0, atol=loss_budget)


@pytest.mark.parametrize("layer,gates", [
    (0, ()), (0, ("x0",)), (0, ("bigram",)), (2, ()), (4, ("bigram",)), (5, ("x0",)), (7, ("xsa",)),
])  # fmt: skip
def test_a_row_without_a_gate_is_one_whose_gate_is_zero(layer, gates):
    """So editing a row of the plan is all it takes."""
    plan = [dataclasses.replace(spec, gates=gates) if i == layer else spec for i, spec in enumerate(GOLDEN.plan)]
    full, less = GPT(GOLDEN), GPT(dataclasses.replace(GOLDEN, plan=tuple(plan)))
    randomize(full)
    with torch.no_grad():
        for name, p in less.named_parameters():
            if name not in ("mudd_gate_w2", "mudd_gate_b2"):
                p.copy_(getattr(full, name))
        for post, name in itertools.product((False, True), ("mudd_gate_w2", "mudd_gate_b2")):
            kept, all_ = (train_gpt.lane_slices(m.cfg.gate_lanes(post)) for m in (less, full))
            assert set(kept) < set(all_) or post != (layer >= 4) and kept == all_
            for lane, columns in all_.items():
                source = getattr(full, name)[int(post), columns]
                if lane in kept:
                    getattr(less, name)[int(post), kept[lane]] = source
                else:
                    source.zero_()
    batch, weights = awkward_batch(GOLDEN, 0), torch.tensor([1.0, 0.5], dtype=torch.float64)
    freqs, scale = train_gpt.yarn([64], GOLDEN.head_dim)
    losses = []
    for m in full, less:
        m.rotate_to(freqs, 2 * len(batch.inputs))
        losses.append(m(batch, view_of((16, 64), scale), weights))
        losses[-1].sum().backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-11, atol=0)
    torch.testing.assert_close(less.qk_bank.grad, full.qk_bank.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("row", [dict(window="shrt"), dict(gates=("xas",)), dict(reads="middle"), dict(skip_from="x")])
def test_a_word_that_the_plan_does_not_know(row):
    plan = (dataclasses.replace(GOLDEN.plan[0], **row), *GOLDEN.plan[1:])
    with pytest.raises(ValueError, match="the plan names .*(shrt|xas|middle|x)"):
        dataclasses.replace(GOLDEN, plan=plan)


def test_scaling_the_loss_scales_every_gradient():
    model = GPT(GOLDEN)
    randomize(model)
    batch, weights = awkward_batch(GOLDEN, 0), torch.tensor([1.0, 0.5], dtype=torch.float64)
    freqs, scale = train_gpt.yarn([64], GOLDEN.head_dim)
    model.rotate_to(freqs, 2 * len(batch.inputs))
    grads = []
    for factor in (1.0, 2.0):
        model.zero_grad()
        (factor * model(batch, view_of((16, 64), scale), weights).sum()).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert all(torch.equal(2 * grads[0][name], grads[1][name]) for name in grads[0])


def test_padding_and_dead_parameters_get_zero_gradients():
    """Trap 16: what shares a tensor with live parameters has a gradient of zeros, not none."""
    model = GPT(GOLDEN, world_size=8)
    randomize(model)
    batch = awkward_batch(GOLDEN, 0)
    freqs, scale = train_gpt.yarn([64], GOLDEN.head_dim)
    model.rotate_to(freqs, 2 * len(batch.inputs))
    model(batch, view_of((16, 64), scale), torch.tensor([1.0], dtype=torch.float64)).sum().backward()
    grad = {name: p.grad for name, p in model.named_parameters()}
    dead = {
        "qk_bank": grad["qk_bank"][60:],
        "vo_bank": grad["vo_bank"][20:],
        "mlp_bank": grad["mlp_bank"][11:],
        "ve_gate_bank": grad["ve_gate_bank"][4],
        "resid_lambdas": grad["resid_lambdas"][10],
        "post_lambdas": grad["post_lambdas"][10],
        "layer 6 attention lambdas": torch.stack((grad["resid_lambdas"][6, 0], grad["post_lambdas"][6, 0])),
        "layer 6 scalars": grad["scalars"][12:14],
        "mudd_w2": grad["mudd_w2"][1, 5:],
        "mudd_b2": grad["mudd_b2"][1, 5:],
        "mudd_gate_w2": grad["mudd_gate_w2"][0, 26:],
        "mudd_gate_b2": grad["mudd_gate_b2"][0, 26:],
    }
    assert all(not values.any() for values in dead.values()), [name for name, v in dead.items() if v.any()]
    assert all(g is not None and g.any() for g in grad.values())


@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
def test_first_loss_at_the_real_vocabulary(variant):
    cfg = train_gpt.parse_options([f"variant={variant}"]).model
    cfg = dataclasses.replace(cfg, head_dim=16, bigram_rows=997, sign_rows=min(cfg.sign_rows, 64), dtype=torch.float32)
    model, rng = GPT(cfg), np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, 257)
    batch = train_gpt.packed_batch(tokens, np.array([0, 100]), 16, cfg.bigram_rows, torch.device("cpu"))
    freqs, scale = train_gpt.yarn([384], cfg.head_dim)
    model.rotate_to(freqs, 512)
    with torch.no_grad():
        loss = model(batch, view_of((128, 384), scale)).mean().item()
    assert abs(loss - math.log(50304)) < 0.02
    weights = torch.tensor([1.0, 0.5])
    model(batch, view_of((128, 384), scale), weights).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def copying_loss(window: int, steps: int) -> tuple[float, float]:
    """Train on documents that repeat twelve random tokens three times; (loss on repeated tokens, on fresh ones)."""
    cfg = train_gpt.ModelConfig(head_dim=8, vocab_size=64, bigram_rows=512, sign_rows=64, dtype=torch.float32)
    period, repeats, alphabet, T = 12, 3, 16, 312
    length = period * repeats + 1
    model, rng = GPT(cfg, seed=1), np.random.default_rng(0)  # of four seeds tried the slowest needs 450 steps
    optimizer = train_gpt.NorMuonAndAdam(model.named_parameters())
    freqs, scale = train_gpt.yarn([384], cfg.head_dim)
    model.rotate_to(freqs, 2 * T)
    view, weights = view_of((window, window), scale), torch.tensor([1.0])

    def fresh_batch():
        documents = [np.append(60, np.tile(rng.integers(0, alphabet, period), repeats)) for _ in range(T // length + 1)]
        boundaries = np.minimum(np.arange(0, T + length, length), T)
        return train_gpt.packed_batch(
            np.concatenate(documents)[: T + 1], boundaries, 32, cfg.bigram_rows, torch.device("cpu")
        )

    for step in range(steps):
        model(fresh_batch(), view, weights).sum().backward()
        optimizer.step(do_adam=train_gpt.is_adam_step(step), momentum=0.9)
    with torch.no_grad():
        losses = torch.stack([model(fresh_batch(), view) for _ in range(4)]).mean(0)
    position = torch.arange(T) % length
    copied = (position >= period) & (position < length - 1)
    fresh = (position > 0) & (position < period)
    return losses[copied].mean().item(), losses[fresh].mean().item()


def test_learns_to_copy_and_only_by_attention():
    """Twelve tokens back is out of reach of smear, key offset and bigrams; attention over two tokens cannot do it."""
    copied, fresh = copying_loss(window=64, steps=330)
    assert copied < 0.5 < 2.5 < fresh  # guessing costs ln 16 = 2.77
    blind, _ = copying_loss(window=1, steps=60)
    assert blind > 2.5


@pytest.mark.parametrize("buffers", [False, True])
def test_kernels_give_the_references_gradients(buffers, device, force_kernels, monkeypatch):
    """A whole pass in fp32, with and without gradient buffers that products and lookups add to."""
    cfg = train_gpt.ModelConfig(
        heads=2, head_dim=64, vocab_size=200, bigram_rows=512, sign_rows=64, dtype=torch.float32, fp8_mlp=False
    )
    tokens = np.random.default_rng(0).integers(0, 199, 34)
    tokens[[0, 14, 15]] = 199
    batch = train_gpt.packed_batch(tokens, np.array([0, 14, 15]), 16, cfg.bigram_rows, torch.device(device))
    freqs, scale = train_gpt.yarn([384], cfg.head_dim)
    losses, gradients = [], []
    for kernels_run in True, False:
        monkeypatch.setattr(train_gpt.kernels, "FORCE_KERNELS", kernels_run)
        monkeypatch.setattr(train_gpt.kernels, "REFERENCE_OPS", not kernels_run)
        model, generator = GPT(cfg, world_size=8, seed=1), torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():  # nothing stays zero
                parameter += torch.randn(parameter.shape, generator=generator) * 0.02
        model.to(device).rotate_to(freqs, 256)
        for parameter in model.parameters() if buffers else ():
            parameter.grad = torch.zeros_like(parameter)
        view = view_of((16, 48), scale)._replace(attention="triton" if kernels_run else "reference")
        loss = model(batch, view, torch.tensor([1.0, 0.5], device=device))
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for name, want in gradients[1].items():
        assert (gradients[0][name] - want).norm() <= 1e-4 * want.norm(), name
