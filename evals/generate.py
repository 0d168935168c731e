"""generate.py: text from a checkpoint, on a GPU if there is one, else on the CPU.

    python evals/generate.py latest --prompt "The history of"     # the newest checkpoint in logs/
    python evals/generate.py RUN_ID --temperature 0.8 --top-k 50  # a run's newest
    python evals/generate.py logs/RUN_ID/state_step001290.pt --loss

The model reads its whole context again for every token: slow, simple, and the very forward pass that was trained.
--loss prints what the trainer's validation gives for the same state; it needs the validation shards, nothing else does.
"""

import argparse
import codecs
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]
import checkpoints  # noqa: E402
import train_gpt as t  # noqa: E402
from data.fineweb import ByteEncoding, load_gpt2  # noqa: E402

BUCKET = (
    128  # contexts are filled up to a multiple of so many tokens: kernels meet few lengths, no new one at each token
)


class Trained(NamedTuple):
    """A model as the trainer would validate it, and where it stood."""

    model: t.GPT
    cfg: t.RunConfig
    step: int
    view: t.View


def find(where: str) -> Path:
    """checkpoints.find for a log's name too; says so where a run kept nothing. Raises ValueError with one sentence."""
    name = where.rstrip("/").removesuffix(".txt")
    runs = [run for run in (Path(name), Path("logs", name)) if run.is_dir() or Path(f"{run}.txt").is_file()]
    if name != "latest" and runs and not any(any(run.glob("state_step*.pt")) for run in runs):
        raise ValueError(f"{runs[0]} kept no checkpoint (state_step*.pt): run it again with checkpoint_every=N steps.")
    return checkpoints.find(name)


def load(path: Path, device: torch.device) -> Trained:
    """The weights of a checkpoint; its optimizer state may be missing. Raises ValueError with one sentence."""
    state = checkpoints.read(path, needs={"step", "config", "sources", "model"})
    options = [f"{name}={value}" for name, value in state["config"].items() if value != ""]
    step, sources = state["step"], t.facts(t.RunConfig())["sources"]
    if changed := [name for name in sources if state["sources"].get(name) != sources[name]]:
        print(f"note: {path} was written by another version of {', '.join(changed)}", file=sys.stderr)
    try:
        cfg = t.parse_options(options)
        if not 0 <= step <= cfg.total_steps:
            raise ValueError(f"step {step} is not among its {cfg.total_steps} steps")
        model = t.GPT(cfg.model)
        model.load_state_dict({str(name): tensor for name, tensor in state["model"].items()})
    except (ValueError, RuntimeError) as problem:
        told = " ".join(str(problem).split()[:30])
        raise ValueError(f"{path} does not fit this model ({told} ...): use the source that its log holds.") from None
    if broken := [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]:
        raise ValueError(f"{path} holds numbers that are not finite, in {', '.join(broken[:4])}: use another one.")
    attention, _ = t.choose_attention("auto", device, cfg.model.head_dim, cfg.model.dtype)
    return Trained(model.to(device).requires_grad_(False), cfg, step, t.val_view(cfg, step, attention))


def look_at(trained: Trained, tokens: int) -> None:
    """Prepare rotary tables for sequences of so many tokens, with YaRN's history up to the checkpoint's stage."""
    freqs, _ = t.yarn(t.long_windows(trained.cfg, trained.step), trained.cfg.model.head_dim)
    trained.model.rotate_to(freqs, 2 * tokens)


