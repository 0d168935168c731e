"""NorMuonAndAdam against the golden steps, against the formulas, on other tables and alone."""

import math

import pytest
import torch
from helpers import golden
from plain_optimizer import POLAR_EXPRESS, PlainOptimizer, polar_express

import train_gpt
from train_gpt import NorMuonAndAdam, OptimConfig, ParamSpec, is_adam_step

EPS = 2.0**-52
# Polar Express may magnify a rounding error by the product of its leading coefficients.
MUON_TOLERANCE = EPS * math.prod(a for a, _, _ in POLAR_EXPRESS)


def labels() -> list[str]:
    return [spec.label for spec in train_gpt.PARAM_TABLE]


def golden_params(dtype=torch.float64) -> dict[str, torch.nn.Parameter]:
    z = golden("optimizer")
    return {name: torch.nn.Parameter(torch.from_numpy(z[f"before_{name}"]).to(dtype).contiguous()) for name in labels()}


def add_gradients(params, j: int) -> None:
    z = golden("optimizer")
    for name, p in params.items():
        grad = torch.from_numpy(z[f"grad{j}_{name}"]).to(p.dtype).contiguous()
        p.grad = grad if p.grad is None else p.grad + grad


def drive(params, optimizer, after_step=lambda j: None) -> None:
    """The golden run: steps 848 to 853 with the split after 851."""
    z = golden("optimizer")
    for j, step in enumerate(z["steps"].tolist()):
        add_gradients(params, j)
        optimizer.step(
            do_adam=is_adam_step(step), lr_mul=float(z["lr_multiplier"][j]), momentum=float(z["muon_momentum"][j])
        )
        if step == 851:
            optimizer.split_embed()
        after_step(j)


def test_golden_steps_through_the_split():
    z, params = golden("optimizer"), golden_params()
    optimizer = NorMuonAndAdam(params)

    def compare(j):
        for name, p in params.items():
            exact = torch.from_numpy(z[f"after{j}_{name}"])
            muon = optimizer.states[name].spec.optim == "normuon"
            budget = (MUON_TOLERANCE if muon else 16 * EPS) * max(exact.abs().max().item(), 1e-3)
            assert (p.detach() - exact).abs().max().item() <= budget, f"{name} after step {j}"

    drive(params, optimizer, compare)
    for name, state in optimizer.states.items():
        pairs = {
            "momentum": state.momentum,
            "second_moment": state.second_moment,
            "m": state.exp_avg,
            "v": state.exp_avg_sq,
        }
        for kind, tensor in pairs.items():
            if f"state_{kind}_{name}" in z:
                exact = torch.from_numpy(z[f"state_{kind}_{name}"]).reshape(tensor.shape)
                torch.testing.assert_close(
                    tensor, exact, rtol=MUON_TOLERANCE, atol=MUON_TOLERANCE * exact.abs().max().item()
                )
        if f"state_count_{name}" in z:
            assert state.steps == int(z[f"state_count_{name}"])


def test_native_storage_agrees_to_last_bits():
    """bf16 parameters with fp32 moments, as the trainer stores them, against the same run of the trainer's function."""
    z = golden("optimizer")
    full = {"scalars", "post_lambdas", "resid_lambdas", "_mudd_gate_scale"}
    params = golden_params(torch.bfloat16)
    for name in full:
        params[name].data = params[name].data.float()
    flips = total = 0

    def compare(j):
        nonlocal flips, total
        for name, p in params.items():
            if f"native_after{j}_{name}" in z:
                exact = torch.from_numpy(z[f"native_after{j}_{name}"])
                got = p.detach().float()
                if name in full:  # a few last bits, counted at the size of the tensor's largest entry
                    unit = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
                else:
                    unit = torch.finfo(torch.bfloat16).eps * exact.abs()
                    total += exact.numel()
                    flips += int((got != exact).sum())
                assert ((got - exact).abs() <= unit).all(), f"{name} after step {j}"

    drive(params, NorMuonAndAdam(params), compare)
    assert total > 10_000 and flips <= total / 1000


def test_tied_until_the_split():
    params = golden_params()
    optimizer = NorMuonAndAdam(params)
    tied = []
    drive(params, optimizer, lambda j: tied.append(torch.equal(params["embed"], params["lm_head"].T)))
    assert tied == [True, True, True, True, True, False]


