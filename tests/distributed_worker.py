"""One rank of test_distributed.py: runs the parts it is asked for and saves what rank 0 saw of all ranks."""

import dataclasses
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from helpers import randomize, small_run
from plain_optimizer import PlainOptimizer

import train_gpt
from exchange import RowExchange
from train_gpt import NorMuonAndAdam, ParamSpec, Runtime, Trainer, TrainLoader, is_adam_step, split_step

PIECES = train_gpt.PIECES
ROWS = 512  # of the bigram table in follow_plain


def gathered(value: object, runtime: Runtime) -> list:
    """The value of every rank."""
    everyone = [value] * runtime.world_size
    if runtime.world_size > 1:
        dist.all_gather_object(everyone, value)
    return everyone


def train(runtime: Runtime) -> dict:
    """A whole small run, with a bigram table large enough for its touched rows to travel alone."""
    base = small_run()
    cfg = dataclasses.replace(base, model=dataclasses.replace(base.model, bigram_rows=8192))
    plan = train_gpt.data_plan(cfg, runtime.pieces)
    trainer = Trainer(cfg, plan, runtime, "reference", fp8=False)
    randomize(trainer.model, size=0.02)
    trainer.model.refresh(fp8=False)
    model, optimizer = trainer.model, trainer.optimizer
    with torch.no_grad():
        model.embed.copy_(model.lm_head.T)
        for name, real in (("qk_bank", 60), ("vo_bank", 20)):  # padding must be zero to stay zero
            getattr(model, name)[real:] = 0
    loader, losses, tied, val = TrainLoader(cfg, plan, runtime), [], [], []
    for step in range(cfg.total_steps):
        loss = trainer.train_step(step, next(loader)).double()
        if runtime.world_size > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
        tied.append(torch.equal(model.embed, model.lm_head.T))
    loader.close()
    val = [trainer.validate(cfg.total_steps - 1), trainer.validate(cfg.total_steps)]
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    split = split_step(cfg)
    assert is_adam_step(split) and optimizer.split
    exchange = optimizer.states["bigram_embed"].exchange
    result = {"losses": losses, "val": val, "tied": tied, "split_at": split, "params": params}
    return result | {"bytes": (exchange.bytes, exchange.dense_bytes) if exchange else None, "told": str(exchange)}


# --- the optimizer beside the plain one


