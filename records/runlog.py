"""runlog.py: read training logs, this project's and the public ones, into runs and groups of runs.

Only the part behind a log's header is searched for step lines: the source that a log embeds holds look-alikes.
This project's logs frame each source file by byte count and sha256 (##### BEGIN ... #####); a public log puts its
source first, bare, and its header is the last rule of 100 '=' that is followed by 'Running Python'.
"""
import glob
import hashlib
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

RULE = "=" * 100
BEGIN = re.compile(rb"##### BEGIN (\S+) bytes=(\d+) sha256=([0-9a-f]{64}) #####\n")
PUBLIC_HEADER = re.compile(rf"^{RULE}\n(?=Running Python )", re.M)
PUBLIC_BANNER = re.compile(r"^[-=#]{20,}\n# *([\w/.-]+\.py)\n[-=#]{20,}\n", re.M)  # before each kernel file
STEP = re.compile(r"step:(\d+)/(\d+)(?: val_loss:(\d+\.\d+|nan|inf))? train_time:(\d+)ms step_avg:\S+ms\s*")
WARMUP = re.compile(r"^Sampling steps \[([\d, ]+)\] for warmup", re.M)
GPU_ROW = re.compile(r"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|\s+[0-9A-Fa-f]{8}:", re.M)  # nvidia-smi, one row a GPU
HEADER_FIELDS = {
    "run_id": r"^run_id: (\S+)",
    "commit": r"^commit: (.+?)\s*$",
    "config": r"^config: (\{.*\})\s*$",
    "packages": r"^packages: (\{.*\})\s*$",
    "hardware": r"^hardware: (.+?)\s*$",
    "world_size": r"^world_size: (\d+)",
    "python": r"^Running Python (\S+)",
    "torch": r"^Running PyTorch (\S+)",
    "triton": r"^Running Triton version (.+?)\s*$",
    "driver": r"Driver Version: (\S+)",
    "attention": r"^attention: (\w+)",  # what was chosen, where the option says auto
    "fp8": r"^attention: .*; fp8: (\w+)",
    "resumed": r"^resumed: (.+?)\s*$",  # the state that the run went on from
}
PER_RUN_OPTIONS = {"run_id", "seed"}  # meant to differ between the runs of one group


class LogError(ValueError):
    """Why a file does not count as a run."""


@dataclass(frozen=True)
class Run:
    """One complete run: it reached the validation behind its last step."""

    path: Path
    steps: int  # optimizer steps
    loss: float  # final validation loss, nats
    seconds: float  # clock of the final validation line: the only one behind a device sync
    val: tuple[tuple[int, float, int], ...]  # (step, loss, ms)
    train: tuple[tuple[int, int], ...]  # (step, ms), a host estimate
    stages: tuple[int, ...]  # first step of every stage, as far as the warm-up line tells
    info: dict  # HEADER_FIELDS that the log states, plus hardware
    sources: dict[str, str] = field(repr=False)
    digest: str = ""  # sha256 of the file with Unix line ends

    @property
    def run_id(self) -> str:
        return self.info.get("run_id", self.path.stem)

    @property
    def config(self) -> dict:
        return self.info.get("config", {})

    @property
    def source_digest(self) -> str:
        return sha256(json.dumps(self.sources, sort_keys=True).encode())

    @property
    def versions(self) -> str:
        names = {"python": "Python", "torch": "PyTorch", "triton": "Triton"}
        return ", ".join(f"{label} {self.info[key]}" for key, label in names.items() if key in self.info)


@dataclass
class Group:
    """Runs of one configuration, and the files that were left out with the reason."""

    name: str
    runs: list[Run]
    left_out: list[tuple[Path, str]]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# === From bytes to a run ===