def test_gradients_wait_for_the_odd_step():
    params = golden_params()
    optimizer = NorMuonAndAdam(params)
    add_gradients(params, 0)
    optimizer.step(do_adam=False)
    assert not params["qk_bank"].grad.any()
    assert all(p.grad.any() for name, p in params.items() if name not in ("qk_bank", "vo_bank", "mlp_bank"))
    add_gradients(params, 1)
    optimizer.step(do_adam=True)
    assert not any(p.grad.any() for p in params.values())


def test_snapshot_restores_exactly():
    params = golden_params()
    optimizer = NorMuonAndAdam(params)
    drive(params, optimizer)
    before = {name: p.detach().clone() for name, p in params.items()}
    saved = optimizer.snapshot()
    drive(params, optimizer)
    first = {name: p.detach().clone() for name, p in params.items()}
    optimizer.restore(saved)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(before[name])
    drive(params, optimizer)
    assert all(torch.equal(p, first[name]) for name, p in params.items())
    optimizer.restore()
    assert not optimizer.split and not any(own.any() for _, _, own in optimizer.tensors())


# Record 61: fewer parameters, other multipliers, beta2 and matrix shapes. Sizes are stand-ins.
RECORD_61 = tuple(
    ParamSpec(label=label, optim="normuon", comms="sharded", work=work, rows=rows)
    for label, work, rows in (("attn", 11, 12), ("mlp", 12, None))
) + tuple(
    ParamSpec(label=label, optim="adam", comms=comms, work=work, betas=betas, lr_mul=lr, wd_mul=wd)
    for label, comms, work, betas, lr, wd in (
        ("scalars", "replicated", 0, (0.9, 0.99), 5.0, 0.0),
        ("ve0", "sharded", 6, (0.75, 0.95), 75.0, 5.0),
        ("ve1", "sharded", 7, (0.75, 0.95), 75.0, 5.0),
        ("ve2", "sharded", 8, (0.75, 0.95), 75.0, 5.0),
        ("smear_gate", "replicated", 1, (0.9, 0.99), 0.01, 0.0),
        ("skip_gate", "replicated", 2, (0.9, 0.99), 0.05, 0.0),
        ("attn_gate_bank", "replicated", 3, (0.9, 0.99), 1.0, 1.0),
        ("ve_gate_bank", "replicated", 4, (0.9, 0.99), 1.0, 1.0),
        ("x0_lambdas", "replicated", 5, (0.65, 0.95), 5.0, 0.0),
        ("lm_head", "sharded", 9, (0.5, 0.95), 1.0, 150.0),
        ("embed", "sharded", 10, (0.5, 0.95), 1.0, 150.0),
    )
)
RECORD_61_WORK = (
    "scalars smear_gate skip_gate attn_gate_bank ve_gate_bank x0_lambdas ve0 ve1 ve2 lm_head embed attn mlp".split()
)


def record_61_params(seed: int) -> dict[str, torch.nn.Parameter]:
    shapes = dict(attn=(10, 48, 12), mlp=(12, 2, 48, 12), scalars=(40,), ve0=(64, 12), ve1=(64, 12), ve2=(64, 12))
    shapes |= dict(smear_gate=(1, 12), skip_gate=(1, 12), attn_gate_bank=(10, 6, 12), ve_gate_bank=(5, 6, 12))
    shapes |= dict(x0_lambdas=(11,), lm_head=(12, 64), embed=(64, 12))
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    made["embed"] = made["lm_head"].T.contiguous()
    return {name: torch.nn.Parameter(value) for name, value in made.items()}


def test_record_61_table_runs_with_its_own_order():
    params = record_61_params(0)
    optimizer = NorMuonAndAdam(params, RECORD_61, OptimConfig(normuon_beta2=0.95))
    assert [state.spec.label for state in optimizer.work_order] == RECORD_61_WORK
    assert optimizer.states["attn"].shard.shape == (40, 12, 12) and optimizer.states["mlp"].shard.shape == (24, 48, 12)
    before = {name: p.detach().clone() for name, p in params.items()}
    for step in range(4):
        for name, p in params.items():
            grad = record_61_params(step + 1 + 100 * (name == "embed"))[name].detach()
            p.grad = grad if p.grad is None else p.grad + grad
        optimizer.step(do_adam=is_adam_step(step))
        if step == 1:
            assert torch.equal(params["embed"], params["lm_head"].T)
            optimizer.split_embed()
    assert all(not torch.equal(p, before[name]) for name, p in params.items())
    assert not torch.equal(params["embed"], params["lm_head"].T)