def small_params(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every parameter of the table in fp64; all that is sharded divides by 8."""
    shapes = dict(qk_bank=(8, 6, 16), vo_bank=(8, 16, 16), mlp_bank=(4, 2, 24, 16), scalars=(24,), smear_gate=(1, 12))
    shapes |= dict(ve_gate_bank=(5, 6, 12), lm_head=(16, 40), bigram_embed=(ROWS, 16), post_lambdas=(11, 2))
    shapes |= dict(
        resid_lambdas=(11, 2), value_embeds=(40, 16), embed=(40, 16), mudd_w1=(2, 80, 16), mudd_w2=(2, 14, 80)
    )
    shapes |= dict(mudd_b2=(2, 14), mudd_gate_w1=(2, 8, 16), mudd_gate_w2=(2, 41, 8), mudd_gate_b2=(2, 41))
    shapes |= dict(_mudd_gate_scale=())
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def piece_gradients(step: int, piece: int, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What one eighth of a step's batch gives: gradients, and the rows of the bigram table that it touches."""
    seed = 100 + PIECES * step + piece
    grads, generator = small_params(seed), torch.Generator().manual_seed(seed)
    touched = torch.cat((torch.randint(ROWS, (rows - 1,), generator=generator), torch.tensor([ROWS - 1]))).int()
    untouched = torch.ones(ROWS, dtype=torch.bool)
    untouched[touched.long()] = False
    grads["bigram_embed"][untouched] = 0
    return grads, touched


def follow_plain(runtime: Runtime, comms: str, rows: int, persistent: bool, without: tuple[str, ...]) -> dict:
    """Seven steps, the split after the fourth. Errors by parameter, as shares of what is allowed, and bytes sent.

    `comms` is the bigram table's; a piece touches so many `rows` of it. persistent: gradients stay where they are.
    """
    table = tuple(
        dataclasses.replace(row, comms=comms) if row.label == "bigram_embed" else row for row in train_gpt.PARAM_TABLE
    )
    params = {name: torch.nn.Parameter(p.to(runtime.device)) for name, p in small_params().items()}
    optimizer = NorMuonAndAdam(params, table, rank=runtime.rank, world_size=runtime.world_size)
    if persistent:
        optimizer.make_gradients()
    plain, errors, mine = (
        PlainOptimizer(small_params(), split_step=3),
        {},
        range(runtime.rank, PIECES, runtime.world_size),
    )

    def compare(name: str, got: torch.Tensor, exact: torch.Tensor) -> None:
        error = (got.cpu().reshape(exact.shape) - exact).abs().max().item()
        errors[name] = max(errors.get(name, 0.0), error / (1e-12 * max(exact.abs().max().item(), 1.0)))

    for step in range(7):
        pieces = [piece_gradients(step, piece, rows) for piece in range(PIECES)]
        mean = {name: sum(grads[name] for grads, _ in pieces) / PIECES for name in params if name not in without}
        optimizer.touched("bigram_embed", [pieces[k][1].to(runtime.device) for k in mine], is_adam_step(step))
        for name in mean:
            own = sum(pieces[k][0][name] for k in mine).to(runtime.device) / len(mine)
            if persistent:
                params[name].grad += own
            else:
                params[name].grad = own if params[name].grad is None else params[name].grad + own
        sent = optimizer.sent
        optimizer.step(do_adam=is_adam_step(step), lr_mul=1.3 - step / 10, momentum=0.9 + step / 100)
        if step == 3:
            optimizer.split_embed()
        plain.step(step, mean, 1.3 - step / 10, 0.9 + step / 100)
        for name, p in params.items():
            compare(name, p.detach(), plain.params[name])
        assert torch.equal(params["embed"], params["lm_head"].T) == (1 <= step < 5), step
        assert not any(p.grad.any() for name, p in params.items() if name in mean) or not is_adam_step(step)
    for name, state in plain.adam.items():
        own = optimizer.states[name]
        assert own.steps == state.count == (0 if name in without else 3), name
        compare(f"{name}.exp_avg", optimizer.gathered(own, own.exp_avg), state.m)
        compare(f"{name}.exp_avg_sq", optimizer.gathered(own, own.exp_avg_sq), state.v)
    # The last step was an even one: NorMuon alone.
    banks = sum(params[name].nbytes for name in ("qk_bank", "vo_bank", "mlp_bank"))
    assert optimizer.sent - sent == 2 * banks // runtime.world_size * (runtime.world_size - 1)
    exchange = optimizer.states["bigram_embed"].exchange
    bytes = (exchange.bytes, exchange.dense_bytes) if exchange else None
    return {
        "errors": gathered(errors, runtime),
        "bytes": bytes,
        "params": {k: p.detach().cpu() for k, p in params.items()},
    }


def follow_plain_all_ways(runtime: Runtime) -> dict:
    return {
        "sparse": follow_plain(runtime, "sparse", 5, True, ()),
        "sparse, new gradients, one missing": follow_plain(runtime, "sparse", 5, False, ("resid_lambdas", "mudd_b2")),
        "sparse, too many rows": follow_plain(runtime, "sparse", 8 * ROWS, True, ()),
        "dense": follow_plain(runtime, "sharded", 5, False, ()),
    }


def reduce_rows(runtime: Runtime) -> dict:
    """Largest error of a mean by touched rows in units of its dtype's precision; rank 2 of 4 and 8 touches nothing."""
    errors, (rank, world_size) = {}, (runtime.rank, runtime.world_size)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(7)
        whole = torch.zeros(world_size, 64 * world_size, 24, dtype=dtype)
        for r in range(world_size):
            rows = 4 * torch.randint(16 * world_size, (0 if r == 2 else 9,), generator=generator)
            rows[:1] = 0  # several ranks touch this one
            whole[r, rows] = torch.randn(len(rows), 24, generator=generator, dtype=torch.float64).to(dtype)
        exact = whole.double().mean(0).chunk(world_size)[rank]
        grad = whole[rank].to(runtime.device)
        exchange = RowExchange(grad, rank, world_size)
        exchange.touch(torch.arange(len(grad), device=grad.device)[grad.any(1)], last=True)
        works = exchange.send(grad)
        assert works and exchange.bytes < exchange.dense_bytes
        for work in works:
            work.wait()
        own = grad.chunk(world_size)[rank]
        exchange.add(own)
        assert not exchange.mask.any() and exchange.received is None
        errors[str(dtype)] = ((own.double().cpu() - exact).abs().max() / torch.finfo(dtype).eps).item()
    return {"errors": gathered(errors, runtime)}


# --- errors


def told(action: Callable[[], object], runtime: Runtime) -> tuple[list[str], float]:
    """What every rank is told, and after how many seconds the last one is."""
    began = time.perf_counter()
    try:
        action()
        sentence = "no error"
    except (RuntimeError, ValueError) as error:
        sentence = f"{type(error).__name__}: {error}"
    return gathered(sentence, runtime), time.perf_counter() - began


def bad_uses(runtime: Runtime) -> dict[str, tuple[list[str], float]]:
    ranks = dict(rank=runtime.rank, world_size=runtime.world_size)
    shapes = dict(qk_bank=(8, 4, 4), smear_gate=(3,), table=(16, 4))
    table = (
        ParamSpec(label="qk_bank", optim="normuon", comms="sharded", work=1),
        ParamSpec(label="smear_gate", optim="adam", comms="replicated", work=0, betas=(0.9, 0.99)),
        ParamSpec(label="table", optim="adam", comms="sparse", work=2, betas=(0.9, 0.99)),
    )

    def make(rows: tuple[ParamSpec, ...] = table, **other: tuple[int, ...]) -> NorMuonAndAdam:
        tensors = {name: torch.ones(shape, device=runtime.device) for name, shape in (shapes | other).items()}
        return NorMuonAndAdam({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, rows, **ranks)

    def lacks(labels: tuple[str, ...], first: tuple[str, ...] | None = None) -> None:
        """A step without these gradients on rank 1; another one with `first` missing comes before it."""
        optimizer = make()
        for missing in (first, labels) if first is not None else (labels,):
            for label, state in optimizer.states.items():
                gone = runtime.rank == 1 and label in missing
                state.param.grad = None if gone else torch.ones_like(state.param)
            if missing is first or first is None or runtime.rank == 1:  # the others would wait for this rank's end
                optimizer.step(do_adam=True)

    normuon = dataclasses.replace(table[2], optim="normuon", betas=None)
    uses = {
        "missing": lambda: lacks(("smear_gate", "table")),
        "gone": lambda: lacks(("smear_gate",), first=()),
        "no row": lambda: make(table[:2]),
        "no parameter": lambda: make((*table, dataclasses.replace(table[1], label="resid_lambdas"))),
        "bank": lambda: make(qk_bank=(8 * runtime.world_size + 1, 4, 4)),
        "rows": lambda: make(table=(8 * runtime.world_size + 1, 4)),
        "vector": lambda: make(table=(8 * runtime.world_size,)),
        "no table": lambda: make((*table[:2], normuon), table=(8, 4, 4)),
    }
    return {name: told(use, runtime) for name, use in uses.items()}


PARTS = {"train": train, "plain": follow_plain_all_ways, "rows": reduce_rows, "bad": bad_uses}


def main(out: str, parts: list[str]) -> None:
    rank, local_rank, world_size = train_gpt.launched_ranks()
    runtime = train_gpt.start_runtime(local_rank, rank, world_size)
    result = {part: PARTS[part](runtime) for part in parts if world_size > 1 or part in ("train", "plain")}
    if runtime.main:
        torch.save(result | {"device": runtime.device.type}, out)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2:])
