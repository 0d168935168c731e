"""What only a GPU can show of a step: graphs against eager, uploads in flight, memory and compilation after warm-up.

The model is the full plan at toy width in bf16, with FP8 where the GPU has it; micro-batches hold 1024 to 2048 tokens.
"""

import contextlib
import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from helpers import small_run, write_random_shards
from kernel_tools import GPU
from small_ops import OPS, run

import train_gpt
import triton_kernels as kernels
from train_gpt import NorMuonAndAdam, ParamSpec, Runtime, Trainer, TrainLoader

needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
LAST = 6  # first step of the last scheduled stage


def toy(**changes) -> train_gpt.RunConfig:
    """Eleven steps through all stages, 1024 to 2048 tokens a micro-batch."""
    base = small_run(val_tokens=32768, **changes)
    larger = lambda stage: dataclasses.replace(stage, batch_tokens=16 * stage.batch_tokens)  # noqa: E731
    stages, extension = tuple(map(larger, base.schedule.stages)), larger(base.schedule.extension)
    schedule = dataclasses.replace(base.schedule, stages=stages, extension=extension, val_chunk=4096)
    model = dataclasses.replace(base.model, head_dim=64, dtype=torch.bfloat16)
    return dataclasses.replace(base, model=model, schedule=schedule)


def trainer_of(cfg: train_gpt.RunConfig) -> Trainer:
    """With random weights in place of those that start at zero, so that every gradient is one."""
    fp8, _ = train_gpt.choose_fp8(cfg, torch.device("cuda", 0))
    runtime = Runtime(device=torch.device("cuda", 0))
    trainer = Trainer(cfg, train_gpt.data_plan(cfg, 8), runtime, "triton", fp8)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    trainer.load({"model": trainer.model.state_dict(), "optimizer": None})
    return trainer


@pytest.fixture(scope="module", autouse=True)
def data(tmp_path_factory):
    """A current folder with shards, for the whole file."""
    folder, before = tmp_path_factory.mktemp("gpu"), os.getcwd()
    write_random_shards(folder, toy(), seed=1, train_tokens=800_000)
    os.chdir(folder)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def compiled(data):
    """Names of the Triton kernels that this file makes the process compile or load, as they come."""
    names, owner = [], kernels.triton.runtime.jit.JITFunction
    compile_ = owner._do_compile  # called where a kernel has not met such arguments before
    owner._do_compile = lambda self, *given, **named: names.append(self.fn.__name__) or compile_(self, *given, **named)
    yield names
    owner._do_compile = compile_


@pytest.fixture(scope="module")
def warm(compiled):
    """A trainer after its warm-up."""
    trainer = trainer_of(toy())
    trainer.warm_up(SimpleNamespace(say=lambda text: None))
    return trainer


def batches_of(trainer: Trainer, step: int) -> list[train_gpt.Batch]:
    with contextlib.closing(TrainLoader(trainer.cfg, trainer.plan, trainer.runtime, first_step=step)) as loader:
        return next(loader)


@needs_gpu
def test_after_the_warm_up_nothing_is_compiled_captured_or_allocated(warm, compiled):
    """Every step of the schedule, across stage changes and the split: counts of segments, not of their tensors."""
    counters = ("segment.all.allocated", "reserved_bytes.all.current", "num_alloc_retries", "num_ooms")
    counted = lambda: {name: torch.cuda.memory_stats()[name] for name in counters}  # noqa: E731
    assert compiled, "the warm-up compiles, and it shows here"
    seen, graphs, before = len(compiled), len(warm.micro_step.graphs), counted()
    with contextlib.closing(TrainLoader(warm.cfg, warm.plan, warm.runtime)) as loader:
        for step in range(warm.cfg.total_steps):
            loss = warm.train_step(step, next(loader))
            assert counted() == before, f"step {step} took new memory from the GPU"
            assert not compiled[seen:], f"step {step} compiled"
    assert len(warm.micro_step.graphs) == graphs
    assert loss.isfinite()
    warm.validate(warm.cfg.total_steps)
    assert not compiled[seen:], "the last validation compiled"


