"""snapshot.py: make a record's folder out of its logs.

python records/snapshot.py --name MuddGatedAndDC LOG... [--baseline GROUP] [--against RECORD] [--date YYYY-MM-DD]

Makes records/<date>_<Name>/ with the logs, the source they embed (source/, checked against the logs), the logs of the
baseline (baseline/), the changed lines (changes.diff) and a README to complete. LOG... are files or folders.
An existing folder is never touched.
"""
import argparse
import datetime
import difflib
import json
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from runlog import (
    Group,
    LogError,
    Run,
    extract_sources,
    find_logs,
    logs_in,
    read_group,
    read_groups,
    run_command,
    sha256,
)
from stats import parse_target, report

HERE = Path(__file__).resolve().parent
NOT_REPRODUCED = {"run_id", "resume", "show"}  # options that name one run, not what it does


@dataclass(frozen=True)
class Record:
    name: str
    date: str
    group: Group
    baseline: Group | None
    sources: dict[str, str]  # embedded by every log of the group
    target: float

    @property
    def folder(self) -> str:
        return f"{self.date}_{self.name}"

    @property
    def runs(self) -> list[Run]:
        return self.group.runs


def check_unbroken(runs: list[Run]) -> None:
    for run in runs:
        if state := run.info.get("resumed"):
            raise ValueError(f"A record's run must be unbroken, and {run.path.name} went on from {state}; run it anew.")


# === Source ===


def common_sources(runs: list[Run]) -> dict[str, str]:
    """The one set of sources that all runs embed."""
    first = runs[0]
    if not first.sources:
        raise ValueError(f"A record's log must embed its source, and {first.path.name} embeds none; run it again.")
    for run in runs:
        if changed := [n for n in first.sources | run.sources if first.sources.get(n) != run.sources.get(n)]:
            pair = f"{first.path.name} and {run.path.name} differ in {', '.join(changed)}"
            raise ValueError(f"A record's logs must embed the same source, and {pair}; make a record of each.")
    for name in first.sources:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ValueError(f"A source must lie inside the project, and the logs name {name!r}; run them again.")
    return first.sources


def sources_of(path: Path | None, names: list[str]) -> tuple[str, dict[str, str]]:
    """(what to call it, sources) of a record's folder, of a log, or, for None, of the working tree's files `names`."""
    if path is None:
        files = {name: HERE.parent / name for name in names}
        return "the working tree", {n: f.read_bytes().decode("utf-8") for n, f in files.items() if f.is_file()}
    log = logs_in(path)[0] if path.is_dir() else path
    try:
        return path.resolve().name, extract_sources(log)
    except LogError as error:
        raise ValueError(f"--against must name a record's folder or a log, and {log} is none: {error}.") from None


def unified_diff(name: str, old: str | None, new: str | None) -> list[str]:
    """Lines of the diff, as `patch -p1` reads them."""

    def lines(text):
        found = re.findall(r"[^\n]*\n|[^\n]+", text or "")
        return [line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in found]

    labels = "/dev/null" if old is None else f"a/{name}", "/dev/null" if new is None else f"b/{name}"
    return list(difflib.unified_diff(lines(old), lines(new), *labels))


def changed_lines(old: dict[str, str], new: dict[str, str]) -> tuple[list[tuple[str, int, int]], str]:
    """([(file, lines added, lines removed)], the diff) from `old` to `new`, without the files that are equal."""
    rows, text = [], ""
    for name in sorted(old | new):
        if diff := unified_diff(name, old.get(name), new.get(name)):
            added, removed = (sum(line.startswith(sign) for line in diff[2:]) for sign in "+-")
            rows.append((name, added, removed))
            text += "".join(diff)
    return rows, text


# === README ===

README = """# {name}

{date} · runs: {runs} · steps: {steps} · target {target:g}

<!-- What is new and why it helps, in a few sentences, with credits; then delete this line. -->

## Result

{result}

This table comes from the logs beside it: `python records/stats.py {arguments}`

## Environment

{environment}

## Source

`source/` is what every log of this record embeds. {checked}

{sources}

## Changed lines

{changes}

## Reproduce

{reproduction}
"""


