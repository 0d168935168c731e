"""train_gpt.py: train a GPT-2-small-sized model to 3.28 on FineWeb as fast as 1 to 8 GPUs allow, or a toy on any CPU.

    torchrun --nproc_per_node=8 train_gpt.py             the record run (see run.sh)
    python train_gpt.py preset=demo                      the same code at toy width, no GPU needed
    python train_gpt.py show=plan|gates|params|schedule  print a table and stop

Every run writes logs/<run_id>.txt: its own source, its configuration, and the field's step lines.

Jump with: grep -n '^# === §' train_gpt.py
  §1 Config      layer plan, gate lanes, parameter table, stages, presets: every number one may tune
  §2 Runtime     ranks, devices, the log's header, what must agree to resume
  §3 Operations  norm, YaRN and rotary, attention dispatch, gates
  §4 Model       parameter banks, GPT
  §5 Optimizer   NorMuonAndAdam: scatter, work, finish, split
  §6 Data        shards, BOS-aligned batches, validation batches, bigram hash
  §7 Schedule    pure functions of the step
  §8 Training    warm-up, timed loop, validation, checkpoints
  §9 main

A micro-batch's time on an H200, stage 2: products 41%, head 17%, attention 14%, relu^2 13%, residual 9%, the rest 6%.

Shape letters: T packed tokens, D model dim, N heads, H head dim, F mlp dim, V padded vocabulary, S document boundaries.
"""

import bisect
import contextlib
import dataclasses
import difflib
import gc
import glob
import hashlib
import importlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import checkpoints
import dc_triton_kernels
import preflight
import triton_kernels as kernels
from checkpoints import Stopped, copy_into
from exchange import RowExchange, agree, all_gather, reduce_scatter
from preflight import RunLog, choose_fp8, format_table, launched_ranks

# === §1 Config ===
# Owns every number one may tune, but for first values of whole parameters (parameter_plan, §4) and YaRN's (yarn, §3).
# What changes the mathematics (plan, lanes, parameter rows, stages) needs a new baseline; preset sizes, paths do not.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One row of the layer plan. Slots in the banks are derived from the row order."""

    window: str = "short"  # attention window: "short", "long", or "none" for a layer without attention
    paired: bool = False  # heads h and h + N/2 share one stream of 2T positions
    key_offset: bool = False  # second half of every key comes from the token before
    value_embed: int | None = None  # plane of value_embeds added to V; planes count from 0, a layer each
    reads: str = ""  # attention reads this cache instead of the current residual
    gates: tuple[str, ...] = ()  # gate lanes the layer uses: names of GATES below
    gate_from_here: bool = False  # the post gate is computed from the residual at the top of this layer
    dc_mlp: bool = False  # DC weights from an MLP of their own (v1) instead of the lanes dc_w1 and dc_w2
    mudd: bool = False  # mixing coefficients come from the MUDD block instead of the lambdas
    skip_from: str = ""  # cache added by the gated skip connection
    save_as: str = ""  # name under which the layer's output is kept


INJECT = ("x0", "bigram")  # per-token gates of the embedding and bigram streams

# v2 and v3 (record 2026-05-27, MUDD gate + DC). The first cache, "embed", is the input of layer 0.
PLAN = (
    LayerSpec(paired=True, gates=INJECT),
    LayerSpec(value_embed=0, gates=("xsa", *INJECT)),
    LayerSpec(paired=True, value_embed=1, gates=INJECT),
    LayerSpec(window="long", key_offset=True, gates=("xsa", "attn", *INJECT), save_as="early"),
    LayerSpec(gates=("xsa", *INJECT), gate_from_here=True),
    LayerSpec(paired=True, gates=INJECT),
    LayerSpec(window="none", gates=("skip",), skip_from="early"),
    LayerSpec(gates=("xsa", *INJECT), save_as="mid"),
    LayerSpec(value_embed=2, reads="mid", gates=INJECT),
    LayerSpec(paired=True, value_embed=3, reads="mid", gates=INJECT, save_as="late"),
    LayerSpec(window="long", key_offset=True, value_embed=4, reads="mid", gates=("attn", "dc_w1", "dc_w2"), mudd=True),
)
# v1 made its post gate two layers later, injected into the last layer by gate lanes, and had an MLP for the DC weights.
V1_PLAN = tuple(
    dataclasses.replace(
        spec,
        gate_from_here=i == 6,
        gates={10: ("attn", *INJECT)}.get(i, spec.gates),
        dc_mlp=i == 10,
    )
    for i, spec in enumerate(PLAN)
)


class Gate(NamedTuple):
    """One kind of gate lane: `width` lanes a layer (0 stands for one per head) that start at the value `init`."""

    name: str
    width: int
    init: float | None  # None: ModelConfig.bigram_init


class Lane(NamedTuple):
    """`width` columns of a gate's output, read under the key (name, layer)."""

    name: str
    layer: int
    width: int
    init: float  # value before training; the stored bias is init / scale


# Kinds on one row take turns layer by layer; rows follow each other. Together with the plan this fixes every lane.
GATES = (
    (Gate("xsa", 0, 0.0),),
    (Gate("attn", 0, 0.25),),
    (Gate("x0", 1, 0.0), Gate("bigram", 1, None)),
    (Gate("skip", 1, 0.5),),
    (Gate("dc_w1", 0, 1.0),),
    (Gate("dc_w2", 0, 0.0),),
)
MUDD_SCALE = 0.1  # constant; biases are stored as init / scale