@needs_gpu
@pytest.mark.parametrize("step", [0, LAST])
def test_a_replayed_graph_gives_the_eager_gradients(warm, step):
    """Two batches of one shape through one graph. Where eager repeats itself to the bit, so does the graph."""
    cfg, parameters = warm.cfg, dict(warm.model.named_parameters())
    warm.enter(step)
    view = train_gpt.view_at(cfg, step, attention=warm.attention, fp8=warm.fp8)
    weights = torch.tensor(train_gpt.mtp_weights(cfg, step), device="cuda")

    def gradients(micro_step, batch) -> dict[str, torch.Tensor]:
        for tensor in (*parameters.values(), *warm.model.folded):
            tensor.grad.zero_()
        loss = micro_step(batch, view, weights)
        warm.model.unfold()  # what folded matrices gathered goes on to banks and lambdas
        return {"loss": loss.clone()} | {name: parameter.grad.clone() for name, parameter in parameters.items()}

    one, other, *_ = batches_of(warm, step)
    warm.micro_step(one, view, weights)  # captured, if the schedule did not do so
    seen = []
    for batch in (one, other, one):
        eager, again = (gradients(warm.micro_step._run, batch) for _ in range(2))
        replayed = gradients(warm.micro_step, batch)
        for name, exact in eager.items():
            if torch.equal(exact, again[name]):
                assert torch.equal(replayed[name], exact), f"{name}: {(replayed[name] - exact).abs().max()}"
            unit = torch.finfo(exact.dtype).eps
            close = dict(rtol=0, atol=4 * unit * exact.float().abs().max().item())
            torch.testing.assert_close(replayed[name], exact, **close, msg=name)
        assert all(exact.any() for exact in eager.values()), [name for name, exact in eager.items() if not exact.any()]
        seen.append(replayed)
    assert all(torch.equal(a, b) for a, b in zip(seen[0].values(), seen[2].values())), "the graph keeps no batch"
    assert not torch.equal(seen[0]["lm_head"], seen[1]["lm_head"])


@needs_gpu
def test_an_upload_in_flight_is_not_overwritten():
    """The host runs two steps ahead of a busy GPU; each step still gets its own learning rate and momentum."""
    table = (
        ParamSpec(label="matrix", optim="normuon", comms="sharded", work=0),
        ParamSpec(label="table", optim="adam", comms="sharded", work=1, betas=(0.9, 0.95)),
    )
    shapes = {"matrix": (4, 64, 128), "table": (64, 128)}

    def updated(busy: bool) -> tuple[dict[str, torch.Tensor], bool]:
        torch.manual_seed(0)
        given = {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in shapes.items()}
        parameters = {name: torch.nn.Parameter(value.clone()) for name, value in given.items()}
        optimizer, idle = NorMuonAndAdam(parameters, table), torch.cuda.Event()
        torch.cuda.synchronize()
        if busy:
            torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
        idle.record()
        for lr, momentum in ((1.0, 0.85), (100.0, 0.95), (0.01, 0.9)):
            for name, parameter in parameters.items():
                parameter.grad = given[name].clone()
            optimizer.step(do_adam=True, lr_mul=lr, momentum=momentum)
            if not busy:
                torch.cuda.synchronize()
        ahead = not idle.query()
        return {name: parameter.detach() for name, parameter in parameters.items()}, ahead

    (alone, _), (first, _), (second, ahead) = (updated(busy) for busy in (False, True, True))
    assert ahead, "the GPU was idle before the host had asked for all steps: nothing was shown"
    for name in shapes:
        assert torch.equal(first[name], alone[name]) and torch.equal(second[name], alone[name]), name


@needs_gpu
def test_micro_splits_lower_the_peak():
    """Of a step of the largest stage, over what is held anyway."""
    peaks = {}
    for splits in (1, 2, 4):
        trainer = trainer_of(toy(micro_splits=splits))
        batches = batches_of(trainer, LAST)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        trainer.train_step(LAST, batches)
        torch.cuda.synchronize()
        peaks[splits] = torch.cuda.max_memory_allocated() - held
        del trainer, batches
        torch.cuda.empty_cache()
    assert peaks[4] < peaks[2] < peaks[1] and peaks[4] < 0.6 * peaks[1], peaks


@pytest.mark.parametrize("name", OPS)
def test_what_the_memory_checker_runs(name, device):
    run(name, device)