def next_logits(trained: Trained, context: list[int]) -> Tensor:
    """Softcapped logits (vocab_size,) of the token after the context, on the CPU."""
    model, cfg, n = trained.model, trained.cfg, len(context)
    T = -(-n // BUCKET) * BUCKET
    tokens = np.full(T + 1, cfg.bos_id)  # what fills it up comes later and is not seen
    tokens[:n] = context
    starts = np.arange(0, T, n)[:2]  # the context, then the filling
    batch = t.packed_batch(tokens, starts, 16, cfg.model.bigram_rows, model.embed.device)
    x_D = model.features(batch, trained.view._replace(max_len=T))[n - 1]
    z_V = t.kernels.CAP * torch.sigmoid((x_D @ model.lm_head).float().add(t.kernels.SHIFT) / t.kernels.STRETCH)
    if not z_V.isfinite().all():
        raise ValueError(f"the logits at token {n} are not finite, its weights are too large: use another checkpoint.")
    return z_V[: cfg.vocab_size].cpu()


def sample(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token; the likeliest at temperature 0. top_k 0: any token."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        kth = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    logits = (logits - logits.max()).double() / temperature  # at most 0, however low the temperature
    return int(torch.multinomial(torch.softmax(logits, 0), 1, generator=generator))


def generate(
    trained: Trained, prompt: list[int], *, max_tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    """Tokens after the prompt, up to the end of the document."""
    context, generator = [trained.cfg.bos_id, *prompt], torch.Generator().manual_seed(seed)
    look_at(trained, -(-(len(context) + max_tokens) // BUCKET) * BUCKET)
    for _ in range(max_tokens):
        token = sample(next_logits(trained, context), temperature, top_k, generator)
        if token == trained.cfg.bos_id:
            return
        context.append(token)
        yield token


def validation_loss(trained: Trained) -> float:
    """The trainer's validation of this state. Raises ValueError where the validation shards are missing or bad."""
    cfg, runtime = trained.cfg, t.Runtime(device=trained.model.embed.device)
    paths, chunk = t.find_shards(cfg.val_files, cfg), cfg.schedule.val_chunk
    plan = t.DataPlan([], paths, {chunk: t._check_val(cfg, paths)})
    look_at(trained, chunk)
    losses = [trained.model(batch, trained.view).mean().item() for batch in t.val_batches(cfg, plan, runtime)]
    return sum(losses) / len(losses)


def encoding_of(cfg: t.RunConfig):
    """GPT-2's tokens or the demo's bytes, by the vocabulary. Raises ValueError for any other."""
    known = {(50257, 50256): load_gpt2, (257, 256): ByteEncoding}
    if (cfg.vocab_size, cfg.bos_id) not in known:
        raise ValueError(
            f"this model has a vocabulary of its own (vocab_size={cfg.vocab_size}, bos_id={cfg.bos_id}), and only "
            "GPT-2 tokens and bytes can be turned into text here: use --loss, or call generate() with tokens."
        )
    return known[cfg.vocab_size, cfg.bos_id]()


def token_bytes(encoding, token: int) -> bytes:
    return bytes([token]) if isinstance(encoding, ByteEncoding) else encoding.decode_single_token_bytes(token)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0].removeprefix("generate.py: "))
    parser.add_argument("checkpoint", help="a file, a run's name or folder (its newest), or latest")
    parser.add_argument("--prompt", default="", help="text to go on from (default: the start of a document)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, help="choose among so many likeliest tokens (default: all)")
    parser.add_argument("--max-tokens", type=int, default=200, help="stop after so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default: %(default)s)")
    parser.add_argument("--loss", action="store_true", help="print the validation loss instead of text")
    args = parser.parse_args(argv)
    limits = {"temperature": (0, 10**9), "top_k": (0, 2**63 - 1), "max_tokens": (1, 65536), "seed": (0, 2**63 - 1)}
    for name, (least, most) in limits.items():
        if not least <= (value := getattr(args, name)) <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be from {least} to {most}, not {value}.")
    device = t.start_runtime(local_rank=0, rank=0, world_size=1).device
    trained = load(find(args.checkpoint), device)
    if args.loss:
        loss, cfg = validation_loss(trained), trained.cfg
        print(f"step:{trained.step}/{cfg.total_steps} val_loss:{loss:.4f}")
        return
    encoding, utf8 = encoding_of(trained.cfg), codecs.getincrementaldecoder("utf-8")(errors="replace")
    prompt = list(map(int, encoding.encode_ordinary(args.prompt)))
    longest = max(stage.max_doc_len for stage in trained.cfg.schedule.stages)
    if len(prompt) > longest:
        told = f"the prompt has {len(prompt)} tokens, the model learned from documents of at most {longest}"
        print(f"note: {told}: this is slow.", file=sys.stderr)
    print(args.prompt, end="", flush=True)
    options = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_k", "seed")}
    for token in generate(trained, prompt, **options):
        print(utf8.decode(token_bytes(encoding, token)), end="", flush=True)
    print(utf8.decode(b"", final=True))


if __name__ == "__main__":
    try:
        main()
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as problem:  # of the text's reader, who may have enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(problem, BrokenPipeError):
            sys.exit(f"error: the text cannot be written ({problem.strerror}).")