def read_blocks(data: bytes) -> tuple[dict[str, str], int]:
    """Sources of the BEGIN/END blocks that open `data`, each checked against its sha256, and where they end."""
    sources, at = {}, 0
    while match := BEGIN.match(data, at):
        name, size = match[1].decode("utf-8", "replace"), int(match[2])
        source = data[match.end() : match.end() + size]
        if len(source) < size:
            raise LogError(f"incomplete: it ends inside the source of {name}")
        if sha256(source) != match[3].decode():
            raise LogError(f"the source of {name} does not have the sha256 that its BEGIN line states")
        if name in sources:
            raise LogError(f"it holds two sources named {name}")
        end = (b"" if source.endswith(b"\n") else b"\n") + b"##### END " + match[1] + b" #####\n"
        at = match.end() + size + len(end)
        if data[match.end() + size : at] != end:
            raise LogError(f"the source of {name} is not followed by its END line")
        sources[name] = source.decode("utf-8")
    return sources, at


def split_log(data: bytes) -> tuple[dict[str, str], str]:
    """(sources by file name, the text behind them); LogError where `data` is no log or its sources were altered."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise LogError("the file is empty")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise LogError("it is not UTF-8 text") from None
    unix = data.replace(b"\r\n", b"\n")
    log = data if BEGIN.match(data) else unix  # bytes are counted as written: a source may hold Windows line ends
    if BEGIN.match(log):
        sources, end = read_blocks(log)
        return sources, log[end:].replace(b"\r\n", b"\n").decode("utf-8")
    text = unix.decode("utf-8")
    headers = list(PUBLIC_HEADER.finditer(text))
    if not headers:
        raise LogError("it is not a training log, or it ends before its header (a rule of 100 '=', 'Running Python')")
    start = headers[-1].start()
    banners = list(PUBLIC_BANNER.finditer(text[:start]))
    names = ["train_gpt.py", *(banner[1] for banner in banners)]
    edges = [0, *(edge for banner in banners for edge in banner.span()), start]
    parts = [text[a:b].strip("\n") + "\n" for a, b in zip(edges[::2], edges[1::2])]
    return {name: part for name, part in zip(names, parts) if part.strip()}, text[start:]


def extract_sources(log: bytes | str | Path) -> dict[str, str]:
    """{file name: text} of the sources that a log (its bytes or its path) embeds.

    A source of this project's logs is checked against its sha256; a public log states none. Raises LogError.
    """
    return split_log(log if isinstance(log, bytes) else Path(log).read_bytes())[0]


def parse_header(header: str) -> dict:
    """What the lines before the first step tell: HEADER_FIELDS, and the hardware, from nvidia-smi if need be."""
    info = {key: m[1] for key, pattern in HEADER_FIELDS.items() if (m := re.search(pattern, header, re.M))}
    for key in ("config", "packages"):
        if key in info:
            try:
                info[key] = json.loads(info[key])
            except json.JSONDecodeError:
                raise LogError(f"its {key} line is not JSON") from None
    if "hardware" not in info:
        gpus = Counter(GPU_ROW.findall(header))
        info["hardware"] = ", ".join(f"{n} x {name}" for name, n in gpus.items()) or "unknown"
    return info


def stage_starts(header: str) -> tuple[int, ...]:
    """First steps of the stages: the warm-up samples steps s-2 .. s+1 around every start s after the first."""
    match = WARMUP.search(header)
    sampled = [int(step) for step in re.findall(r"\d+", match[1])] if match else []
    around_starts = [step for step in sampled if step > 1]  # 0 and 1 are sampled as well
    starts = around_starts[2::4]
    known = set(around_starts) <= {start + k for start in starts for k in (-2, -1, 0, 1)}
    return (0, *starts) if known else (0,)


def parse_log(path: Path) -> Run:
    """The run that `path` holds; LogError, with the reason, where it holds no complete one."""
    data = path.read_bytes()
    sources, text = split_log(data)
    if not text.startswith(RULE + "\n"):
        raise LogError("incomplete: it ends before its header")
    _, closing_rule, body = text[len(RULE) + 1 :].partition("\n" + RULE + "\n")
    if not closing_rule:
        raise LogError("incomplete: it ends inside its header")

    lines = [m.groups() for line in body.split("\n") if (m := STEP.fullmatch(line))]
    if not lines:
        raise LogError("incomplete: it holds no step line")
    if len({total for _, total, *_ in lines}) > 1:
        raise LogError("its step lines disagree about the number of steps: two runs in one file?")
    steps = int(lines[0][1])
    val = tuple((int(n), float(loss), int(ms)) for n, _, loss, ms in lines if loss)
    train = tuple((int(n), int(ms)) for n, _, loss, ms in lines if not loss)
    for kind in (val, train):
        if any(a[0] >= b[0] for a, b in zip(kind, kind[1:])):
            raise LogError("its steps go backwards: two runs in one file?")
    if not val or val[-1][0] != steps:
        reached = max(int(n) for n, *_ in lines)
        raise LogError(f"incomplete: it reached step {reached} of {steps}, without the final validation")
    digest = sha256(data.replace(b"\r\n", b"\n"))
    header = text.partition("\nstep:")[0]
    (_, loss, ms), stages = val[-1], stage_starts(header)
    return Run(path, steps, loss, ms / 1000, val, train, stages, parse_header(header), sources, digest)


# === From arguments to groups ===


def read_group(name: str, paths: list[Path]) -> Group:
    """Every run counts once: files without a complete run, and second copies of a run, are left out by name."""
    group = Group(name, [], [])
    seen: dict[str, Path] = {}
    for path in paths:
        try:
            run = parse_log(path)
        except LogError as error:
            group.left_out.append((path, str(error)))
            continue
        except OSError as error:
            group.left_out.append((path, f"it cannot be read ({error.strerror})"))
            continue
        # A public log states no run id, and its file name need not be one.
        keys = {run.digest: "the same file as", f"id {run.info.get('run_id', run.digest)}": "the same run id as"}
        if twin := next((key for key in keys if key in seen), None):
            group.left_out.append((path, f"a duplicate: {keys[twin]} {seen[twin]}"))
            continue
        seen.update(dict.fromkeys(keys, path))
        group.runs.append(run)
    if not group.runs:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in group.left_out[:3])
        more = f"; and {len(group.left_out) - 3} more" if len(group.left_out) > 3 else ""
        raise ValueError(f"{name} must hold at least one complete log, and holds none ({reasons}{more}).")
    return group


def logs_in(folder: Path) -> list[Path]:
    paths = sorted(p for p in folder.glob("*.txt") if p.is_file())
    if not paths:
        inner = sorted({str(p.parent) for p in folder.glob("*/*.txt")})
        hint = f"name its folders one by one: {' '.join(inner)}" if inner else "name a folder with <run_id>.txt files"
        raise ValueError(f"A group's folder must hold logs, and {folder} holds no .txt file; {hint}.")
    return paths


def find_logs(arguments: list[str]) -> dict[str, tuple[str, list[Path]]]:
    """{label: (short name, files)} of each group: a folder, a quoted pattern, or the plain files of one folder."""
    members = {}
    plain = [Path(argument) for argument in arguments if Path(argument).is_file()]
    for argument in arguments:
        path = Path(argument)
        siblings = [file for file in plain if file.parent == path.parent]
        if path.is_dir():
            members[argument] = path.resolve().name, logs_in(path)
        elif path in plain and len(siblings) == 1:
            members[argument] = path.stem, siblings
        elif path in plain:
            members[f"files in {path.parent}"] = path.resolve().parent.name, siblings
        elif matches := sorted(glob.glob(argument)):
            members[argument] = path.stem, [Path(match) for match in matches]
        else:
            raise ValueError(f"A group must be a folder of logs or a log file; there is no {argument}: check the path.")
    return members


def read_groups(arguments: list[str], baseline: str | None = None) -> tuple[list[Group], Group]:
    """(groups in the order of the table, the baseline among them: the first, or the one that `baseline` names)."""
    members = find_logs(arguments)
    base = next(iter(members))
    if baseline is not None:
        [(base, found)] = find_logs([baseline]).items()
        resolved = {file.resolve() for file in found[1]}
        same = [label for label, (_, files) in members.items() if {file.resolve() for file in files} == resolved]
        base = same[0] if same else base
        members = members if same else {base: found, **members}
    taken = Counter(name for name, _ in members.values())
    groups = {label: read_group(name if taken[name] == 1 else label, files) for label, (name, files) in members.items()}
    return list(groups.values()), groups[base]


# === What does not go together ===


def describe(run: Run) -> dict[str, object]:
    """What should be equal within a group: {name of the property: value}."""
    options = {f"option {key}": value for key, value in run.config.items() if key not in PER_RUN_OPTIONS}
    traits = {"step counts": run.steps, "embedded sources": run.source_digest[:12]}
    return traits | machine(run) | {key: run.info.get(key) for key in ("attention", "fp8")} | options


def machine(run: Run) -> dict[str, object]:
    """What should be equal between a group and its baseline too, if times are to compare."""
    size = run.info.get("world_size")
    return {"hardware": run.info["hardware"], "world sizes": size, "versions": run.versions}


def mixed(values: list[tuple[str, object]]) -> str:
    """'' if all (label, value) agree, else every value with its count, the labels of the rarer ones named."""
    labels: dict[str, list[str]] = {}
    for label, value in values:
        labels.setdefault(str(value), []).append(label)
    if len(labels) < 2:
        return ""
    ranked = sorted(labels.items(), key=lambda item: -len(item[1]))
    listed = [", ".join(names[:3]) + ", ..." * (len(names) > 3) for _, names in ranked]
    rarer = [f"{value} ({len(names)}: {some})" for (value, names), some in list(zip(ranked, listed))[1:]]
    return ", ".join([f"{ranked[0][0]} ({len(ranked[0][1])})", *rarer])


def notes_on(groups: list[Group], baseline: Group) -> list[str]:
    """Sentences about all that a reader must know before believing the table."""
    notes = []
    for group in groups:
        notes += [f"{group.name}: left out {path.name}: {reason}." for path, reason in group.left_out]
        traits = [(run.path.name, describe(run)) for run in group.runs]
        for key in dict.fromkeys(key for _, trait in traits for key in trait):
            if found := mixed([(name, trait.get(key)) for name, trait in traits]):
                notes.append(f"{group.name} mixes {key}: {found}.")
        seeds = Counter(run.config["seed"] for run in group.runs if "seed" in run.config)
        notes += [f"{group.name}: {n} runs share seed={seed}, so they are not independent; give each run its own seed."
                  for seed, n in seeds.items() if n > 1]
        notes += [f"{group.name}: {run.path.name} ended with a loss of {run.loss}; it counts." for run in group.runs
                  if not run.loss < float("inf")]
        notes += [f"{group.name}: {run.path.name} went on from {run.info['resumed']}: another log holds its beginning, "
                  "and its time is no record's; it counts." for run in group.runs if "resumed" in run.info]
        if group is baseline:
            continue
        ours, theirs = machine(group.runs[0]), machine(baseline.runs[0])
        pair, shared = f"{group.name} and {baseline.name}", {run.digest for run in baseline.runs}
        notes += [f"{pair} differ in {key} ({ours[key]}; {theirs[key]}): compare their times with care."
                  for key in ours if ours[key] != theirs[key]]
        notes += [f"{pair} share {run.path.name}." for run in group.runs if run.digest in shared]
    return notes


def run_command(main) -> None:
    """Call main(); bad input ends in one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that lacks sigma gets '?', not a traceback
    try:
        main()
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        sys.exit(complain(f"{package} is missing; install it with: pip install -r requirements-dev.txt"))
    except OSError as error:
        what = f"{error.filename or 'a file'} cannot be used ({error.strerror or error})"
        sys.exit(complain(f"{what}: check that its folder exists, has room and may be written."))
    except ValueError as error:
        sys.exit(complain(str(error)))


def complain(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2