def test_record_61_matrices_follow_the_formulas():
    """One attn matrix of the (10, 48, 12) bank moves as a 12 x 12 matrix of its own."""
    params = record_61_params(0)
    optimizer = NorMuonAndAdam(params, RECORD_61, OptimConfig(normuon_beta2=0.95))
    grads = {name: p.detach() for name, p in record_61_params(7).items()}
    for name, p in params.items():
        p.grad = grads[name].clone()
    w, g = params["attn"].detach()[3, 24:36].clone(), grads["attn"][3, 24:36]
    optimizer.step(do_adam=False, momentum=0.9)
    x = polar_express(torch.lerp(g, 0.1 * g, 0.9))
    mean_square = x.square().mean(1, keepdim=True)
    second = 0.05 * mean_square
    scaled = x * second.rsqrt()
    x = scaled * (x.norm() / scaled.norm())
    decay = torch.where(x * w >= 0, w * (1.2 * 0.023) * 0.023, 0.0)
    torch.testing.assert_close(
        params["attn"].detach()[3, 24:36], w - decay - 0.023 * x, rtol=0, atol=MUON_TOLERANCE * 10
    )


def test_works_alone_on_a_users_model():
    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 16, dtype=torch.float64)
    table = (
        ParamSpec(label="weight", optim="normuon", comms="sharded", work=1),
        ParamSpec(label="bias", optim="adam", comms="replicated", work=0, betas=(0.9, 0.99)),
    )
    weight = layer.weight[None]  # a bank of one matrix
    optimizer = NorMuonAndAdam({"weight": torch.nn.Parameter(weight.detach()), "bias": layer.bias}, table)
    bank = optimizer.states["weight"].param
    x, target = torch.randn(64, 16, dtype=torch.float64), torch.randn(64, 16, dtype=torch.float64)
    losses = []
    for _ in range(40):
        loss = (x @ bank[0].T + layer.bias - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step(do_adam=True)
    assert losses[-1] < 0.9 * losses[0]


def test_missing_gradients_are_skipped():
    params = golden_params()
    optimizer = NorMuonAndAdam(params)
    add_gradients(params, 0)
    params["smear_gate"].grad = None
    params["qk_bank"].grad = None
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step(do_adam=True)
    moved = {name for name, p in params.items() if not torch.equal(p, before[name])}
    assert moved == set(params) - {"smear_gate", "qk_bank"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p.pop("smear_gate"), "rows without a parameter: smear_gate"),
        (lambda p: p.update(extra=p["smear_gate"]), "parameters without a row: extra"),
    ],
)
def test_table_and_parameters_must_match(change, told):
    params = golden_params()
    change(params)
    with pytest.raises(ValueError, match=told):
        NorMuonAndAdam(params)


def test_table_rows_must_be_unique():
    with pytest.raises(ValueError, match="rows given twice: scalars"):
        NorMuonAndAdam(golden_params(), (*train_gpt.PARAM_TABLE, train_gpt.PARAM_TABLE[3]))


def test_parameters_must_be_contiguous():
    params = golden_params()
    params["embed"] = torch.nn.Parameter(params["lm_head"].detach().T)
    with pytest.raises(ValueError, match="embed must be contiguous"):
        NorMuonAndAdam(params)


def test_bank_must_divide():
    with pytest.raises(ValueError, match="_bank has .* do not divide among 7 ranks: pad it to"):
        NorMuonAndAdam(golden_params(), world_size=7)


def test_plain_optimizer_agrees_on_random_gradients():
    """Six steps with fresh gradients and another split step, against the optimizer written from the formulas."""
    params = golden_params()
    optimizer = NorMuonAndAdam(params)
    plain = PlainOptimizer({name: p.detach().clone() for name, p in params.items()}, split_step=3)
    generator = torch.Generator().manual_seed(3)
    for step in range(6):
        grads = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in params.items()}
        for name, p in params.items():
            p.grad = grads[name].clone() if p.grad is None else p.grad + grads[name]
        optimizer.step(do_adam=is_adam_step(step), lr_mul=1.3, momentum=0.9)
        if step == 3:
            optimizer.split_embed()
        plain.step(step, grads, 1.3, 0.9)
        for name, p in params.items():
            exact = plain.params[name]
            muon = optimizer.states[name].spec.optim == "normuon"
            budget = (10 * MUON_TOLERANCE if muon else 64 * EPS) * max(exact.abs().max().item(), 1.0)
            assert (p.detach() - exact).abs().max().item() <= budget, f"{name} after step {step}"