def table(align: str, *rows: tuple) -> str:
    """A Markdown table; the first row is the heading, `align` has one 'l' or 'r' a column."""
    rules = ["---:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [rows[0], rules, *rows[1:]])


def environment(runs: list[Run]) -> str:
    labels = {"hardware": "Hardware", "world_size": "World size", "python": "Python", "torch": "PyTorch",
              "triton": "Triton", "driver": "Driver", "commit": "Commit"}
    values = {key: dict.fromkeys(run.info[key] for run in runs if key in run.info) for key in labels}
    rows = [(labels[key], "; ".join(found)) for key, found in values.items() if found]
    if packages := runs[0].info.get("packages"):
        rows.append(("Packages", ", ".join(f"{name} {version}" for name, version in packages.items())))
    return table("ll", ("", ""), *rows)


def reproduction(record: Record) -> str:
    """Shell lines that run the record again, then the options that were not the same in all of its runs."""
    runs, lines, options, varied = record.runs, [], [], []
    commits = {run.info.get("commit", "unknown") for run in runs}
    if len(commits) == 1 and re.fullmatch("[0-9a-f]{40}", commit := commits.pop()):
        lines.append(f"git checkout {commit} -- . ':!records'")
    lines.append(f"cp -r records/{record.folder}/source/. .")
    for key, value in runs[0].config.items():
        values = [json.dumps(run.config.get(key)) for run in runs]
        if key in NOT_REPRODUCED or set(values) <= {"null", '""'}:
            continue
        if len(set(values)) > 1:
            varied.append(f"{key} = {', '.join(values)}")
        else:
            options.append(shlex.quote(f"{key}={value if isinstance(value, str) else values[0]}"))
    size = runs[0].info.get("world_size")
    lines.append(" ".join([f"NPROC={size} ./run.sh" if size else "./run.sh", *options]))
    told = f"\n\nNot the same in all runs: {'; '.join(varied)}." if varied else ""
    return "```bash\n" + "\n".join(lines) + "\n```" + told


def readme(record: Record, changes: str) -> str:
    groups = [record.baseline, record.group] if record.baseline else [record.group]
    own_layout = "run_id" in record.runs[0].info
    files = [(f"`{n}`", len(t.encode()), f"`{sha256(t.encode())}`") for n, t in record.sources.items()]
    with_baseline = f" --baseline records/{record.folder}/baseline" if record.baseline else ""
    return README.format(
        name=record.name, date=record.date, target=record.target, runs=len(record.runs),
        steps=" / ".join(map(str, sorted({run.steps for run in record.runs}))),
        result=report(groups, groups[0], record.target, "md"),
        arguments=f"records/{record.folder}{with_baseline}",
        environment=environment(record.runs),
        checked="Each file has the sha256 that the logs state." if own_layout else
                "These logs are in the public layout, which states no sha256; it is the text before their header.",
        sources=table("lrl", ("File", "Bytes", "sha256"), *files),
        changes=changes, reproduction=reproduction(record),
    )


def describe_changes(rows: list[tuple[str, int, int]], other: str) -> str:
    if not rows:
        return f"No line differs from {other}."
    files = [(f"`{name}`", f"+{added}", f"-{removed}") for name, added, removed in rows]
    return f"From {other} to this record (`changes.diff`):\n\n" + table("lrr", ("File", "Added", "Removed"), *files)


# === The folder ===


def copy_logs(runs: list[Run], folder: Path) -> None:
    folder.mkdir(parents=True)
    for run in runs:
        if (folder / run.path.name).exists():
            raise ValueError(f"A record's logs must bear different names, and two are {run.path.name}; rename one.")
        (folder / run.path.name).write_bytes(run.path.read_bytes())


def check_sources(folder: Path) -> None:
    """Read back from disk: source/ must be what each copied log embeds, byte for byte."""
    for log in logs_in(folder):
        for name, text in extract_sources(log).items():
            if (folder / "source" / name).read_bytes() != text.encode():
                raise ValueError(f"source/{name} must equal what {log.name} embeds, and does not; check the disk.")


def write_record(record: Record, records: Path, against: Path | None = None) -> Path:
    """Make the record's folder in `records`, whole or not at all."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", record.name):
        raise ValueError(f"--name must hold letters, digits, '.', '_', '-' only; got {record.name!r}; try MuddGated.")
    if not records.is_dir():
        raise ValueError(f"--to names a folder that is there, and {records} is none; make it first.")
    final = records / record.folder
    if final.exists():
        raise ValueError(f"A record is never overwritten, and {final} exists; choose another --name or --date.")
    other, old = sources_of(against, list(record.sources))
    rows, diff = changed_lines(old, record.sources)
    with tempfile.TemporaryDirectory(dir=records) as scratch:
        folder = Path(scratch) / record.folder
        copy_logs(record.runs, folder)
        if record.baseline:
            copy_logs(record.baseline.runs, folder / "baseline")
        for name, text in record.sources.items():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes(text.encode())
        check_sources(folder)
        if diff:
            (folder / "changes.diff").write_bytes(diff.encode())
        (folder / "README.md").write_bytes(readme(record, describe_changes(rows, other)).encode())
        folder.rename(final)
    return final


def parse_date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a date is YYYY-MM-DD; got {text}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log files, or folders of them")
    parser.add_argument("--name", required=True, help="the record's name, such as MuddGatedAndDC")
    parser.add_argument("--baseline", metavar="GROUP", help="logs to compare with; they are copied too")
    parser.add_argument("--against", metavar="RECORD", type=Path,
                        help="record's folder or log whose source the changes start from (default: the working tree)")
    parser.add_argument("--date", type=parse_date, default=datetime.date.today(), help="YYYY-MM-DD (default: today)")
    parser.add_argument("--target", type=parse_target, default=3.28, help="loss to stay below (default: 3.28)")
    parser.add_argument("--to", type=Path, default=HERE, metavar="DIR", help="where records live (default: here)")
    args = parser.parse_args()
    group = read_group(args.name, [file for _, files in find_logs(args.logs).values() for file in files])
    baseline = read_groups([args.baseline])[1] if args.baseline else None
    check_unbroken(group.runs + (baseline.runs if baseline else []))
    sources = common_sources(group.runs)
    record = Record(args.name, args.date.isoformat(), group, baseline, sources, args.target)
    folder = write_record(record, args.to, args.against)
    print(f"Made {folder}; complete its README.md and add its line to {HERE / 'README.md'}.")


if __name__ == "__main__":
    run_command(main)