# MUDD block of the last layer: per-token coefficients. Layer numbers here are for show=gates; the caches embed and mid
# are read by name, in GPT.residual and GPT.extra_values.
MUDD_LANES = (
    Lane("value", 10, 3, 0.0),  # of the caches embed, mid and the residual, added to V
    Lane("residual", 10, 3, 0.0),  # of the same three, added to the residual before attention
    Lane("value_embed", 10, 2, 2.0),  # of the value embedding, one for each half of the heads
    Lane("attn_resid", 10, 1, math.sqrt(1.1)),
    Lane("attn_out", 10, 1, 1.0),
    Lane("x0", 10, 1, 0.0),  # of the cache embed
    Lane("bigram", 10, 1, 0.05),
    Lane("mlp_resid", 10, 1, math.sqrt(1.1)),
    Lane("mlp_out", 10, 1, 1.0),
)
# MUDD block after the last layer: what each earlier stream (a cache, or value-embedding plane 0) adds to the output.
OUTPUT_LANES = tuple(
    Lane(name, 11, 1, init)
    for name, init in (("embed", 0.0), ("mid", -0.5), ("late", 0.0), ("value_embed", 0.0), ("early", 0.0))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One row of the parameter table. Row order = order in which gradient reductions launch (scatter_order)."""

    label: str
    optim: str  # "normuon" (every step) or "adam" (odd steps, on the sum of two steps' gradients)
    comms: str  # "sharded" (reduce-scatter, all-gather), "sparse" (touched rows, all-gather), "replicated" (all-reduce)
    work: int  # place in the order of updates: quick ones first, matrices last; replicated Adam rows go together
    betas: tuple[float, float] | None = None  # Adam only
    lr_mul: float = 1.0
    wd_mul: float = 1.0
    rows: int | None = None  # NorMuon: rows of one matrix, where that is not the parameter's second-last dim
    slot_lr: tuple[float, ...] = (1.0,)  # NorMuon: lr factor by index of the matrix in the bank, repeating


def _adam(label: str, comms: str, work: int, betas: tuple[float, float], lr_mul: float, wd_mul: float) -> ParamSpec:
    return ParamSpec(label=label, optim="adam", comms=comms, work=work, betas=betas, lr_mul=lr_mul, wd_mul=wd_mul)


PARAM_TABLE = (
    ParamSpec(label="qk_bank", optim="normuon", comms="sharded", work=16),
    ParamSpec(label="vo_bank", optim="normuon", comms="sharded", work=17),
    ParamSpec(label="mlp_bank", optim="normuon", comms="sharded", work=18, slot_lr=(1.0, 2.0)),  # up, down
    _adam("scalars", "replicated", 0, (0.9, 0.99), 5.0, 0.0),
    _adam("smear_gate", "replicated", 1, (0.9, 0.99), 0.01, 0.0),
    _adam("ve_gate_bank", "replicated", 2, (0.9, 0.99), 1.0, 1.0),
    _adam("lm_head", "sharded", 14, (0.5, 0.95), 1.0, 150.0),  # before embed: the tied gradients meet here
    _adam("bigram_embed", "sparse", 11, (0.75, 0.95), 75.0, 5.0),
    _adam("post_lambdas", "replicated", 6, (0.9, 0.95), 1.0, 0.0),
    _adam("resid_lambdas", "replicated", 7, (0.9, 0.95), 5.0, 0.0),
    _adam("value_embeds", "sharded", 10, (0.75, 0.95), 75.0, 5.0),
    _adam("embed", "sharded", 15, (0.5, 0.95), 1.0, 150.0),
    _adam("mudd_w1", "replicated", 12, (0.9, 0.99), 0.25, 1.0),
    _adam("mudd_w2", "replicated", 8, (0.9, 0.99), 0.25, 1.0),
    _adam("mudd_b2", "replicated", 3, (0.9, 0.99), 0.25, 0.0),
    _adam("mudd_gate_w1", "replicated", 13, (0.9, 0.99), 0.1, 1.0),
    _adam("mudd_gate_w2", "replicated", 9, (0.9, 0.99), 0.1, 1.0),
    _adam("mudd_gate_b2", "replicated", 4, (0.9, 0.99), 0.1, 0.0),
    _adam("_mudd_gate_scale", "replicated", 5, (0.9, 0.99), 0.1, 0.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """What all rows of the parameter table share."""

    adam_lr: float = 0.008
    adam_eps: float = 1e-10
    adam_wd: float = 0.005  # decay is lr * lr * wd: see adam_update_
    normuon_lr: float = 0.023
    normuon_wd: float = 1.2
    normuon_beta2: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of the model; the defaults are v3's."""

    plan: tuple[LayerSpec, ...] = PLAN
    heads: int = 6
    head_dim: int = 128
    vocab_size: int = 50257  # padded to the next multiple of 128; the padding columns take part in the softmax
    bigram_rows: int = 377280
    sign_rows: int = 8192  # rows of the +-1 table that tells colliding bigrams apart; 0: no sign trick
    bigram_init: float = 0.05  # first value of the bigram gates; that of MUDD_LANES is its own
    gate_scale: float = 0.1  # multiplies every gate's output
    learned_gate_scale: bool = True
    fp8_mlp: bool = True  # up projection in FP8 while training, where FP8 is on at all
    gate_hidden: int = 64
    smear_dims: int = 12  # leading dims that feed the smear gate; value-embedding gates read half as many of each input
    dc_window: int = 112  # keys per query in the DC correction, itself included
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        known = {"short", "long", "none", "", *(gate.name for kinds in GATES for gate in kinds)}
        words = {word for spec in self.plan for word in (spec.window, spec.reads, spec.skip_from, *spec.gates)}
        if unknown := words - known - {spec.save_as for spec in self.plan}:
            raise ValueError(f"the plan names {sorted(unknown)}, which are no window, gate or cache: correct its rows.")

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def vocab_padded(self) -> int:
        return kernels.round_up(self.vocab_size, 128)

    @property
    def value_planes(self) -> int:
        return sum(spec.value_embed is not None for spec in self.plan)

    @property
    def attn_layers(self) -> tuple[int, ...]:
        """Layers with attention, in bank order."""
        return tuple(i for i, spec in enumerate(self.plan) if spec.window != "none")

    def gate_lanes(self, post: bool) -> tuple[Lane, ...]:
        """Lanes of the pre gate (computed from x0) or of the post gate (computed inside the plan)."""
        start = next(i for i, spec in enumerate(self.plan) if spec.gate_from_here)
        layers = range(start, len(self.plan)) if post else range(start)
        return tuple(
            Lane(gate.name, i, gate.width or self.heads, self.bigram_init if gate.init is None else gate.init)
            for kinds in GATES
            for i in layers
            for gate in kinds
            if gate.name in self.plan[i].gates
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the schedule. Windows count blocks of ScheduleConfig.window_block tokens."""

    batch_tokens: int  # per optimizer step, over all ranks
    max_doc_len: int  # longer documents are cut, their tails discarded
    short: int
    long: int
    lr_mul: float
    mtp: tuple[tuple[float, float], ...]  # weights (at the start, at the end) of the next token and each further one


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Equal thirds (one per stage) of the scheduled steps, then the extension; see §7."""

    stages: tuple[Stage, ...] = (
        Stage(
            batch_tokens=131072, max_doc_len=896, short=1, long=3, lr_mul=1.0, mtp=((1.0, 1.0), (0.5, 0.5), (0.25, 0.0))
        ),
        Stage(batch_tokens=262144, max_doc_len=2048, short=3, long=7, lr_mul=1.52, mtp=((1.0, 1.0), (0.5, 0.0))),
        Stage(batch_tokens=393216, max_doc_len=2048, short=5, long=11, lr_mul=1.73, mtp=((1.0, 1.0),)),
    )
    extension: Stage = Stage(batch_tokens=393216, max_doc_len=2048, short=6, long=13, lr_mul=1.0, mtp=((1.0, 1.0),))
    window_block: int = 128  # tokens
    final_long: int = 20  # long window of the last validation, in blocks; YaRN is not rescaled for it
    cooldown: float = 0.60  # share of the scheduled steps
    lr_floor: float = 0.15  # absolute: not multiplied by a stage's lr_mul
    momentum: tuple[float, float] = (0.85, 0.95)  # NorMuon momentum: low ends, plateau
    momentum_warmup: int = 300  # steps
    momentum_cooldown: int = 50  # steps
    val_chunk: int = 262144  # tokens of one validation sequence


class Variant(NamedTuple):
    """A published variant: rows of data only."""

    model: dict[str, object]
    scheduled_steps: int
    extension_steps: int
    table: tuple[ParamSpec, ...]


_V2_TABLE = tuple(row for row in PARAM_TABLE if row.label != "_mudd_gate_scale")
_V1_TABLE = tuple(
    new
    for row in _V2_TABLE
    for new in (
        dataclasses.replace(row, lr_mul=0.15) if row.label.startswith("mudd_gate_") else row,
        *(
            _adam(f"dc_w{k}_bank", "replicated", 2, (0.9, 0.99), 0.25, 0.0)
            for k in (1, 2)
            if row.label == "ve_gate_bank"
        ),
    )
)
_V2_MODEL = {"bigram_rows": 251520, "sign_rows": 0, "bigram_init": 0.025, "learned_gate_scale": False, "fp8_mlp": False}
VARIANTS = {
    "v3": Variant({}, 1275, 15, PARAM_TABLE),
    "v2": Variant(_V2_MODEL, 1315, 10, _V2_TABLE),
    "v1": Variant(_V2_MODEL | {"plan": V1_PLAN, "gate_scale": 0.05}, 1315, 20, _V1_TABLE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A resolved run. Scalar fields are the key=value options of the command line."""

    preset: str = "record"
    variant: str = "v3"
    scheduled_steps: int = 1275  # optimizer steps before the extension
    extension_steps: int = 15  # further steps at the learning-rate floor with the widest windows
    val_every: int = 250  # steps between validations
    val_tokens: int = 10_485_760  # tokens of one validation
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob, relative to DATA_PATH
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"
    seed: int = 0  # of the initialisation; data order is the files' order
    epochs: int = 1  # passes over the training files before the data counts as used up
    micro_splits: int = 1  # cut each micro-batch into so many pieces to save memory
    vocab_size: int = 50257  # token ids are below this
    bos_id: int = 50256  # token that starts every document
    fp8: str = "auto"  # auto|on|off
    attention: str = "auto"  # auto|triton|fa4|torch|reference
    checkpoint_every: int = 0  # steps (odd ones wait for the next), and before the last validation; 0: if interrupted
    resume: str = ""  # a checkpoint to go on from: its file, a run's name, or latest
    run_id: str = ""  # names the log; empty: a random one
    show: str = ""  # plan|gates|params|schedule: print that table and stop
    model: ModelConfig = field(default_factory=ModelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    table: tuple[ParamSpec, ...] = PARAM_TABLE

    @property
    def total_steps(self) -> int:
        return self.scheduled_steps + self.extension_steps


def _demo() -> RunConfig:
    """The eleven-layer plan at toy width on byte-level English; some two minutes on two idle CPU cores."""
    stages = tuple(
        dataclasses.replace(stage, batch_tokens=tokens, max_doc_len=doc)
        for stage, (tokens, doc) in zip(ScheduleConfig().stages, ((2048, 256), (4096, 512), (6144, 768)), strict=True)
    )
    return RunConfig(
        preset="demo",
        scheduled_steps=96,
        extension_steps=6,
        val_every=32,
        val_tokens=65_536,
        train_files="data/demo/demo_train_*.bin",
        val_files="data/demo/demo_val_*.bin",
        vocab_size=257,
        bos_id=256,
        epochs=2,
        model=ModelConfig(head_dim=16, vocab_size=257, bigram_rows=16384, sign_rows=512, dtype=torch.float32),
        schedule=ScheduleConfig(
            stages=stages,
            extension=dataclasses.replace(ScheduleConfig().extension, batch_tokens=6144, max_doc_len=768),
            window_block=16,
            momentum_warmup=20,
            momentum_cooldown=10,
            val_chunk=2048,
        ),
    )


PRESETS = {"record": RunConfig, "demo": _demo}
CHOICES = {
    "preset": tuple(PRESETS),
    "variant": tuple(VARIANTS),
    "fp8": ("auto", "on", "off"),
    "attention": ("auto", "triton", "fa4", "torch", "reference"),
    "show": ("", "plan", "gates", "params", "schedule"),
}
MINIMUM = {"val_every": 1, "val_tokens": 1, "epochs": 1, "micro_splits": 1, "vocab_size": 2, "scheduled_steps": 3}
MAXIMUM = {"scheduled_steps": 10**6, "extension_steps": 10**6, "epochs": 10**4, "micro_splits": 16, "seed": 2**32 - 1}
OPTIONS = {f.name: f.type for f in dataclasses.fields(RunConfig) if f.type in (int, str)}


def parse_options(argv: Iterable[str]) -> RunConfig:
    """Turn key=value words into a resolved RunConfig. Raises ValueError with one sentence."""
    given: dict[str, str] = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if key not in OPTIONS:
            bare = key.lstrip("-")
            near = [name for name in OPTIONS if bare and (name.startswith(bare) or bare in name.split("_"))]
            near = near[:3] or difflib.get_close_matches(bare, OPTIONS, n=1, cutoff=0.5)
            hint = f"did you mean {'= or '.join(near)}=?" if near else f"options are {', '.join(OPTIONS)}."
            raise ValueError(f"unknown option {word!r}; {hint}")
        if not equals:
            raise ValueError(f"options are key=value; got {word!r} without a value: write {key}=...")
        if key in given:
            raise ValueError(f"option {key}= is given twice ({given[key]!r} and {value!r}): keep one.")
        given[key] = value
    values = {key: _parse_value(key, value) for key, value in given.items()}
    base = PRESETS[values.get("preset", "record")]()
    variant = VARIANTS[values.get("variant", "v3")]
    if base.preset == "record":
        base = dataclasses.replace(
            base, scheduled_steps=variant.scheduled_steps, extension_steps=variant.extension_steps
        )
    model = {k: v for k, v in variant.model.items() if base.preset == "record" or k != "bigram_rows"}
    cfg = dataclasses.replace(base, table=variant.table, **values)
    model["vocab_size"] = cfg.vocab_size
    return validated(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **model)))


def _parse_value(key: str, text: str) -> int | str:
    if key in CHOICES and text not in CHOICES[key]:
        raise ValueError(f"{key}= takes {'|'.join(c for c in CHOICES[key] if c)}; got {text!r}.")
    if OPTIONS[key] is str:
        return text
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"{key}= takes a whole number; got {text!r}.") from None
    low, high = MINIMUM.get(key, 0), MAXIMUM.get(key, 2**63)
    if not low <= number <= high:
        raise ValueError(f"{key}= must be at {f'least {low}' if number < low else f'most {high}'}; got {number}.")
    return number


def validated(cfg: RunConfig) -> RunConfig:
    """Check what one option alone cannot tell. Raises ValueError with one sentence."""
    if cfg.vocab_size > 65536:
        raise ValueError(f"vocab_size= must be at most 65536, shards hold 16-bit tokens; got {cfg.vocab_size}.")
    if cfg.bos_id >= cfg.vocab_size:
        raise ValueError(f"bos_id= must be below vocab_size={cfg.vocab_size}; got {cfg.bos_id}.")
    group = PIECES * cfg.schedule.val_chunk
    if cfg.val_tokens % group:
        nearest = max(1, round(cfg.val_tokens / group)) * group
        raise ValueError(
            f"val_tokens= must be a multiple of {group} ({PIECES} sequences of {cfg.schedule.val_chunk}); "
            f"got {cfg.val_tokens}: try val_tokens={nearest}."
        )
    for name in ("train_files", "val_files"):
        if not getattr(cfg, name):
            raise ValueError(f"{name}= names the shards and may not be empty: leave it out for the preset's own.")
    if cfg.run_id and not re.fullmatch(r"(?!latest$)\w([\w.-]{,98}[\w-])?", cfg.run_id, re.ASCII):
        raise ValueError(f"run_id= takes up to 100 letters, digits, - _, inner dots, not latest; got {cfg.run_id!r}.")
    return cfg


# === §2 Runtime ===
# Owns ranks, devices, the log's header, what must agree to resume. Changing it needs no new baseline, PIECES excepted.

PIECES = 8  # every global batch is cut into so many, on any number of GPUs up to it, so that all see the same data
ROOT = Path(__file__).resolve().parent
SOURCES = ("train_gpt.py", "triton_kernels.py", "dc_triton_kernels.py", "exchange.py")  # decide a run's numbers
MAY_DIFFER = {"run_id", "resume", "checkpoint_every", "val_every", "show"}  # options, where a run goes on
COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # after so long without the other ranks, one gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Where this process stands. `accum` micro-batches on each rank make one global batch."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def accum(self) -> int:
        return max(1, PIECES // self.world_size)

    @property
    def pieces(self) -> int:
        return max(PIECES, self.world_size)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sync(self) -> None:
        """Wait for the device, so that a host clock read afterwards is true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Clock:
    """Training time in seconds: stopped to validate and save, with the device idle at every start and stop."""

    def __init__(self, runtime: Runtime, seconds: float = 0.0):
        self.runtime, self.seconds, self.started = runtime, seconds, None

    def start(self) -> None:
        self.runtime.sync()
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.runtime.sync()
        self.seconds += time.perf_counter() - self.started
        self.started = None

    def now(self) -> float:
        """Running total; while it runs, the host's view, which may lead or lag the device."""
        return self.seconds + (time.perf_counter() - self.started if self.started is not None else 0.0)


def check_world_size(cfg: RunConfig, world_size: int) -> str:
    """One sentence where this many ranks cannot share the global batches evenly, else ''."""
    plan, shared = parameter_plan(cfg.model), {stage.batch_tokens for stage in stages_by_step(cfg)}
    check_param_table(cfg.table, plan)
    shared |= {plan[row.label].shape[0] for row in cfg.table if row.optim == "adam" and row.comms != "replicated"}
    allowed = [n for n in (1, 2, 4, *range(PIECES, 129, PIECES)) if all(size % n == 0 for size in shared)]
    if world_size in allowed:
        return ""
    nearest = max([n for n in allowed if n <= world_size], default=1)
    told = ", ".join(map(str, allowed))
    return f"the number of GPUs must be one of {told}; got {world_size}: try NPROC={nearest} ./run.sh."


def prepare(cfg: RunConfig, world_size: int) -> tuple["DataPlan", dict | None]:
    """What a run needs, checked before any GPU work: data and, with resume=, a state. ValueError: a line per fault."""
    problems = [check_world_size(cfg, world_size), preflight.check_device(cfg.preset, world_size)]
    problems += [preflight.check_choices(cfg), preflight.check_logs(Path("logs"), cfg.run_id)]
    plan, saved, total = None, None, cfg.total_steps
    try:
        if cfg.resume:
            steps = [step for step in range(1, total + 1) if not is_adam_step(step) or step == total]
            saved = checkpoints.read_to_resume(cfg.resume, facts(cfg), MAY_DIFFER, blank_state(cfg), steps)
        plan = data_plan(cfg, PIECES if problems[0] else max(PIECES, world_size))
    except ValueError as problem:
        problems.append(str(problem))
    if found := [problem for problem in problems if problem]:
        raise ValueError("\n".join(found))
    return plan, saved


def facts(cfg: RunConfig) -> dict[str, dict]:
    """What a run is: its options and the start of each of SOURCES' sha256. Both must agree where another goes on."""
    sources = {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16] for name in SOURCES}
    return {"config": {name: getattr(cfg, name) for name in OPTIONS}, "sources": sources}


def start_runtime(local_rank: int, rank: int, world_size: int) -> Runtime:
    """Choose the device and join the process group (NCCL for GPU tensors, gloo for CPU tensors)."""
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # toy tensors: more threads would mostly wait for each other
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    return Runtime(rank=rank, world_size=world_size, device=device)


def log_header(log: RunLog, cfg: RunConfig, runtime: Runtime, sources: dict[str, str]) -> None:
    """Everything needed to repeat the run: source, commit, configuration, versions, hardware."""
    for name, text in sources.items():
        log.embed(name, text)
    cuda = runtime.device.type == "cuda"
    gpus = f"{runtime.world_size} x {torch.cuda.get_device_name()}" if cuda else ""
    lines = [
        f"run_id: {log.path.stem if log.path else 'none'}",
        f"commit: {preflight.commit(ROOT)}",
        f"config: {json.dumps({name: getattr(cfg, name) for name in OPTIONS})}",
        f"Running Python {sys.version}".replace("\n", " "),
        f"Running PyTorch {torch.__version__}",
        f"Running Triton version {kernels.triton.__version__ if kernels.triton else 'not installed'}",
        f"packages: {json.dumps(preflight.packages())}",
        f"hardware: {gpus or f'cpu ({platform.machine()}), {torch.get_num_threads()} threads'}",
        f"world_size: {runtime.world_size}",
    ]
    if cuda and shutil.which("nvidia-smi"):
        lines.append(subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout)
    log.write("\n".join([log.RULE, *lines, log.RULE]))


# === §3 Operations ===
# Owns the small functions of the forward pass; fused ones live in *triton_kernels.py. Any change needs a new baseline.

Stream = Tensor | kernels.Scaled
Mixture = list[tuple[Tensor | None, Stream]]  # (coefficient, stream) to be summed: a lambda, a gate or None for 1


def mix(mixture: Mixture, *, normed: bool, **options) -> tuple[Stream | None, ...]:
    """Sum of streams times their coefficients, and the sum's RMS norm where asked for; options: see kernels.mix."""
    coefs, streams = zip(*mixture)
    return kernels.mix(coefs, streams, normed=normed, **options)


def yarn(long_windows: Iterable[int], head_dim: int) -> tuple[Tensor, float]:
    """Angular frequencies (H/4,) fp64 and softmax scale after widening the long window (tokens) step by step.

    YaRN (Peng et al. 2023): slow frequencies are stretched with the window, quick ones stay. The other half of each
    head does not rotate (half-truncated RoPE).
    """
    freqs = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    scale, windows = 0.1, list(long_windows)
    for old, new in zip(windows, windows[1:]):
        turns = old * freqs / (2 * math.pi)
        freqs = freqs * (old / new + ((turns - 1) / 31).clamp(0, 1) * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return freqs, scale


def rotary_tables(freqs: Tensor, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position times every frequency, (positions, H/4) each."""
    angles = torch.arange(positions, device=freqs.device, dtype=torch.float64)[:, None] * freqs
    return angles.cos().to(dtype), angles.sin().to(dtype)


def lane_values(
    x_TD: Tensor, lanes: Sequence[Lane], mlp: Sequence[Tensor], block: int, scale: Tensor | float, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Per-token coefficients (T, width) of each lane: a two-layer GELU MLP, not squashed; block of w1, w2 and b2."""
    widths = [lane.width for lane in lanes]
    pick = block, (block, slice(sum(widths))), (block, slice(sum(widths)))
    grads = [None if p.grad is None else p.grad[at] for p, at in zip(mlp, pick)]
    grads.append(scale.grad if isinstance(scale, Tensor) else None)
    gates = kernels.gates(x_TD, *(p[at] for p, at in zip(mlp, pick)), scale, dtype, grads)
    return gates.split(widths, dim=-1)


def lane_bias(lanes: Sequence[Lane], width: int, scale: float) -> Tensor:
    """Stored bias (width,) that makes each lane start at its init."""
    values = [lane.init / scale for lane in lanes for _ in range(lane.width)]
    return torch.tensor(values + [0.0] * (width - len(values)), dtype=torch.float64)


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, window: int, paired: bool, view: "View"
) -> tuple[Tensor, ...]:
    """Causal attention inside documents over `window` earlier tokens, as the run chose; q, k, v for later readers."""
    options = dict(window=window, scale=view.scale, paired=paired)
    if view.attention in ("torch", "fa4"):
        y = kernels.flash_attention(q, k, v, cu_seqlens, max_len=view.max_len, by=view.attention, **options)
        return y, q, k, v
    if view.attention == "reference":
        return kernels.attention_reference(q, k, v, cu_seqlens, share=True, **options)
    # normed heads have length H^0.5, offset keys at most 2^0.5 times that: no running maximum is needed
    return kernels.attention(q, k, v, cu_seqlens, max_logit=2**0.5 * q.shape[-1] * view.scale, share=True, **options)


def choose_attention(wanted: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> tuple[str, str]:
    """(implementation, why), agreed among ranks. `auto`: our kernel where it agrees with the reference everywhere."""
    if kernels.REFERENCE_OPS:
        return "reference", "REFERENCE_OPS=1"
    if wanted != "auto" or device.type != "cuda":
        return ("reference", "no GPU") if wanted == "auto" else (wanted, "as asked")
    other = "torch" if dtype.itemsize == 2 else "reference"  # FlashAttention takes 16 bits only
    try:
        error = kernels.probe_attention(device, head_dim, dtype)
        choice, how = ("triton", "agrees with") if error <= 0.05 else (other, "differs from")
        choice = (choice, f"our kernel {how} the reference, to {error:.4f}")
    except Exception as problem:  # any failure of an untried compiler or driver means: use the other implementation
        choice = (other, f"our kernel does not run here ({repr(problem).splitlines()[0]})")
    if dist.is_initialized():
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, choice)
        choice = min(everyone)  # reference, torch, triton: one rank that cannot decides for all
    return choice


# === §4 Model ===
# Owns the parameters and the forward pass. Any change here needs a new baseline.


class Batch(NamedTuple):
    """One packed sequence on the device."""

    inputs: Tensor  # (T,) int32
    targets: Tensor  # (T,) int64, the next tokens; negative: no target
    cu_seqlens: Tensor  # (S,) int32, document boundaries, padded with T
    bigram_rows: Tensor  # (T,) int32, see bigram_hash


class View(NamedTuple):
    """Attention's windows, scale and implementation in the current stage, and whether FP8 is on."""

    short: int  # attention windows, tokens
    long: int
    scale: float  # softmax scale
    max_len: int  # longest document, tokens
    attention: str = "reference"
    fp8: bool = False


class Folded(NamedTuple):
    """Matrices as products read them: a lambda that scales a whole product is in its matrix."""

    qkv: Tensor  # (A, 3D, D), A layers with attention: queries of all heads, then keys, then values
    o: Tensor  # (A, D, D)
    down: Tensor  # (L, F, D)

    def parts(self) -> tuple[Tensor, ...]:
        """Views, as GPT.matrices orders them."""
        return *self.qkv.tensor_split([2 * self.qkv.shape[2]], 1), self.o, self.down


Slots = list[tuple[Tensor, Tensor | None]]  # a matrix, and where products add its gradient (None: autograd does)


class Weights(NamedTuple):
    """Matrices by slot and lambdas by layer, split once a pass."""

    qkv: Slots
    o: Slots
    down: Slots
    up: Slots
    resid: list[tuple[Tensor, Tensor]]  # of the residual, at the attention and at the MLP
    smear: Tensor
    skip: Tensor


class Streams(NamedTuple):
    """What layers share. Each read of an iterator is an alias, so that gradients meet in one sum: see kernels.fan."""

    bigram: Iterator[Tensor]
    value_embeds: list[tuple[Tensor, Tensor]]  # (T, D) each, and the weights (N, smear_dims) of their gates
    caches: dict[str, Iterator[Tensor]]  # earlier outputs by name
    norms: dict[str, Iterator[Tensor]]  # norm of each cache that attention reads
    gates: dict[tuple[str, int], Tensor]  # lanes by (name, layer)
    injections: dict[int, Tensor]  # what the layer's residual takes of x0 and the bigram stream


def _uniform(bound: float, *where) -> Callable[[Tensor, torch.Generator], object]:
    """Init rule: fill x[where] with U(-bound, bound); the rest stays zero."""
    return lambda x, generator: x[where].uniform_(-bound, bound, generator=generator)


def _normal(std: float, *where) -> Callable[[Tensor, torch.Generator], object]:
    return lambda x, generator: x[where].normal_(0, std, generator=generator)


def _fill(value: float | Tensor) -> Callable[[Tensor, torch.Generator], object]:
    return lambda x, generator: x.copy_(torch.as_tensor(value))


class ParamInit(NamedTuple):
    """Shape, dtype and init rule of one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    init: Callable[[Tensor, torch.Generator], object]


def parameter_plan(cfg: ModelConfig, world_size: int = 1) -> dict[str, ParamInit]:
    """Every parameter of the model by label.

    Banks are padded so that all ranks own equally many matrices; their padding is zero and stays so, but for the unused
    MLP slots, which v3 draws too.
    """
    D, H, N, L, V = cfg.dim, cfg.head_dim, cfg.heads, len(cfg.plan), cfg.vocab_padded
    A, planes, hidden = len(cfg.attn_layers), cfg.value_planes, cfg.gate_hidden
    low, full = cfg.dtype, torch.promote_types(cfg.dtype, torch.float32)
    gates = [cfg.gate_lanes(post) for post in (False, True)]
    mudd = [MUDD_LANES, OUTPUT_LANES]
    gate_width, mudd_width = (max(sum(lane.width for lane in lanes) for lanes in pair) for pair in (gates, mudd))
    gate_bias = torch.stack([lane_bias(lanes, gate_width, cfg.gate_scale) for lanes in gates])
    mudd_bias = torch.stack([lane_bias(lanes, mudd_width, MUDD_SCALE) for lanes in mudd])
    bound = 0.5 * (3 / D) ** 0.5  # half the std 1/sqrt(D) of a unit-gain layer
    every, pad = slice(None), kernels.round_up
    plan = {
        "qk_bank": ParamInit((pad(A * N, world_size), 2 * H, D), low, _uniform(bound, slice(A * N))),
        "vo_bank": ParamInit((pad(2 * A, world_size), D, D), low, _uniform(bound, slice(2 * A))),
        "mlp_bank": ParamInit((pad(2 * L, max(PIECES, world_size)) // 2, 2, 4 * D, D), low, _uniform(bound, every, 0)),
        "scalars": ParamInit((2 * L + 2,), full, _fill(torch.tensor([0.5, 1.0] * L + [0.0, -1.5]))),
        "smear_gate": ParamInit((1, cfg.smear_dims), low, _fill(0.0)),
        "ve_gate_bank": ParamInit((planes, N, cfg.smear_dims), low, _fill(0.0)),
        "lm_head": ParamInit((D, V), low, _normal(0.005)),
        "bigram_embed": ParamInit((cfg.bigram_rows, D), low, _fill(0.0)),
        "post_lambdas": ParamInit((L, 2), full, _fill(1.0)),
        "resid_lambdas": ParamInit((L, 2), full, _fill(1.1**0.5)),
        "value_embeds": ParamInit((planes * V, D), low, _normal(0.01)),
        "embed": ParamInit((V, D), low, _fill(0.0)),  # GPT makes it the head's transpose
        "mudd_w1": ParamInit((2, hidden, D), low, _uniform(D**-0.5)),
        "mudd_w2": ParamInit((2, mudd_width, hidden), low, _fill(0.0)),
        "mudd_b2": ParamInit((2, mudd_width), low, _fill(mudd_bias)),
        "mudd_gate_w1": ParamInit((2, hidden, D), low, _uniform(D**-0.5)),
        "mudd_gate_w2": ParamInit((2, gate_width, hidden), low, _fill(0.0)),
        "mudd_gate_b2": ParamInit((2, gate_width), low, _fill(gate_bias)),
    }
    if cfg.learned_gate_scale:
        plan["_mudd_gate_scale"] = ParamInit((), full, _fill(cfg.gate_scale))
    if any(spec.dc_mlp for spec in cfg.plan):
        plan["dc_w1_bank"] = ParamInit((A, 2 * N, D), low, _normal((2 / (D + 2 * N)) ** 0.5))
        plan["dc_w2_bank"] = ParamInit((A, 2 * N, 2 * N), low, _normal(0.0025 * (2 * N) ** -0.5, every, slice(N)))
    return plan


def initial_parameter(label: str, row: ParamInit, seed: int) -> Tensor:
    """First value of one parameter. Each label draws from its own generator, so a new parameter changes no other."""
    generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(label.encode()))
    value = torch.zeros(row.shape, dtype=torch.promote_types(row.dtype, torch.float32))
    row.init(value, generator)
    return value.to(row.dtype)


class GPT(nn.Module):
    """The model. forward gives the loss of every token, (T,), in fp32 (fp64 for fp64 parameters).

    Parameters follow `parameter_plan`; activations follow the parameters' dtype, fp64 throughout where that is fp64.
    seed=None leaves the parameters undrawn, for whoever receives them.
    """

    def __init__(self, cfg: ModelConfig, *, world_size: int = 1, seed: int | None = 0):
        super().__init__()
        self.cfg = cfg
        for label, row in parameter_plan(cfg, world_size).items():
            value = torch.empty(row.shape, dtype=row.dtype) if seed is None else initial_parameter(label, row, seed)
            self.register_parameter(label, nn.Parameter(value))
        with torch.no_grad():
            self.embed.copy_(self.lm_head.T)
        if cfg.sign_rows:
            generator = torch.Generator().manual_seed(seed or 0)
            signs = torch.randint(0, 2, (cfg.sign_rows, cfg.dim), generator=generator) * 2 - 1
            self.register_buffer("sign_table", signs.to(cfg.dtype))
        read = {spec.reads for spec in cfg.plan} - {""}
        pairs = list(zip(cfg.plan, (*cfg.plan[1:], LayerSpec(window="none"))))  # every layer and the next
        self.norm_is_read = [a.save_as in read or b.window != "none" and not b.reads for a, b in pairs]
        # Where the next layer's residual lambda alone reads x, it goes along with it: see kernels.Scaled.
        self.leaves_scaled = [not (a.save_as or b.gate_from_here or b.mudd or b.window == "none") for a, b in pairs]
        self.register_buffer("attn_layers", torch.tensor(cfg.attn_layers), persistent=False)
        muddy = torch.tensor([[spec.mudd] for spec in cfg.plan])  # MUDD lanes stand in for post_lambdas
        self.register_buffer("muddy", muddy, persistent=False)
        self.folded: Folded | None = None  # what the micro-batches of a step share: see refresh
        self.quantized: tuple[kernels.QuantizedWeight, ...] | None = None  # FP8 copies of the up projections
        self.quantized_head: kernels.QuantizedHead | None = None

    def rotate_to(self, freqs: Tensor, positions: int) -> None:
        """Use rotary tables for `positions` stream positions (twice the tokens of the longest sequence)."""
        self.cos, self.sin = rotary_tables(freqs.to(self.embed.device), positions, self.embed.dtype)

    def matrices(self, of: Callable[[Tensor], Tensor] = lambda bank: bank) -> tuple[Tensor, ...]:
        """The banks' matrices that lambdas scale, no padding: qk (A, 2D, D), v, o, down. `of` maps each bank first."""
        (qk, vo, mlp), D = map(of, (self.qk_bank, self.vo_bank, self.mlp_bank)), self.cfg.dim
        v, o = vo[: 2 * len(self.attn_layers)].view(-1, 2, D, D).unbind(1)
        return qk.view(-1, D)[: 2 * D * len(v)].view(-1, 2 * D, D), v, o, mlp[: len(self.cfg.plan), 1]

    def lambdas(self) -> tuple[Tensor, ...]:
        """For each tensor of matrices(), the lambda of each of its matrices."""
        low, wide = self.embed.dtype, torch.promote_types(self.embed.dtype, torch.float32)
        into_qkv, into_o = self.scalars[:-2].view(-1, 2).unbind(1)
        post_attn, post_mlp = self.post_lambdas.to(low).to(wide).masked_fill(self.muddy, 1).unbind(1)
        into_qkv, into_o = (scale[self.attn_layers] for scale in (into_qkv, into_o * post_attn))
        return into_qkv, into_qkv, into_o, post_mlp

    def fold(self) -> Folded:
        """Banks times their lambdas, in the banks' dtype, without padding; gradients reach both."""
        qk, v, *others = ((m * scale.view(-1, 1, 1)).to(m.dtype) for m, scale in zip(self.matrices(), self.lambdas()))
        return Folded(torch.cat((qk, v), 1), *others)

    @torch.no_grad()
    def refresh(self, fp8: bool) -> None:
        """Remake, in place, what micro-batches read instead of the parameters: folded matrices and FP8 copies."""
        if self.folded is None:
            self.folded = Folded(*(x.requires_grad_() for x in self.fold()))
            for x in self.folded:
                x.grad = torch.zeros_like(x)
        for place in zip(self.folded.parts(), self.matrices(), self.lambdas()):
            kernels.fold_(*place)
        if fp8:
            self._refresh_fp8()

    def unfold(self) -> None:
        """Hand the folded matrices' gradients on to banks and lambdas, once a step, and clear them."""
        grads, lambdas = Folded(*(x.grad for x in self.folded)).parts(), self.lambdas()
        places = zip(grads, self.matrices(Tensor.detach), lambdas, self.matrices(lambda bank: bank.grad))
        torch.autograd.backward(lambdas, [kernels.unfold_(*place) for place in places])

    def _refresh_fp8(self) -> None:
        head = kernels.quantize_head(self.lm_head)
        if self.quantized_head is None:
            self.quantized_head, up = head, self.mlp_bank[:, 0]
            if self.cfg.fp8_mlp:
                self.w8 = torch.empty(up.shape, dtype=torch.float8_e4m3fn, device=up.device)
                self.w8_scales = torch.empty(len(up), 4, device=up.device)  # every scale in its own 16-byte cell
                self.quantized = tuple(kernels.QuantizedWeight(w, s[:1]) for w, s in zip(self.w8, self.w8_scales))
        for held, fresh in zip(self.quantized_head, head):
            held.copy_(fresh)
        if self.quantized:
            kernels.quantize_bank(self.mlp_bank[:, 0], self.w8, self.w8_scales)

    def forward(self, batch: Batch, view: View, mtp_weights: Tensor | None = None) -> Tensor:
        """Weighted multi-token loss while training (mtp_weights given), plain next-token cross-entropy otherwise."""
        x = self.features(batch, view)
        if mtp_weights is None:
            return kernels.head_cross_entropy(x, self.lm_head, batch.targets)
        w8 = self.quantized_head if view.fp8 else None
        return kernels.head_loss(x, self.lm_head, batch.targets, mtp_weights, fp8=view.fp8, quantized=w8)

    def features(self, batch: Batch, view: View) -> Tensor:
        """What the head reads, (T, D)."""
        w = self.weights()
        x, n, x0, s = self.embed_inputs(batch, w)
        for i, spec in enumerate(self.cfg.plan):
            if spec.gate_from_here:
                self.add_gates(x, x0, s, post=True)
            x, n = self.layer(i, x, n, w, s, batch.cu_seqlens, view)
            if spec.save_as:
                s.caches[spec.save_as] = kernels.fan(x)
                x = next(s.caches[spec.save_as])
                if n is not None:
                    s.norms[spec.save_as] = kernels.fan(n)
                    n = next(s.norms[spec.save_as])
        return self.recombine(x, s)

    def weights(self) -> Weights:
        def slots(matrices: Tensor, gradients: Tensor | None) -> Slots:
            return list(zip(matrices, itertools.repeat(None) if gradients is None else gradients))

        folded, bank = self.folded or self.fold(), self.mlp_bank
        gradients = (x.grad for x in folded) if self.folded else itertools.repeat(None)
        up = slots(bank[:, 0], None if bank.grad is None else bank.grad[:, 0])
        low, wide = self.embed.dtype, torch.promote_types(self.embed.dtype, torch.float32)
        resid = iter(self.resid_lambdas.to(low).to(wide).flatten().unbind())
        return Weights(*map(slots, folded, gradients), up, list(zip(resid, resid)), *self.scalars[-2:].unbind())

    def embed_inputs(self, batch: Batch, w: Weights) -> tuple[Tensor, Tensor, Iterator[Tensor], Streams]:
        """Input of layer 0, its norm, the embedding stream x0, and the streams all layers share."""
        tokens, planes = batch.inputs, self.cfg.value_planes
        signs = (self.sign_table, sign_rows(tokens, self.cfg.sign_rows)) if self.cfg.sign_rows else None
        (bigram,) = kernels.lookup(batch.bigram_rows, [self.bigram_embed], [1], signs)
        embedding, *value_embeds = kernels.lookup(tokens, [self.embed, self.value_embeds], [1, planes])
        x0 = kernels.smear(embedding, self.smear_gate, w.smear)
        x0, bigram = kernels.fan(x0), kernels.fan(bigram)
        s = Streams(bigram, list(zip(value_embeds, self.ve_gate_bank.unbind())), {}, {}, {}, {})
        self.add_gates(next(x0), x0, s, post=False)
        injected = [(s.gates["bigram", 0], next(bigram))] if ("bigram", 0) in s.gates else []
        x, n = mix([(None, next(x0)), *injected], normed=True)
        s.caches["embed"] = kernels.fan(x)
        return next(s.caches["embed"]), n, x0, s

    def add_gates(self, x: Tensor, x0: Iterator[Tensor], s: Streams, post: bool) -> None:
        """Compute the pre or post gate from x, and what its lanes let through of x0 and the bigram stream."""
        gates = self.forward_mudd_gate(x, post)
        s.gates.update(gates)
        pairs = {
            i: (gates.get(("x0", i)), gates.get(("bigram", i)) if i else None)  # layer 0's made its input
            for i, spec in enumerate(self.cfg.plan)
            if (("x0", i) in gates or i and ("bigram", i) in gates) and not spec.mudd
        }
        if pairs:
            s.injections.update(zip(pairs, kernels.injections(pairs.values(), next(x0), next(s.bigram))))

    def forward_mudd_gate(self, x: Tensor, post: bool) -> dict[tuple[str, int], Tensor]:
        """Lanes of the pre or post gate, computed from the un-normalised x."""
        lanes, mlp = self.cfg.gate_lanes(post), (self.mudd_gate_w1, self.mudd_gate_w2, self.mudd_gate_b2)
        scale = self._mudd_gate_scale if self.cfg.learned_gate_scale else self.cfg.gate_scale
        parts = lane_values(x, lanes, mlp, int(post), scale, x.dtype)
        return {(lane.name, lane.layer): part for lane, part in zip(lanes, parts)}

    def mudd(self, x: Tensor, block: int) -> dict[str, Tensor]:
        """Coefficients by lane, (T, width), fp32: multiway dynamic dense connections (Xiao et al. 2025)."""
        lanes = OUTPUT_LANES if block else MUDD_LANES
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = lane_values(x, lanes, (self.mudd_w1, self.mudd_w2, self.mudd_b2), block, MUDD_SCALE, wide)
        return {lane.name: part for lane, part in zip(lanes, parts)}

    def layer(
        self, i: int, x: Stream, n: Tensor | None, w: Weights, s: Streams, cu_seqlens: Tensor, view: View
    ) -> tuple[Stream, Tensor | None]:
        """Attention (or the skip connection) into the residual, then the MLP. Gives x and, if read, its norm."""
        spec = self.cfg.plan[i]
        reads = kernels.fan(x) if spec.mudd else itertools.repeat(x)
        mu = self.mudd(next(reads), 0) if spec.mudd else None
        if spec.window == "none":
            skip = torch.sigmoid(w.skip).to(x.dtype) * s.gates["skip", i]
            into = [(None, x), (skip, next(s.caches[spec.skip_from]))]
        else:
            n, near = next(s.norms[spec.reads]) if spec.reads else n, None
            if spec.value_embed is not None and not mu:
                n, near = kernels.leading(n, self.cfg.smear_dims // 2)
            y = self.attention(i, n, self.extra_values(i, near, reads, s, mu), w, s, cu_seqlens, view)
            into = self.residual(i, next(reads), y, w, s, mu)
        quantized = self.quantized[i] if view.fp8 and self.quantized else None
        x, n, *peaks = mix(into, normed=True, peaks=quantized is not None, leave=None if mu else w.resid[i][1])
        weights, gradients = zip(w.up[i], w.down[i])
        y = kernels.mlp(n, *weights, quantized, gradients, *peaks)
        resid, out = (mu["mlp_resid"], mu["mlp_out"]) if mu else (None, None)
        leave = w.resid[i + 1][0] if self.leaves_scaled[i] else None
        return mix([(resid, x), (out, y)], normed=self.norm_is_read[i], leave=leave)

    def residual(self, i: int, x: Stream, y: Tensor, w: Weights, s: Streams, mu: dict[str, Tensor] | None) -> Mixture:
        """What the residual becomes after attention put out y: by lambdas and gate lanes, or by the MUDD lanes."""
        if mu is None:
            injected = [(None, s.injections[i])] if i in s.injections else []
            return [(None if isinstance(x, kernels.Scaled) else w.resid[i][0], x), (None, y), *injected]
        # MUDD adds three streams to the residual, then scales it, adds y and injects: one sum of five.
        embed, mid, again = (mu["attn_resid"] * mu["residual"]).split(1, dim=-1)
        return [
            (mu["attn_resid"] + again, x),
            (mu["attn_out"], y),
            (embed + s.gates.get(("x0", i), mu["x0"]), next(s.caches["embed"])),
            (mid, next(s.caches["mid"])),
            (s.gates.get(("bigram", i), mu["bigram"]), next(s.bigram)),
        ]

    def extra_values(
        self, i: int, near: Tensor | None, x: Iterator[Tensor], s: Streams, mu: dict[str, Tensor] | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Adds to V (T, N, H) of layer i, head by head: its value embedding, gated by the first columns of itself and
        of the attention's input (near), and with MUDD three residual streams."""
        plane, N, H = self.cfg.plan[i].value_embed, self.cfg.heads, self.cfg.head_dim
        if plane is None:
            return None
        ve, gate_w = s.value_embeds[plane]
        if mu is None:
            return lambda v: kernels.add_values(v, ve, near, gate_w)
        coefs, streams = mu["value"].split(1, dim=-1), (next(s.caches["embed"]), next(s.caches["mid"]), next(x))
        extra = [(mu["value_embed"].repeat_interleave(N // 2, dim=-1), ve)]
        extra += [(c.expand(-1, N), stream) for c, stream in zip(coefs, streams)]
        extra = [(gate.reshape(-1), stream.view(-1, H)) for gate, stream in extra]
        return lambda v: mix([(None, v.view(-1, H)), *extra], normed=False)[0].view(v.shape)

    def attention(
        self, i: int, n: Tensor, extra: Callable | None, w: Weights, s: Streams, cu_seqlens: Tensor, view: View
    ) -> Tensor:
        """Attention of layer i from its normed input n, output projection included; extra adds to V."""
        spec, slot = self.cfg.plan[i], self.cfg.attn_layers.index(i)
        (qkv, grad), paired = w.qkv[slot], spec.paired
        options = dict(heads=self.cfg.heads, paired=paired, key_offset=spec.key_offset, grad=grad)
        q, k, v = kernels.heads(n, qkv, self.cos, self.sin, **options)
        v = extra(v) if extra else v
        window = view.long if spec.window == "long" else view.short
        y, q, k, v = attend(q, k, v, cu_seqlens, window=window, paired=paired, view=view)
        dc = self.dc_gate(i, n, s)
        if dc is not None:
            window = self.cfg.dc_window
            y = dc_triton_kernels.dc_correction(q, k, v, *dc, y, cu_seqlens, scale=view.scale, window=window)
        xsa, gate = s.gates.get(("xsa", i)), s.gates.get(("attn", i))
        if xsa is not None or gate is not None:
            y = kernels.finish_heads(y, v, xsa, gate)
        o, grad = w.o[slot]
        return kernels.linear(y.reshape(n.shape), (o,), (grad,))[0]

    def dc_gate(self, i: int, n: Tensor, s: Streams) -> tuple[Tensor, Tensor] | None:
        """Per-token head weights (w1, w2), (T, N) each, of the DC correction, from gate lanes or (v1) an own MLP."""
        if ("dc_w1", i) in s.gates:
            w1, w2 = s.gates["dc_w1", i], s.gates["dc_w2", i]
        elif self.cfg.plan[i].dc_mlp:
            slot = self.cfg.attn_layers.index(i)
            hidden = F.gelu(F.linear(n, self.dc_w1_bank[slot]), approximate="tanh")
            w1, w2 = F.linear(hidden, self.dc_w2_bank[slot]).chunk(2, dim=-1)
        else:
            return None
        wide = w1.to(torch.promote_types(w1.dtype, torch.float32))  # rows this short are slow in F.rms_norm
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(w1.dtype), w2.contiguous()

    def recombine(self, x: Tensor, s: Streams) -> Tensor:
        """Norm of the last layer's output plus earlier streams, by MUDD coefficients."""
        nu, sources = self.mudd(x, 1), {**s.caches, "value_embed": itertools.repeat(s.value_embeds[0][0])}
        mixture = [(None, x), *((nu[lane.name], next(sources[lane.name])) for lane in OUTPUT_LANES)]
        return mix(mixture, normed=True, keep_x=False)[1]


# === §5 Optimizer ===
# Owns NorMuonAndAdam: one optimizer, one row of PARAM_TABLE per parameter, explicit order of communication and work
# (record 61). Changing an order keeps the mathematics; changing a row needs a new baseline.


@dataclass(slots=True, eq=False)
class ParamState:
    """One parameter's row, the slice of it that this rank updates, and the slice's optimizer state."""

    spec: ParamSpec
    param: nn.Parameter
    shard: Tensor  # view of param: own rows (Adam) or own matrices (NorMuon); everything where replicated
    hyper: Tensor | None = None  # this step's numbers, a slice of the optimizer's device buffer
    grad: Tensor | None = None  # own slice of the reduced gradient, between scatter and work; always of a part
    pending: list[dist.Work] = field(default_factory=list)
    steps: int = 0  # Adam updates so far
    exp_avg: Tensor | None = None  # Adam moments, fp32
    exp_avg_sq: Tensor | None = None
    momentum: Tensor | None = None  # NorMuon, fp32
    second_moment: Tensor | None = None
    mantissa: Tensor | None = None  # low 16 bits of the fp32 weights whose high 16 bits are the bf16 parameter
    whole: "ParamState | None" = None  # what this one is a part of: see NorMuonAndAdam._join_replicated
    starts: Tensor | None = None  # of a whole: where each segment's numbers start, see kernels.adam_update_
    exchange: RowExchange | None = None  # of a sparse one, with several ranks

    @property
    def is_adam(self) -> bool:
        return self.spec.optim == "adam"

    @property
    def replicated(self) -> bool:
        return self.spec.comms == "replicated"

    def matrices(self, full: Tensor) -> Tensor:
        """The tensor as (matrices, rows, cols) for NorMuon, as it is for Adam."""
        return full if self.is_adam else full.view(-1, self.spec.rows or full.shape[-2], full.shape[-1])


def check_param_table(table: Iterable[ParamSpec], labels: Iterable[str]) -> None:
    """Rows and parameters must match one to one. Raises ValueError naming every label that does not."""
    table, labels = list(table), list(labels)
    rows = [spec.label for spec in table]
    known = ("normuon sharded", "adam sharded", "adam sparse", "adam replicated")
    faults = {
        "parameters without a row": sorted(set(labels) - set(rows)),
        "rows without a parameter": sorted(set(rows) - set(labels)),
        "rows given twice": sorted({row for row in rows if rows.count(row) > 1}),
        "optim or comms unknown": sorted(spec.label for spec in table if f"{spec.optim} {spec.comms}" not in known),
    }
    told = "; ".join(f"{what}: {', '.join(which)}" for what, which in faults.items() if which)
    if told:
        raise ValueError(f"the parameter table must hold each parameter once ({told}): edit PARAM_TABLE or the model.")


class NorMuonAndAdam:
    """NorMuon (every step) for matrix banks and Adam (odd steps) for the rest, sharded over the ranks.

    step() runs three phases: *scatter* launches all gradient reductions in table order; *work* takes the parameters in
    work order, waits for each reduction, updates the own slice and launches the gather of the new weights; *finish*
    waits for the gathers, lm_head's first, so that the tied copy into embed overlaps the others. The replicated Adam
    parameters of a dtype are reduced and updated as one, with the first of them; their .data is moved to one buffer.

    Tied embedding: until split_embed(), "embed" is kept equal to lm_head's transpose: its gradient is added to
    lm_head's and the updated head is copied back.

    Works alone: one process without a process group, any named parameters, any table.

        table = (ParamSpec(label="weight", optim="normuon", comms="sharded", work=0),)
        optimizer = NorMuonAndAdam({"weight": layer.weight}, table)
        loss.backward(); optimizer.step(do_adam=True)

    NorMuon: Li et al. 2025 on Muon (Jordan 2024) with Polar Express (Amsel et al. 2025).
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]] | dict[str, nn.Parameter],
        table: tuple[ParamSpec, ...] = PARAM_TABLE,
        config: OptimConfig | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
    ):
        named = dict(params)
        check_param_table(table, named)
        self.config, self.rank, self.world_size = config or OptimConfig(), rank, world_size
        self.states = {spec.label: self._new_state(spec, named[spec.label]) for spec in table}
        self.split = self.never_tied = not {"embed", "lm_head"} <= set(named)
        self.scatter_order = list(self.states.values())  # the table's
        self.work_order = sorted(self.scatter_order, key=lambda state: state.spec.work)
        self._agreed: dict[tuple[bool, bool], frozenset[str]] = {}
        self.sent = 0  # bytes to other ranks so far
        self._lay_out_hyper()
        self._join_replicated()

    # -- state ------------------------------------------------------------------------------------------------------

    def _new_state(self, spec: ParamSpec, param: nn.Parameter) -> ParamState:
        if not param.is_contiguous():
            raise ValueError(f"{spec.label} must be contiguous, it is updated in place: make it from .contiguous().")
        state = ParamState(spec=spec, param=param, shard=param.data)
        full = state.matrices(param.data)
        if not state.replicated and len(full) % self.world_size:
            raise ValueError(
                f"{spec.label} has {len(full)} {'rows' if state.is_adam else 'matrices'}, which do not divide among "
                f"{self.world_size} ranks: pad it to {kernels.round_up(len(full), self.world_size)}."
            )
        state.shard = full if state.replicated else full.chunk(self.world_size)[self.rank]
        if spec.comms == "sparse" and self.world_size > 1:
            state.exchange = RowExchange(full, self.rank, self.world_size)
        wide = torch.promote_types(param.dtype, torch.float32)
        if state.is_adam:
            state.exp_avg = torch.zeros_like(state.shard, dtype=wide)
            state.exp_avg_sq = torch.zeros_like(state.shard, dtype=wide)
        else:
            B, R, C = state.shard.shape
            state.momentum = torch.zeros_like(state.shard, dtype=wide)
            state.second_moment = state.momentum.new_zeros((B, R, 1) if R >= C else (B, 1, C))
            if param.dtype == torch.bfloat16:
                state.mantissa = torch.zeros_like(state.shard, dtype=torch.uint16)
        return state

    def _lay_out_hyper(self) -> None:
        """One buffer holds every per-step number: a step uploads once, and compiled code holds no constant of it."""
        sizes = [5 if state.is_adam else 3 + len(state.shard) for state in self.states.values()]
        padded = [kernels.round_up(size, 4) for size in sizes]  # 16-byte alignment
        first = next(iter(self.states.values())).param
        wide = torch.promote_types(first.dtype, torch.float32)
        self._device = torch.zeros(sum(padded), dtype=wide, device=first.device)
        for state, part, size in zip(self.states.values(), self._device.split(padded), sizes):
            state.hyper = part[:size]

    def _join_replicated(self) -> None:
        """Lay the replicated Adam parameters of each dtype end to end: one reduction and one launch update them all."""
        replicated = [state for state in self.states.values() if state.is_adam and state.replicated]
        for dtype in dict.fromkeys(state.param.dtype for state in replicated):
            states = [state for state in replicated if state.param.dtype == dtype]
            sizes = [kernels.round_up(state.param.numel(), kernels.ADAM_SEGMENT) for state in states]
            joined = nn.Parameter(states[0].param.new_zeros(sum(sizes)))
            joined.grad = torch.zeros_like(joined)
            whole = self._new_state(dataclasses.replace(states[0].spec, label=str(dtype)), joined)
            starts = [s.hyper.storage_offset() for s, n in zip(states, sizes) for _ in range(n // kernels.ADAM_SEGMENT)]
            whole.starts, whole.hyper = torch.tensor(starts, dtype=torch.int32, device=joined.device), self._device
            buffers = (joined.data, joined.grad, whole.exp_avg, whole.exp_avg_sq)
            for state, *parts in zip(states, *(buffer.split(sizes) for buffer in buffers)):
                data, *rest = (part[: state.param.numel()].view(state.param.shape) for part in parts)
                state.param.data = state.shard = data.copy_(state.param.data)
                state.grad, state.exp_avg, state.exp_avg_sq = rest
                state.whole = whole

    def make_gradients(self) -> None:
        """Zero gradients that stay where they are: graphs hold on to them, and joined ones are reduced in place."""
        for state in self.states.values():
            state.param.grad = state.grad if state.whole else torch.zeros_like(state.param)

    def _fill_hyper(self, active: list[ParamState], lr_mul: float, momentum: float) -> None:
        rows: list[float] = []
        for state in self.states.values():
            row = self._adam_hyper(state, lr_mul) if state.is_adam else self._normuon_hyper(state, lr_mul, momentum)
            if state.whole and state not in active:
                row = [1.0, 1.0, 0.0, self.config.adam_eps, 0.0]  # its whole may move, it does not
            rows += row + [0.0] * (-len(row) % 4)
        # A new pinned tensor a step: the host may be steps ahead, and the allocator keeps this one until it is read.
        host = torch.tensor(rows, dtype=self._device.dtype, pin_memory=self._device.is_cuda)
        self._device.copy_(host, non_blocking=True)

    def _adam_hyper(self, state: ParamState, lr_mul: float) -> list[float]:
        """beta1, beta2, step size with bias correction, eps, decay; see kernels.adam_update_."""
        c, (beta1, beta2), n = self.config, state.spec.betas, state.steps + 1
        lr = c.adam_lr * lr_mul * state.spec.lr_mul
        step_size = lr * math.sqrt(1 - beta2**n) / (1 - beta1**n)
        return [beta1, beta2, step_size, c.adam_eps, lr * lr * c.adam_wd * state.spec.wd_mul]

    def _normuon_hyper(self, state: ParamState, lr_mul: float, momentum: float) -> list[float]:
        """momentum, beta2, decay, then the learning rate of every own matrix."""
        c, spec, (B, R, C) = self.config, state.spec, state.shard.shape
        lr = c.normuon_lr * lr_mul
        mine = range(self.rank * B, (self.rank + 1) * B)  # slot factors go by the index in the whole bank
        rates = [lr * spec.lr_mul * max(1, R / C) ** 0.5 * spec.slot_lr[slot % len(spec.slot_lr)] for slot in mine]
        return [momentum, c.normuon_beta2, lr * c.normuon_wd * spec.wd_mul, *rates]

    # -- step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, *, do_adam: bool, lr_mul: float = 1.0, momentum: float = 0.95) -> None:
        """Update all NorMuon parameters and, with do_adam, all Adam parameters.

        Adam gradients are kept where do_adam is False, so the next step sees their sum. A parameter without a gradient
        on every rank is skipped; one that lacks it on some ranks only raises RuntimeError on all of them. A set that
        changes after the first step of its kind raises where it changed.
        """
        active = [
            s for s in self.scatter_order if (do_adam or not s.is_adam) and (self.split or s.spec.label != "embed")
        ]
        if do_adam and not self.split:
            self._merge_tied_gradient()
        active = self._with_gradients(active, do_adam)
        self._fill_hyper(active, lr_mul, momentum)
        units = list(dict.fromkeys(state.whole or state for state in active))
        self._scatter(active, units)
        for unit in dict.fromkeys(state.whole or state for state in self.work_order if state in active):
            self._update(unit)
        self._finish(active, units, do_adam)

    def touched(self, label: str, rows: Iterable[Tensor], do_adam: bool) -> None:
        """Name, ahead of a step and on every rank, the rows of a sparse parameter it touches; if none does: dense."""
        if exchange := self.states[label].exchange:
            exchange.touch(torch.cat(list(rows)), last=do_adam)

    def _merge_tied_gradient(self) -> None:
        head, embed = self.states["lm_head"].param, self.states["embed"].param
        if embed.grad is not None and head.grad is not None:
            kernels.transpose_add(embed.grad, head.grad)

    def _with_gradients(self, states: list[ParamState], do_adam: bool) -> list[ParamState]:
        """The states whose parameter has a gradient, agreed among the ranks once per kind of step."""
        have = frozenset(state.spec.label for state in states if state.param.grad is not None)
        kind = (do_adam, self.split)
        if self.world_size > 1 and self._agreed.get(kind) != have:
            agree(have, self._agreed.get(kind))
        self._agreed[kind] = have
        return [state for state in states if state.spec.label in have]

    def _scatter(self, active: list[ParamState], units: list[ParamState]) -> None:
        """Launch every reduction, in table order."""
        if loose := [state for state in active if state.whole and state.param.grad is not state.grad]:
            torch._foreach_copy_([state.grad for state in loose], [state.param.grad for state in loose])
        for state in units:
            grad = state.matrices(state.param.grad)
            others = grad.nbytes // self.world_size * (self.world_size - 1)
            self.sent += 2 * others  # a gradient and new weights, or an all-reduce's two halves
            if self.world_size == 1:
                state.grad = grad
            elif state.exchange and (works := state.exchange.send(grad)):
                state.grad, state.pending = grad.chunk(self.world_size)[self.rank], works
                self.sent += state.exchange.bytes - others
            elif state.replicated:
                state.grad = grad
                state.pending = [dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)]
            else:
                state.grad = torch.empty_like(state.shard)
                state.pending = [reduce_scatter(state.grad, grad, op=dist.ReduceOp.AVG, async_op=True)]

    def _update(self, state: ParamState) -> None:
        """Wait for the gradient, update the own slice, launch the gather."""
        for work in state.pending:
            work.wait()
        state.pending = []
        if state.exchange:
            state.exchange.add(state.grad)
        if state.is_adam:
            kernels.adam_update_(state.shard, state.grad, state.exp_avg, state.exp_avg_sq, state.hyper, state.starts)
        else:
            x = kernels.polar_express(kernels.normuon_momentum_(state.grad, state.momentum, state.hyper[0:1]))
            kernels.normalize_variance_(x, state.second_moment, state.hyper[1:2])
            kernels.cautious_update_(state.shard, state.mantissa, x, state.hyper[3:], state.hyper[2:3])
        state.grad = None
        if self.world_size > 1 and not state.replicated:
            full = state.matrices(state.param.data)
            state.pending = [all_gather(full, state.shard, async_op=True)]

    def _finish(self, active: list[ParamState], units: list[ParamState], do_adam: bool) -> None:
        """Wait for the gathers, lm_head's first, and clear the gradients that were used, in place."""
        head = self.states.get("lm_head")
        tied = do_adam and not self.split and head in active
        for state in sorted(units, key=lambda state: state is not head):
            for work in state.pending:
                work.wait()
            state.pending = []
            if state is head and tied:
                kernels.transpose_copy(head.param.data, self.states["embed"].param.data)
        for state in active:
            state.steps += state.is_adam
        used = dict.fromkeys((*units, *active, *([self.states["embed"]] if tied else [])))
        if gradients := [state.param.grad for state in used if state.param.grad is not None]:
            torch._foreach_zero_(gradients)

    # -- tied embedding and state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def split_embed(self) -> None:
        """From now on embed trains on its own, starting from lm_head's moments."""
        if not self.split:
            self.copy_lm_state_to_embed()
            self.split = True

    def copy_lm_state_to_embed(self) -> None:
        """embed's moments <- the transpose of lm_head's. The two are sharded along different axes, so gather first."""
        head, embed = self.states["lm_head"], self.states["embed"]
        embed.steps = head.steps
        for name in ("exp_avg", "exp_avg_sq"):
            getattr(embed, name).copy_(self.gathered(head, getattr(head, name)).T.chunk(self.world_size)[self.rank])

    def gathered(self, state: ParamState, own: Tensor) -> Tensor:
        """One of a state's tensors with the rows of all ranks. NCCL knows no uint16, so bytes travel."""
        if state.replicated or self.world_size == 1:
            return own
        full = own.new_empty(self.world_size * len(own), *own.shape[1:])
        all_gather(full.view(torch.uint8), own.view(torch.uint8))
        return full

    def tensors(self) -> Iterator[tuple[str, ParamState, Tensor]]:
        """Name, parameter's state and own slice of every tensor that an update needs besides weight and gradient."""
        for label, state in self.states.items():
            for name in ("exp_avg", "exp_avg_sq", "momentum", "second_moment", "mantissa"):
                if (own := getattr(state, name)) is not None:
                    yield f"{label}.{name}", state, own

    def snapshot(self, keep: Callable[[str, Tensor], object] = lambda _, full: full.clone()) -> dict[str, dict | bool]:
        """The state of all ranks together, whatever their number, without gradients; `keep` picks what to hold."""
        steps = {label: state.steps for label, state in self.states.items()}
        tensors = {name: keep(name, self.gathered(state, own)) for name, state, own in self.tensors()}
        return {"split": self.split, "steps": steps, "tensors": tensors}

    def restore(self, saved: dict[str, dict | bool] | None = None) -> None:
        """Take over a snapshot or, without one, the first state: in place, gradients zero. Padding may be absent."""
        self.split = saved["split"] if saved else self.never_tied
        for label, state in self.states.items():
            state.steps = saved["steps"][label] if saved else 0
            if state.param.grad is not None:
                state.param.grad.zero_()
            if state.exchange:
                state.exchange.forget()
        for name, state, own in self.tensors():
            own.zero_()
            if saved:
                full = saved["tensors"][name]
                copy_into(own, full if state.replicated else full[self.rank * len(own) :][: len(own)])


# === §6 Data ===
# Owns shards and batches. Which tokens a step sees needs a new baseline; how they are read does not.

SHARD_MAGIC = 20240520
SHARD_VERSION = 1
SHARD_HEADER_INTS = 256  # int32 each: magic, version, number of tokens, zeros; then the tokens as little-endian uint16
CU_SEQLENS = {16384: 64, 32768: 96, 49152: 128}  # v3's lengths of cu_seqlens by T; longer where the data need it


class ShardInfo(NamedTuple):
    """A checked shard."""

    path: Path
    num_tokens: int
    bos_positions: np.ndarray  # int64, ascending


def read_shard(path: str | Path) -> np.ndarray:
    """Map a shard's tokens, uint16 (N,). Raises ValueError with one sentence where the file is not a whole shard."""
    path = Path(path)
    try:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER_INTS)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): check the path and its permissions.") from None
    if len(header) < SHARD_HEADER_INTS:
        raise ValueError(f"{path} is {size} bytes, shorter than a shard's header of 1024: download or write it again.")
    magic, version, count = (int(value) for value in header[:3])
    if magic != SHARD_MAGIC:
        raise ValueError(f"{path} is no token shard, its first number is {magic}, not {SHARD_MAGIC}: write it again.")
    if version != SHARD_VERSION:
        raise ValueError(f"{path} has shard version {version}, and only {SHARD_VERSION} is read: write it again.")
    if count <= 0:
        raise ValueError(f"{path} holds no tokens (its header says {count}): write it again.")
    if size != 4 * SHARD_HEADER_INTS + 2 * count:
        expected = 4 * SHARD_HEADER_INTS + 2 * count
        raise ValueError(f"{path} is {size} bytes but its header promises {expected} ({count} tokens): fetch it again.")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * SHARD_HEADER_INTS, shape=(count,))


def write_shard(path: str | Path, tokens: np.ndarray) -> None:
    """Write tokens (ids below 65536) as a shard; the file appears under its name only when it is whole."""
    path, tokens, header = Path(path), np.asarray(tokens), np.zeros(SHARD_HEADER_INTS, dtype="<i4")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 65536:
        raise ValueError(f"shards hold ids 0 to 65535; got {tokens.min()} to {tokens.max()}: use a smaller vocabulary.")
    header[:3] = SHARD_MAGIC, SHARD_VERSION, len(tokens)
    with checkpoints.whole_file(path) as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())


def check_shard(path: str | Path, *, vocab_size: int, bos_id: int) -> ShardInfo:
    """Read every token once. Raises ValueError with one sentence for ids beyond the vocabulary or no document start."""
    tokens = read_shard(path)
    if tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        raise ValueError(
            f"{path} holds token id {tokens[position]} at position {position}, but vocab_size={vocab_size} allows ids "
            f"up to {vocab_size - 1}: set vocab_size= and bos_id= to the tokenizer's."
        )
    bos_positions = np.flatnonzero(tokens == bos_id)
    if len(bos_positions) == 0:
        raise ValueError(f"{path} holds no document start (token {bos_id}): set bos_id= or write them.")
    return ShardInfo(Path(path), len(tokens), bos_positions)


def find_shards(pattern: str, cfg: RunConfig) -> list[Path]:
    """Shards matching a glob under DATA_PATH (default: the current folder), by name. Raises ValueError if none."""
    folder = os.environ.get("DATA_PATH", ".")  # an absolute pattern replaces it
    where, names = Path(folder, pattern), glob.glob(os.path.join(glob.escape(folder), pattern), recursive=True)
    found = sorted(path for path in map(Path, names) if not path.is_dir())
    if not found:
        base, maker = PRESETS[cfg.preset](), {"demo": "demo_text", "record": "cached_fineweb10B"}[cfg.preset]
        if pattern not in (base.train_files, base.val_files):
            raise ValueError(f"no shards match {where.absolute()}: correct train_files=, val_files= or DATA_PATH.")
        raise ValueError(f"no shards match {where}: get them with python data/{maker}.py (or set DATA_PATH).")
    return found


Spans = list[tuple[int, int]]  # half-open ranges of one shard's tokens


def cut_piece(starts: list[int], cursor: int, length: int, max_len: int) -> tuple[Spans, int]:
    """Spans of whole documents, cut at max_len, that make `length` + 1 tokens; [] where the shard ran out first.

    `starts` are the shard's document starts followed by its length. The last span is cut to fit, and what was cut off
    any document is never served.
    """
    spans, filled = [], 0
    while filled <= length:
        if cursor == len(starts) - 1:
            return [], cursor
        start = starts[cursor]
        end = min(starts[cursor + 1], start + max_len, start + length - filled + 1)
        spans.append((start, end))
        filled += end - start
        cursor += 1
    return spans, cursor


def cut_batches(
    shards: list[ShardInfo], requests: Iterable[tuple[int, int]], pieces: int, epochs: int = 1
) -> Iterator[tuple[int, list[Spans]]]:
    """For each request (T, max_len): (shard index, the spans of `pieces` pieces of T + 1 tokens).

    A global batch comes from one shard; where the shard runs out inside it, the whole batch is dropped and cut anew
    from the next shard. Ends early where the data do.
    """
    order = iter([i for _ in range(epochs) for i in range(len(shards))])
    current = next(order)
    starts, cursor = [*shards[current].bos_positions.tolist(), shards[current].num_tokens], 0
    for length, max_len in requests:
        while True:
            batch = []
            for _ in range(pieces):
                spans, cursor = cut_piece(starts, cursor, length, max_len)
                if not spans:
                    break
                batch.append(spans)
            if len(batch) == pieces:
                break
            if (current := next(order, None)) is None:
                return
            starts, cursor = [*shards[current].bos_positions.tolist(), shards[current].num_tokens], 0
        yield current, batch


class DataPlan(NamedTuple):
    """What a run needs to know of its data before it starts."""

    train: list[ShardInfo]
    val: list[Path]
    cu_lengths: dict[int, int]  # T -> length of cu_seqlens


def cu_length(tokens: int, documents: int) -> int:
    """Length of cu_seqlens for T tokens: v3's where that holds the documents, else as many as are needed."""
    v3 = CU_SEQLENS.get(tokens, kernels.round_up(max(tokens // 300, 1), 128))
    return max(v3, kernels.round_up(documents + 2, 16))


def data_plan(cfg: RunConfig, pieces: int) -> DataPlan:
    """Check every shard and run the cutter over the whole schedule. Raises ValueError with one sentence."""
    paths = find_shards(cfg.train_files, cfg)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        train = list(pool.map(lambda path: check_shard(path, vocab_size=cfg.vocab_size, bos_id=cfg.bos_id), paths))
    lengths: dict[int, int] = {}
    requests = [(stage.batch_tokens // pieces, stage.max_doc_len) for stage in stages_by_step(cfg)]
    steps = 0
    for _, batch in cut_batches(train, requests, pieces, cfg.epochs):
        tokens = requests[steps][0]
        documents = max(len(spans) for spans in batch) + (3 if cfg.micro_splits > 1 else 0)  # see split_piece
        lengths[tokens] = max(lengths.get(tokens, 0), cu_length(tokens, documents))
        steps += 1
    if steps < cfg.total_steps:
        raise ValueError(_too_few_tokens(cfg, train, requests, pieces, steps))
    val = find_shards(cfg.val_files, cfg)
    if both := sorted({path.resolve() for path in paths} & {path.resolve() for path in val}):
        raise ValueError(f"{both[0]} is in train_files= and in val_files=: give validation shards of its own.")
    lengths[cfg.schedule.val_chunk] = max(lengths.get(cfg.schedule.val_chunk, 0), _check_val(cfg, val))
    return DataPlan(train, val, lengths)


def _too_few_tokens(
    cfg: RunConfig, train: list[ShardInfo], requests: list[tuple[int, int]], pieces: int, steps: int
) -> str:
    """The sentence for data that end early; it proposes a number of epochs only after trying it."""
    need, usable = (sum(length * pieces for length, _ in part) for part in (requests, requests[:steps]))
    most = MAXIMUM["epochs"]

    def enough(epochs: int) -> bool:
        return sum(1 for _ in cut_batches(train, requests, pieces, epochs)) == len(requests)

    n = bisect.bisect_left(range(most + 1), True, lo=cfg.epochs, key=enough) if usable else most + 1
    remedy = f"add shards, or set fewer scheduled_steps= or epochs={n}" if n <= most else "add shards or longer ones"
    found, shards = sum(shard.num_tokens for shard in train), f"{len(train)} training shard{'s' * (len(train) != 1)}"
    return (
        f"the schedule needs {need:,} tokens, and {shards} of {found:,} tokens give {usable:,} usable ones "
        f"({steps} of {len(requests)} steps; tails of long documents are cut off): {remedy}."
    )


def _check_val(cfg: RunConfig, paths: list[Path]) -> int:
    """Check that validation finds its tokens; the length of cu_seqlens that its sequences need."""
    chunk, longest, served = cfg.schedule.val_chunk, 0, 0
    for path in paths:
        shard = check_shard(path, vocab_size=cfg.vocab_size, bos_id=cfg.bos_id)
        usable = (shard.num_tokens - 1) // (PIECES * chunk) * PIECES * chunk
        starts = shard.bos_positions[shard.bos_positions < usable]
        longest = max([longest, *np.bincount(starts // chunk).tolist()])
        served += usable
    if served < cfg.val_tokens:
        raise ValueError(
            f"val_tokens={cfg.val_tokens} needs as many tokens, and {cfg.val_files} gives {served} in whole groups of "
            f"{PIECES * chunk}: set val_tokens={served}."
            if served
            else f"{cfg.val_files} holds fewer than {PIECES * chunk + 1} tokens, the least: add data (--val-fraction)."
        )
    return cu_length(chunk, longest)


def bigram_hash(tokens: np.ndarray, rows: int) -> np.ndarray:
    """Row of bigram_embed for each token and the one before it, int32 (T,); products wrap at 32 bits.

    Position 0 takes the last row. Position 1 does not see token 0: the last row's number stands in its place.
    """
    modulus = rows - 1
    before = np.concatenate(([modulus, modulus], tokens[1:-1])).astype(np.int32)[: len(tokens)]
    mixed = (np.int32(36313) * tokens.astype(np.int32)) ^ (np.int32(27191) * before)
    mixed = mixed % np.int32(modulus)
    mixed[0] = modulus
    return mixed


def sign_rows(tokens: Tensor, rows: int) -> Tensor:
    """Row of the sign table for each token and the one before it, (T,); position 0 takes row 0."""
    return F.pad((tokens[:-1] ^ tokens[1:]) % rows, (1, 0))


def split_piece(
    tokens: np.ndarray, boundaries: np.ndarray, splits: int, max_len: int, filler: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Cut a packed piece at document boundaries into `splits` of one fixed length: (tokens, boundaries, used tokens).

    Each is filled up with documents of `filler` tokens that carry no target; the cut nearest to the even one is taken.
    """
    total = len(tokens) - 1
    length = min(total, kernels.round_up(-(-total // splits) + max_len, 16))
    cuts = [int(boundaries[np.abs(boundaries - total * k // splits).argmin()]) for k in range(splits + 1)]
    for start, end in zip(cuts, cuts[1:]):
        inside = boundaries[(boundaries >= start) & (boundaries <= end)] - start
        padding = np.arange(end - start, length, max_len)
        part = np.full(length + 1, filler, dtype=tokens.dtype)
        part[: end - start + 1] = tokens[start : end + 1]
        yield part, np.concatenate((inside, padding[1:])), end - start


def packed_batch(
    tokens: np.ndarray, starts: np.ndarray, cu_len: int, bigram_rows: int, device: torch.device, used: int | None = None
) -> Batch:
    """Inputs, targets and document boundaries of T + 1 tokens, on the device. `starts` begin with 0.

    Positions from `used` on are filling: they have no target.
    """
    inputs = tokens[:-1].astype(np.int32)
    cu_seqlens = np.full(cu_len, len(inputs), dtype=np.int32)
    cu_seqlens[: len(starts)] = starts
    targets = tokens[1:].astype(np.int64)
    if used is not None:
        targets[used:] = -1
    arrays = (inputs, targets, cu_seqlens, bigram_hash(inputs, bigram_rows))
    tensors = (torch.from_numpy(array) for array in arrays)
    if device.type == "cuda":
        tensors = (tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors)
    return Batch(*tensors)


class TrainLoader:
    """This rank's micro-batches, step by step or for `only` some steps: `next(loader)` is a list of `accum` Batches.

    A thread cuts and uploads one step ahead and reads the next shard while the current one is used; what goes wrong
    there is raised by next().
    """

    def __init__(self, cfg: RunConfig, plan: DataPlan, runtime: Runtime, first_step: int = 0, only: Sequence = ()):
        self.cfg, self.plan, self.runtime = cfg, plan, runtime
        requests = ((stage.batch_tokens // runtime.pieces, stage.max_doc_len) for stage in stages_by_step(cfg))
        batches = enumerate(cut_batches(plan.train, requests, runtime.pieces, cfg.epochs))
        for _ in range(first_step):
            next(batches)
        self.batches = ((step, *batch) for step, batch in batches if not only or step in only)
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="loader")
        self.shards: dict[int, Future[np.ndarray]] = {}
        self.ahead: Future[list[Batch] | None] | None = None  # lazy: the first read happens on the clock

    def __next__(self) -> list[Batch]:
        batch = (self.ahead or self.pool.submit(self._build)).result()
        if batch is None:
            raise StopIteration
        self.ahead = self.pool.submit(self._build)
        return batch

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _tokens(self, index: int) -> np.ndarray:
        """Tokens of the current shard; the next one starts loading, older ones are dropped."""
        after = index + 1 if index + 1 < len(self.plan.train) else 0 if self.cfg.epochs > 1 else index
        for i in (index, after):
            if i not in self.shards:
                self.shards[i] = self.pool.submit(lambda path: np.array(read_shard(path)), self.plan.train[i].path)
        self.shards = {i: future for i, future in self.shards.items() if i in (index, after)}
        return self.shards[index].result()

    def _build(self) -> list[Batch] | None:
        step, index, pieces = next(self.batches, (None, None, None))
        if index is None:
            return None
        tokens, batch, longest = self._tokens(index), [], stage_at(self.cfg, step).max_doc_len
        for micro in range(self.runtime.accum):
            spans = pieces[micro * self.runtime.world_size + self.runtime.rank]
            ends = np.cumsum([end - start for start, end in spans])
            ends[-1] -= 1  # the last token is only a target
            packed = np.concatenate([tokens[start:end] for start, end in spans])
            length = self.plan.cu_lengths[len(packed) - 1]
            boundaries = np.concatenate(([0], ends))
            parts = [(packed, boundaries, None)]
            if self.cfg.micro_splits > 1:
                parts = split_piece(packed, boundaries, self.cfg.micro_splits, longest, self.cfg.bos_id)
            for part, starts, used in parts:
                rows, device = self.cfg.model.bigram_rows, self.runtime.device
                batch.append(packed_batch(part, starts, length, rows, device, used))
        return batch


def val_batches(cfg: RunConfig, plan: DataPlan, runtime: Runtime) -> Iterator[Batch]:
    """This rank's validation sequences: contiguous, unaligned, from the start of the validation files every time."""
    chunk, left = cfg.schedule.val_chunk, cfg.val_tokens
    for path in plan.val:
        tokens = read_shard(path)
        for position in range(0, (len(tokens) - 1) // (PIECES * chunk) * PIECES * chunk, PIECES * chunk):
            if left == 0:
                return
            for piece in range(runtime.rank, PIECES, runtime.world_size):
                start = position + piece * chunk
                part = np.array(tokens[start : start + chunk + 1])
                boundaries = np.concatenate(([0], np.flatnonzero(part[:-1] == cfg.bos_id)))
                yield packed_batch(part, boundaries, plan.cu_lengths[chunk], cfg.model.bigram_rows, runtime.device)
            left -= PIECES * chunk


# === §7 Schedule ===
# Owns pure functions of the step number. Any change here needs a new baseline.


def stage_ends(cfg: RunConfig) -> tuple[int, ...]:
    """First step after each stage; the extension is the last stage."""
    n = len(cfg.schedule.stages)
    return (*(round(cfg.scheduled_steps * (i + 1) / n) for i in range(n)), cfg.total_steps)


def stage_index(cfg: RunConfig, step: int) -> int:
    """Stage of a step; steps past the end belong to the last one."""
    ends = stage_ends(cfg)
    return next((i for i, end in enumerate(ends) if step < end), len(ends) - 1)


def stage_at(cfg: RunConfig, step: int) -> Stage:
    return (*cfg.schedule.stages, cfg.schedule.extension)[stage_index(cfg, step)]


def stages_by_step(cfg: RunConfig) -> list[Stage]:
    return [stage_at(cfg, step) for step in range(cfg.total_steps)]


def split_step(cfg: RunConfig) -> int:
    """The step after whose update embed leaves lm_head: the first odd one of the last scheduled stage."""
    return stage_ends(cfg)[len(cfg.schedule.stages) - 2] | 1


def is_adam_step(step: int) -> bool:
    """Whether this step updates the Adam parameters."""
    return step % 2 == 1


def lr_multiplier(cfg: RunConfig, step: int) -> float:
    """The stage's factor, then a straight line from it to the floor over the cooldown."""
    s, peak = cfg.schedule, stage_at(cfg, step).lr_mul
    start = int(cfg.scheduled_steps * (1 - s.cooldown))
    if step < start:
        return peak
    t = min(1.0, (step - start) / (cfg.scheduled_steps - start))
    return peak * (1 - t) + s.lr_floor * t


def muon_momentum(cfg: RunConfig, step: int) -> float:
    """Up over the warm-up, down over the last steps; the warm-up wins where a short schedule makes them overlap."""
    s, (low, high) = cfg.schedule, cfg.schedule.momentum
    if step < s.momentum_warmup:
        return low + (high - low) * step / s.momentum_warmup
    past = step - (cfg.total_steps - s.momentum_cooldown)
    return high - (high - low) * past / s.momentum_cooldown if past > 0 else high


def mtp_weights(cfg: RunConfig, step: int) -> list[float]:
    """Weights of the next token and the ones after it, linear within the stage."""
    ends, i = (0, *stage_ends(cfg)), stage_index(cfg, step)
    t = min(1.0, (step - ends[i]) / max(1, ends[i + 1] - ends[i]))
    return [a + (b - a) * t for a, b in stage_at(cfg, step).mtp]


def view_at(cfg: RunConfig, step: int, *, attention: str = "reference", fp8: bool = False) -> View:
    """Windows in tokens and the softmax scale of a step's stage."""
    stage, block = stage_at(cfg, step), cfg.schedule.window_block
    _, scale = yarn(long_windows(cfg, step), cfg.model.head_dim)
    return View(stage.short * block, stage.long * block, scale, stage.max_doc_len, attention, fp8)


def long_windows(cfg: RunConfig, step: int) -> list[int]:
    """Long windows, in tokens, of all stages up to this step's: YaRN's history."""
    stages = (*cfg.schedule.stages, cfg.schedule.extension)[: stage_index(cfg, step) + 1]
    return [stage.long * cfg.schedule.window_block for stage in stages]


def warmup_steps(cfg: RunConfig) -> list[int]:
    """Steps run before the clock so that every shape is compiled: the first two and four around every stage change."""
    edges = [end + k for end in stage_ends(cfg)[:-1] for k in (-2, -1, 0, 1)]
    return sorted({step for step in (0, 1, *edges) if 0 <= step < cfg.total_steps})


# === §8 Training ===
# Owns warm-up, timed loop, validation, checkpoints. What the clock counts is FROZEN: changing it spoils comparisons.


class MicroStep:
    """Forward and backward of one micro-batch, adding to the gradients of parameters and folded matrices. Returns the
    scaled loss, 0-d.

    On a GPU each shape is captured once as a CUDA graph and replayed, so that Python costs nothing per kernel. What
    changes between replays lies in static tensors: the batch and the multi-token weights are copied in; parameters,
    folded matrices, gradients, FP8 copies and rotary tables stay where they are. Graphs share one pool, as only one
    runs at a time.
    """

    def __init__(self, model: GPT, scale: float, filled: bool):
        self.model, self.filled = model, filled
        self.scale = scale  # ranks average, so it makes 1/8 of all tokens' sum
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if model.embed.is_cuda else None

    def __call__(self, batch: Batch, view: View, weights: Tensor) -> Tensor:
        if self.pool is None:
            return self._run(batch, view, weights)
        key = (view, *(tensor.shape for tensor in (*batch, weights)))
        if key not in self.graphs:
            self.graphs[key] = self._capture(batch, view, weights)
        graph, static, loss = self.graphs[key]
        for held, fresh in zip(static, (*batch, weights)):
            held.copy_(fresh)
        graph.replay()
        return loss.clone()

    def _run(self, batch: Batch, view: View, weights: Tensor) -> Tensor:
        losses = self.model(batch, view, weights)
        if self.filled:  # filling must not push down the probability of every token
            losses = losses * (batch.targets >= 0)
        loss = losses.sum() * self.scale
        loss.backward()
        return loss.detach()

    def _capture(self, batch: Batch, view: View, weights: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        """Run once on the side, with gradients of its own, so that kernels compile; then record."""
        static = [tensor.clone() for tensor in (*batch, weights)]
        parameters, graph = [*self.model.parameters(), *self.model.folded], torch.cuda.CUDAGraph()
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(Batch(*static[:-1]), view, static[-1])
        torch.cuda.current_stream().wait_stream(side)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        torch.cuda.empty_cache()  # or the trial's memory would stay beside the graphs' own
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            loss = self._run(Batch(*static[:-1]), view, static[-1])
        return graph, static, loss


class Trainer:
    """Model, optimizer and stage state of one run on one rank."""

    def __init__(self, cfg: RunConfig, plan: DataPlan, runtime: Runtime, attention: str, fp8: bool):
        self.cfg, self.plan, self.runtime, self.attention = cfg, plan, runtime, attention
        self.fp8 = fp8
        seed = cfg.seed if runtime.main else None  # rank 0 draws, the others receive
        self.model = GPT(cfg.model, world_size=runtime.world_size, seed=seed).to(runtime.device)
        if runtime.world_size > 1:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                dist.broadcast(tensor.data, 0)
        self.optimizer = NorMuonAndAdam(
            self.model.named_parameters(), cfg.table, cfg.optim, rank=runtime.rank, world_size=runtime.world_size
        )
        self.optimizer.make_gradients()
        self.micro_step = MicroStep(self.model, runtime.world_size / PIECES, cfg.micro_splits > 1)
        self.rotary: dict[int, tuple[Tensor, Tensor]] = {}  # by stage: graphs hold on to their tables
        self.stage = None
        self.facts = facts(cfg)  # of the sources as they are now
        self.enter(0)
        self.model.refresh(self.fp8)

    def enter(self, step: int) -> None:
        """Put the stage of `step` in force: its rotary tables."""
        if self.stage == stage_index(self.cfg, step):
            return
        self.stage = stage_index(self.cfg, step)
        if self.stage not in self.rotary:
            freqs, _ = yarn(long_windows(self.cfg, step), self.cfg.model.head_dim)
            self.model.rotate_to(freqs, 2 * max(self.plan.cu_lengths))
            self.rotary[self.stage] = self.model.cos, self.model.sin
        self.model.cos, self.model.sin = self.rotary[self.stage]

    def train_step(self, step: int, batches: list[Batch]) -> Tensor:
        """One optimizer step. Returns the scaled loss summed over this rank's tokens, on the device."""
        self.enter(step)
        view = view_at(self.cfg, step, attention=self.attention, fp8=self.fp8)
        weights = torch.tensor(mtp_weights(self.cfg, step)).to(self.runtime.device, non_blocking=True)
        self.optimizer.touched("bigram_embed", (batch.bigram_rows for batch in batches), is_adam_step(step))
        loss = sum(self.micro_step(batch, view, weights) for batch in batches)
        self.model.unfold()
        self.optimizer.step(
            do_adam=is_adam_step(step), lr_mul=lr_multiplier(self.cfg, step), momentum=muon_momentum(self.cfg, step)
        )
        if step == split_step(self.cfg):
            self.optimizer.split_embed()
        self.model.refresh(self.fp8)
        return loss

    @torch.no_grad()
    def validate(self, step: int, limit: int | None = None) -> float:
        """Mean next-token cross-entropy in nats over val_tokens (or over `limit` sequences), always without FP8."""
        self.enter(step)
        view = val_view(self.cfg, step, self.attention)
        total = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)  # with over eight ranks some have none
        for batch in itertools.islice(val_batches(self.cfg, self.plan, self.runtime), limit):
            total[0] += self.model(batch, view).mean()
            total[1] += 1
        if self.runtime.world_size > 1:
            dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def warm_up(self, log: RunLog) -> None:
        """Run validation and full steps of every shape the schedule holds, then restore the state exactly.

        The widest shapes first: graphs share one pool, and narrower ones fit into the blocks that wider ones took.
        """
        steps = warmup_steps(self.cfg)
        log.say("Compiling model and warming up kernels")
        log.say(f"Sampling steps {steps} for warmup")
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        with contextlib.closing(TrainLoader(self.cfg, self.plan, self.runtime, only=steps)) as loader:
            batches = {step: next(loader) for step in steps}
        first_of_stage = {stage_index(self.cfg, step): step for step in reversed(steps)}.values()
        for step in sorted(steps, key=lambda step: -stage_at(self.cfg, step).batch_tokens):
            if step in first_of_stage:
                self.validate(step, limit=1)
            self.train_step(step, batches[step])
        self.validate(self.cfg.total_steps, limit=1)
        self.load({"model": weights, "optimizer": None})
        self.enter(0)
        log.say("Resetting Model")

    def save(self, log: RunLog, step: int, seconds: float) -> Path:
        """Write the run's state as logs/<run_id>/state_step<step>.pt. Collective; if it fails, Stopped on all ranks."""
        state = {"step": step, "seconds": seconds, "world_size": self.runtime.world_size, **self.facts}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.snapshot}
        path = Path("logs") / (log.path.stem if log.path else "") / f"state_step{step:06d}.pt"
        checkpoints.save(path, state, blank_state(self.cfg), self.runtime.rank, self.runtime.world_size)
        log.say(f"saved {path} (clock stopped)")
        return path

    @torch.no_grad()
    def load(self, saved: dict) -> None:
        """Go on from a state, in place, so that graphs stay valid."""
        for name, held in self.model.state_dict().items():
            copy_into(held, saved["model"][name])
        self.optimizer.restore(saved["optimizer"])
        self.model.refresh(self.fp8)


def blank_state(cfg: RunConfig) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a state's tensors, model and optimizer: those of one rank, without data."""
    plan = parameter_plan(cfg.model)
    params = {label: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for label, p in plan.items()}
    return params | NorMuonAndAdam(params, cfg.table).snapshot()["tensors"]


def val_view(cfg: RunConfig, step: int, attention: str) -> View:
    """The view of a validation after so many steps; the last one looks further back."""
    view = view_at(cfg, step, attention=attention)._replace(max_len=cfg.schedule.val_chunk)
    last = cfg.schedule.final_long * cfg.schedule.window_block
    return view._replace(long=last) if step == cfg.total_steps else view


def train(trainer: Trainer, log: RunLog, saved: dict | None = None) -> float:
    """The timed loop, from the start or from a saved state. Returns the final validation loss."""
    cfg, runtime, total = trainer.cfg, trainer.runtime, trainer.cfg.total_steps
    first, seconds = (saved["step"], saved["seconds"]) if saved else (0, 0.0)
    if saved:
        trainer.load(saved)
    loader, clock = TrainLoader(cfg, trainer.plan, runtime, first), Clock(runtime, seconds)
    limit = 2 * math.log(cfg.model.vocab_padded)  # twice the loss of equal guesses
    watch = checkpoints.Watch(runtime.rank, runtime.world_size, runtime.device, limit)
    bar = tqdm(total=total, initial=first, unit="step", ncols=88, disable=not (runtime.main and cfg.preset == "demo"))
    val_loss, due, unsaved = math.nan, False, None
    gc.collect()  # a tenth of a second, and not again: steps leave no cycles behind
    with watch.signals(), bar, contextlib.closing(loader), contextlib.ExitStack() as at_end:
        gc.disable()
        at_end.callback(gc.enable)
        clock.start()
        for step in range(first, total + 1):
            if cfg.checkpoint_every and step > first:
                due |= step % cfg.checkpoint_every == 0 or step == total
            no_gradient_waits = not is_adam_step(step) or step == total
            if (due or watch.agreed) and no_gradient_waits:
                clock.stop()
                bar.clear()
                try:
                    path, due = trainer.save(log, step, clock.seconds), False
                except Stopped as problem:
                    if step < total or watch.agreed:
                        raise
                    unsaved = problem  # told when the run's result is known
                clock.start()
                if not unsaved:
                    watch.leave(f"after step {step} of {total}: go on with resume={path}")
            if step % cfg.val_every == 0 or step == total:
                clock.stop()
                val_loss, ms = trainer.validate(step), 1000 * clock.seconds
                per_step = ms / max(step, 1)
                bar.clear()
                log.say(f"step:{step}/{total} val_loss:{val_loss:.4f} train_time:{ms:.0f}ms step_avg:{per_step:.2f}ms")
                watch.check("validation loss", step, val_loss)
                clock.start()
            if step == total:
                break
            loss = trainer.train_step(step, next(loader))
            ms = 1000 * clock.now()
            line = f"step:{step + 1}/{total} train_time:{ms:.0f}ms step_avg:{ms / (step + 1):.2f}ms"
            log.say(line) if bar.disable else log.write(line)
            if step == first | 1 and (exchange := trainer.optimizer.states["bigram_embed"].exchange):
                log.write(f"bigram_embed: {exchange}")
            watch.observe(step, loss, PIECES / stage_at(cfg, step).batch_tokens / sum(mtp_weights(cfg, step)))
            if val_loss == val_loss:  # none yet after resuming
                bar.set_postfix_str(f"val_loss {val_loss:.4f}", refresh=False)
            bar.update()
    if unsaved:
        raise unsaved
    return val_loss


# === §9 main ===
# Owns show= and the order of a run: options, checks, log, data, model, warm-up, training. Needs no new baseline.


def plan_rows(cfg: RunConfig) -> list[dict]:
    names = [f.name for f in dataclasses.fields(LayerSpec)]
    return [{"layer": i} | {name: getattr(spec, name) for name in names} for i, spec in enumerate(cfg.model.plan)]


def lane_slices(lanes: Sequence[Lane]) -> dict[tuple[str, int], slice]:
    """Columns of each lane in its gate's output."""
    ends = list(itertools.accumulate(lane.width for lane in lanes))
    return {(lane.name, lane.layer): slice(end - lane.width, end) for lane, end in zip(lanes, ends)}


def gate_rows(cfg: RunConfig) -> list[dict]:
    m, rows = cfg.model, []
    gates = [(f"{when} gate", m.gate_lanes(post=when == "post"), m.gate_scale) for when in ("pre", "post")]
    for block, lanes, scale in (*gates, ("mudd", MUDD_LANES, MUDD_SCALE), ("output mudd", OUTPUT_LANES, MUDD_SCALE)):
        for lane, columns in zip(lanes, lane_slices(lanes).values()):
            row = {"block": block, "lanes": f"{columns.start}-{columns.stop - 1}"}
            row |= {"name": lane.name, "layer": lane.layer}
            rows.append(row | {"first value": f"{lane.init:.4g}", "stored bias": f"{lane.init / scale:.4g}"})
    return rows


def param_rows(cfg: RunConfig) -> list[dict]:
    plan, rows = parameter_plan(cfg.model, world_size=PIECES), []
    check_param_table(cfg.table, plan)
    for spec in cfg.table:
        shape, dtype, _ = plan[spec.label]
        size = {"shape on 8 GPUs": "x".join(map(str, shape)), "count": f"{math.prod(shape):,}"}
        row = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
        rows.append({"label": row.pop("label")} | size | {"dtype": str(dtype).removeprefix("torch.")} | row)
    for world_size in (8, 4, 2, 1):
        total = sum(math.prod(row.shape) for row in parameter_plan(cfg.model, world_size).values())
        rows.append(dict.fromkeys(rows[0], "") | {"label": f"total, world size {world_size}", "count": f"{total:,}"})
    return rows


def schedule_rows(cfg: RunConfig) -> list[dict]:
    s, ends, total, events = cfg.schedule, stage_ends(cfg), cfg.total_steps, {}
    warm, falls = s.momentum_warmup, total - s.momentum_cooldown
    moments = [(0, "start"), *((end, "stage change") for end in ends[:-2]), (total, "last validation")]
    moments += [(split_step(cfg), "embed splits after this step"), (ends[-2], "extension")]
    moments += [(int(cfg.scheduled_steps * (1 - s.cooldown)), "cooldown starts"), (max(warm, falls), "momentum falls")]
    moments += [(warm, "momentum is warm")] if warm <= falls else []
    for step, event in moments:
        if step < total or event == "last validation":  # others may lie behind a short run's end
            events[step] = f"{events[step]}, {event}" if step in events else event
    rows = []
    for step, event in sorted(events.items()):
        stage, view = stage_at(cfg, step), val_view(cfg, step, cfg.attention)  # a step's windows are its validation's
        row = {"step": step, "stage": stage_index(cfg, step), "tokens": stage.batch_tokens}
        row |= {"max doc": stage.max_doc_len, "short": view.short, "long": view.long, "attn scale": f"{view.scale:.6f}"}
        row |= {"lr x": f"{lr_multiplier(cfg, step):.6f}", "momentum": f"{muon_momentum(cfg, step):.4f}"}
        rows.append(row | {"mtp weights": [round(w, 3) for w in mtp_weights(cfg, step)], "event": event})
    return rows


TABLES = {"plan": plan_rows, "gates": gate_rows, "params": param_rows, "schedule": schedule_rows}  # show=


def project_sources() -> dict[str, str]:
    """Text of every project file this process has loaded, train_gpt.py first."""
    loaded = {Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    ours = [path.relative_to(ROOT) for path in loaded if path.is_relative_to(ROOT) and path.is_file()]
    ours = {p.as_posix() for p in ours if p.suffix == ".py" and not {"site-packages", "tests"} & set(p.parts)}
    names = [*SOURCES, *sorted(ours - set(SOURCES))]
    return {name: (ROOT / name).read_bytes().decode() for name in names}


def run(cfg: RunConfig) -> None:
    """One whole run on this rank. Raises ValueError, the same on every rank, for what a user can mend, and Stopped."""
    demo = importlib.import_module("data.demo_text") if cfg.preset == "demo" else None
    sources = project_sources()  # before anything slow, so that an edit during the run cannot reach the log
    rank, local_rank, world_size = launched_ranks()
    plan, saved = prepare(cfg, world_size)
    runtime = start_runtime(local_rank, rank, world_size)
    try:
        preflight.try_gpu(runtime.device, rank, world_size)
        attention, why = choose_attention(cfg.attention, runtime.device, cfg.model.head_dim, cfg.model.dtype)
        fp8, why_fp8 = choose_fp8(cfg, runtime.device)
        log = RunLog(Path("logs") / f"{cfg.run_id or uuid.uuid4()}.txt" if runtime.main else None)
        log_header(log, cfg, runtime, sources)
        if runtime.device.type == "cuda":
            free, total = (amount / 2**30 for amount in torch.cuda.mem_get_info())
            log.say(f"free memory: {free:.1f} of {total:.1f} GiB on {torch.cuda.get_device_name()}")
            log.say("repeatable: first weights and data order; losses only to rounding, as GPU sums change their order")
        log.say(f"attention: {attention} ({why}); fp8: {'on' if fp8 else 'off'} ({why_fp8})")
        tokens = " / ".join(str(stage.batch_tokens) for stage in (*cfg.schedule.stages, cfg.schedule.extension))
        log.say(f"tokens per step: {tokens}, as {runtime.accum} micro-batches on each of {runtime.world_size} ranks")
        if saved:
            ms, ranks = round(1000 * saved["seconds"]), saved["world_size"]
            log.say(f"resumed: {saved['path']} (step {saved['step']}, clock {ms}ms, world size {ranks})")
        with checkpoints.telling(runtime.rank, runtime.world_size, log, cfg.micro_splits, MAXIMUM["micro_splits"]):
            trainer = Trainer(cfg, plan, runtime, attention, fp8)
            if runtime.device.type == "cuda":
                trainer.warm_up(log)
            loss = train(trainer, log, saved)
        if runtime.device.type == "cuda":
            peaks = torch.cuda.max_memory_allocated() // 2**20, torch.cuda.max_memory_reserved() // 2**20
            log.say("peak memory allocated: {} MiB reserved: {} MiB".format(*peaks))
        if demo and runtime.main:
            log.say(demo.verdict(loss, plan, cfg))
        log.end()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Takes options, returns the exit code: 0; 2 after a sentence per problem; Stopped's own; 130 for early Ctrl+C."""
    if {"-h", "--help"} & set(argv):
        of = {name: f"  of {'|'.join(filter(None, words))}" for name, words in CHOICES.items()}
        cfg = PRESETS["demo" if "preset=demo" in argv else "record"]()
        options = "".join(f"\n    {name}={getattr(cfg, name)}{of.get(name, '')}" for name in OPTIONS)
        print(__doc__.partition("\n\nEvery run")[0], f"\n\nOptions and the {cfg.preset} preset's values:{options}")
        return 0
    try:
        cfg = parse_options(argv)
        if cfg.show:
            print(format_table(TABLES[cfg.show](cfg)))
        elif world_size := os.environ.get("PREFLIGHT_WORLD_SIZE"):  # run.sh asks before it starts torchrun
            if not world_size.lstrip("-").isdecimal():
                raise ValueError(f"the number of GPUs must be a whole number; got {world_size}: set NPROC= to one.")
            prepare(cfg, int(world_size))
        else:
            run(cfg)
        return 0
    except (ValueError, Stopped) as problem:
        told, code = str(problem), getattr(problem, "code", 2)
    except KeyboardInterrupt:
        told, code = "interrupted outside the training loop: nothing new was saved.", 130
    rank, world_size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if rank.isdecimal() and world_size.isdecimal() and 0 < int(rank) < int(world_size):
        time.sleep(5)  # rank 0 tells, and the launcher then ends this rank; where it does not, this one has to tell
        if code != 2:  # all ranks stopped together, and rank 0 knows the path to go on from
            return code
    print("\n".join(f"error: {line}" for line in told.splitlines()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(preflight.steadily(main, sys.argv[1:]))
