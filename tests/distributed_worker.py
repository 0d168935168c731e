"""One rank of test_distributed.py: trains a small fp64 model and saves what rank 0 saw."""

import sys

import torch
import torch.distributed as dist
from helpers import randomize, small_run

import train_gpt
from train_gpt import RunConfig, Runtime, Trainer, TrainLoader, is_adam_step, split_step


def train(cfg: RunConfig, runtime: Runtime) -> dict:
    plan = train_gpt.data_plan(cfg, runtime.pieces)
    trainer = Trainer(cfg, plan, runtime, "reference", fp8=False)
    randomize(trainer.model, size=0.02)
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
    return {"losses": losses, "val": val, "tied": tied, "split_at": split, "params": params}


def missing_gradient(runtime: Runtime) -> list[str]:
    """What every rank is told where rank 1 lacks one gradient."""
    generator = torch.Generator().manual_seed(0)
    bank = torch.nn.Parameter(torch.randn(8, 4, 4, generator=generator, dtype=torch.float64))
    gate = torch.nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
    spec = train_gpt.ParamSpec
    table = (
        spec(label="qk_bank", optim="normuon", comms="sharded", work=1),
        spec(label="smear_gate", optim="adam", comms="replicated", work=0, betas=(0.9, 0.99)),
    )
    optimizer = train_gpt.NorMuonAndAdam(
        {"qk_bank": bank, "smear_gate": gate}, table, rank=runtime.rank, world_size=runtime.world_size
    )
    bank.grad = torch.ones_like(bank)
    gate.grad = None if runtime.rank == 1 else torch.ones_like(gate)
    try:
        optimizer.step(do_adam=True)
        told = "no error"
    except RuntimeError as error:
        told = str(error)
    everyone: list[str] = [""] * runtime.world_size
    dist.all_gather_object(everyone, told)
    return everyone


def main(out: str) -> None:
    rank, local_rank, world_size = train_gpt.launched_ranks()
    runtime = train_gpt.start_runtime(local_rank, rank, world_size)
    result = train(small_run(), runtime)
    result["missing"] = missing_gradient(runtime) if world_size > 1 else []
    if runtime.main:
        torch.save(result, out)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
