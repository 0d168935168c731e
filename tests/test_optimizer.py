"""NorMuonAndAdam against the golden steps, against the formulas, on other tables and alone."""

import dataclasses
import math

import pytest
import torch
from helpers import golden, small_run
from plain_optimizer import POLAR_EXPRESS, PlainOptimizer, polar_express
from torch.utils._python_dispatch import TorchDispatchMode

import train_gpt
import triton_kernels as kernels
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


LONGER = small_run(scheduled_steps=30, extension_steps=6)


def native_params() -> dict[str, torch.nn.Parameter]:
    """The golden parameters in the trainer's dtypes, on the device that the tests run on."""
    full, params = {"scalars", "post_lambdas", "resid_lambdas", "_mudd_gate_scale"}, golden_params(torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {
        k: torch.nn.Parameter(p.detach().to(device, torch.float32 if k in full else p.dtype)) for k, p in params.items()
    }


def whole_schedule(optimizer: NorMuonAndAdam, after_step) -> None:
    """Every step of a short schedule with its learning rates and momenta; gradients are ones."""
    cfg = LONGER
    optimizer.make_gradients()
    for step in range(cfg.total_steps):
        for state in optimizer.states.values():
            state.param.grad += 1
        numbers = dict(lr_mul=train_gpt.lr_multiplier(cfg, step), momentum=train_gpt.muon_momentum(cfg, step))
        optimizer.step(do_adam=is_adam_step(step), **numbers)
        if step == train_gpt.split_step(cfg):
            optimizer.split_embed()
        after_step(step)


class Launches:
    """Stands before a kernel and notes all that Triton compiles by: numbers, and dtypes and alignment of tensors.

    On the CPU the kernel is not run: what it would compute decides nothing here.
    """

    def __init__(self, name: str, kernel, seen: set):
        self.name, self.kernel, self.seen = name, kernel, seen

    def __getitem__(self, grid):
        def launch(*args, **options):
            told = [(x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x for x in args]
            self.seen.add((self.name, *told, *sorted(options.items())))
            return self.kernel[grid](*args, **options) if torch.cuda.is_available() else None

        return launch


def test_nothing_compiles_anew_over_a_schedule(force_kernels, monkeypatch):
    """After a tied pair of steps and a pair around the split, no launch differs from all before it."""
    seen, count, uploaded = set(), [], []
    for name in [name for name in vars(kernels) if name.endswith("_kernel") and hasattr(vars(kernels)[name], "fn")]:
        monkeypatch.setattr(kernels, name, Launches(name, vars(kernels)[name], seen))
    optimizer = NorMuonAndAdam(native_params())
    whole_schedule(optimizer, lambda step: (count.append(len(seen)), uploaded.append(optimizer._device.clone())))
    names = {launch[0] for launch in seen}
    assert {"_adam_kernel", "_momentum_kernel", "_cautious_kernel", "_symmetric_kernel"} <= names, names
    after_split = train_gpt.split_step(LONGER) + 2
    assert count[1] > count[0] and set(count[after_split:]) == {len(seen)} and len(count) > after_split + 3
    assert count[1] == count[after_split - 2], "tied steps"
    assert not any(torch.equal(a, b) for a, b in zip(uploaded, uploaded[1:])), "the numbers did change"
    joined = [launch for launch in seen if launch[0] == "_adam_kernel" and launch[6] is not None]
    assert len(joined) == 2, "one launch for all replicated parameters of a dtype"


class Uploads(TorchDispatchMode):
    """Counts tensors made from numbers of Python, and copies into a tensor."""

    def __init__(self, target: torch.Tensor):
        super().__init__()
        self.target, self.made, self.copied = target, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.made += function is torch.ops.aten.lift_fresh.default
        self.copied += function is torch.ops.aten.copy_.default and args[0] is self.target
        return function(*args, **kwargs or {})


def test_a_step_uploads_once():
    optimizer = NorMuonAndAdam(native_params())
    with Uploads(optimizer._device) as uploads:
        whole_schedule(optimizer, lambda step: None)
    assert uploads.made == uploads.copied == LONGER.total_steps


@pytest.mark.parametrize("persistent", [True, False])
def test_replicated_parameters_are_joined(persistent):
    """One buffer a dtype for weights and gradients, whoever made the gradients; names and shapes of states stay."""
    params = golden_params()
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = NorMuonAndAdam(params)
    assert all(torch.equal(p, before[name]) for name, p in params.items())
    if persistent:
        optimizer.make_gradients()
        assert all(not p.grad.any() and p.grad.is_contiguous() for p in params.values())
    for p in params.values():
        (p * p).sum().backward()
    replicated = [state for state in optimizer.states.values() if state.spec.comms == "replicated"]
    (whole,) = {state.whole for state in replicated}
    storages = {(s.param.untyped_storage().data_ptr(), s.exp_avg.untyped_storage().data_ptr()) for s in replicated}
    assert len(replicated) == 12 and storages == {(whole.param.data_ptr(), whole.exp_avg.data_ptr())}
    inside = {state.param.grad.untyped_storage().data_ptr() == whole.param.grad.data_ptr() for state in replicated}
    assert inside == {persistent}
    optimizer.step(do_adam=True)
    assert not whole.param.grad.any() and all(not p.grad.any() for p in params.values())
    for name, p in params.items():
        state = optimizer.states[name]
        if state.is_adam and name not in ("lm_head", "embed"):
            torch.testing.assert_close(state.exp_avg, 2 * before[name] * (1 - state.spec.betas[0]))
            assert not torch.equal(p, before[name])
    shapes = {name: tuple(t.shape) for name, t in optimizer.snapshot()["tensors"].items()}
    assert shapes["scalars.exp_avg"] == (24,) and shapes["_mudd_gate_scale.exp_avg_sq"] == ()
    assert len(shapes) == 2 * 16 + 2 * 3


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


def test_the_docstrings_example_learns():
    """Its lines as they stand: the last one is the training loop's."""
    lines = [line[8:] for line in NorMuonAndAdam.__doc__.splitlines() if line.startswith(" " * 8)]
    *setup, step = "\n".join(lines).strip().splitlines()
    assert setup[0].startswith("table = ") and step.startswith("loss.backward(); optimizer.step(")
    torch.manual_seed(0)
    layer, inputs, targets, losses = torch.nn.Linear(16, 24), torch.randn(64, 16), torch.randn(64, 24), []
    names = vars(train_gpt) | {"layer": layer}
    exec("\n".join(setup), names)
    for _ in range(30):
        names["loss"] = (layer(inputs) - targets).square().mean()
        losses.append(names["loss"].item())
        exec(step, names)
    assert losses[-1] < 0.9 * losses[0] and not layer.weight.grad.any()


def test_missing_gradients_are_skipped():
    """A parameter without a gradient stays as it is, also where it lies between others that move."""
    params = golden_params()
    optimizer = NorMuonAndAdam(params)
    for j in range(2):  # moments are there when the gradients are not
        add_gradients(params, j)
        optimizer.step(do_adam=True)
    add_gradients(params, 2)
    without = ("smear_gate", "mudd_w2", "_mudd_gate_scale", "qk_bank", "value_embeds")
    for name in without:
        params[name].grad = None
    tensors = {name: own.clone() for name, _, own in optimizer.tensors()}
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step(do_adam=True)
    moved = {name for name, p in params.items() if not torch.equal(p, before[name])}
    assert moved == set(params) - set(without)
    assert {state.spec.label for state in optimizer.states.values() if state.is_adam and state.steps == 3} == {
        name for name in moved if optimizer.states[name].is_adam and name != "embed"
    }
    for name, state, own in optimizer.tensors():
        if state.spec.label in without:
            assert torch.equal(own, tensors[name]), name
    for p in params.values():
        p.grad = None
    optimizer.step(do_adam=True)  # nothing to do
    assert all(state.steps <= 3 for state in optimizer.states.values())


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


@pytest.mark.parametrize("word", [dict(optim="adamm"), dict(comms="shard"), dict(optim="normuon")])
def test_words_of_a_row_must_be_known(word):
    table = [dataclasses.replace(row, **word) if row.label == "scalars" else row for row in train_gpt.PARAM_TABLE]
    with pytest.raises(ValueError, match="optim or comms unknown: scalars"):
        NorMuonAndAdam(golden_params(), table)


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
