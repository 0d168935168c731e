"""stats.py: the table that convinces. Compare groups of training logs with each other and with the target loss.

python records/stats.py GROUP... [--baseline GROUP] [--target 3.28] [--format text|md|json]

A GROUP is a folder of logs, a quoted pattern ('logs/a*.txt'), or the files of one folder named one by one. The
baseline is the first group unless --baseline names another. Losses and times are those of the final validation line,
sd is a sample's (n - 1). 'Welch p' is the two-sided test of the difference on its left; the last p is the one-sided
test that the mean loss is below the target.
"""
import argparse
import contextlib
import json
import math
import statistics
import warnings
from dataclasses import dataclass

from runlog import Group, Run, notes_on, read_groups, run_command

SIGNIFICANT = 0.01  # a record's p against the target must be below
NAN = math.nan


@dataclass(frozen=True)
class Row:
    """One line of the table; nan where a figure does not exist (no spread in one run)."""

    name: str
    runs: list[Run]
    time_mean: float
    time_sd: float
    time_delta: float
    time_p: float
    loss_mean: float
    loss_sd: float
    loss_delta: float
    loss_p: float
    target_p: float

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def times(self) -> list[float]:
        return [run.seconds for run in self.runs]

    @property
    def steps(self) -> str:
        return "+".join(str(n) for n in sorted({run.steps for run in self.runs}))


def mean_sd(values: list[float]) -> tuple[float, float]:
    """Correctly rounded, so that the last printed digit does not hang on the order of the files."""
    if not all(map(math.isfinite, values)):
        return NAN, NAN
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else NAN


def below_target_p(losses: list[float], target: float) -> float:
    """One-sided, one-sample t-test: how likely are losses this low if the true mean is the target?"""
    from scipy.stats import ttest_1samp

    return p_value(ttest_1samp, losses, target, alternative="less") if len(losses) > 1 else NAN


def welch_p(a: list[float], b: list[float]) -> float:
    """Two-sided Welch t-test: how likely is a difference this large if the true means are equal?"""
    from scipy.stats import ttest_ind

    return p_value(ttest_ind, a, b, equal_var=False) if min(len(a), len(b)) > 1 else NAN


def p_value(test, *args, **kwargs) -> float:
    with warnings.catch_warnings():  # identical values have no spread: scipy warns, and the p is nan or exact
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(test(*args, **kwargs).pvalue)


def compare(group: Group, baseline: Group, target: float) -> Row:
    times, losses = ([getattr(run, key) for run in group.runs] for key in ("seconds", "loss"))
    base_times, base_losses = ([getattr(run, key) for run in baseline.runs] for key in ("seconds", "loss"))
    (time_mean, time_sd), (loss_mean, loss_sd) = mean_sd(times), mean_sd(losses)
    own = group is baseline
    return Row(
        group.name, group.runs,
        time_mean, time_sd, time_mean - mean_sd(base_times)[0], NAN if own else welch_p(times, base_times),
        loss_mean, loss_sd, loss_mean - mean_sd(base_losses)[0], NAN if own else welch_p(losses, base_losses),
        below_target_p(losses, target),
    )


# === Formats ===

# Text takes the shape and digits of the field's older tables, Markdown those of the newer ones.
COLUMNS = (  # heading in text, heading in Markdown, attribute of Row, how it prints ("p": as P_FORMAT says)
    ("", "", "name", "s"),
    ("Runs", "Runs", "n", "d"),
    ("Steps", "Steps", "steps", "s"),
    ("Time μ", "Time mean", "time_mean", ".4f"),
    ("Time σ", "Time sd", "time_sd", ".4f"),
    ("Time +/-", "Time delta", "time_delta", ".4f"),
    ("Welch p", "Welch p", "time_p", "p"),
    ("Loss μ", "Loss mean", "loss_mean", ".5f"),
    ("Loss σ", "Loss sd", "loss_sd", ".5f"),
    ("Loss +/-", "Loss delta", "loss_delta", ".5f"),
    ("Welch p", "Welch p", "loss_p", "p"),
    ("p", "Loss p", "target_p", "p"),
)
P_FORMAT = {"text": ".4f", "md": ".2e"}


def show(value, fmt: str) -> str:
    return "-" if isinstance(value, float) and math.isnan(value) else format(value, fmt)


def cells(row: Row, style: str) -> list[str]:
    return [show(getattr(row, key), P_FORMAT[style] if fmt == "p" else fmt) for *_, key, fmt in COLUMNS]


def text_table(rows: list[Row]) -> str:
    lines = [[heading for heading, *_ in COLUMNS], *(cells(row, "text") for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    aligned = [[line[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line) for line in aligned)


def md_table(rows: list[Row]) -> str:
    head = [heading for _, heading, *_ in COLUMNS]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *(cells(row, "md") for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def lists(row: Row, baseline: Row, target: float) -> str:
    """Every run of a group, and its tests with the digits that the text table has no room for."""
    if math.isnan(row.target_p):
        finite = all(map(math.isfinite, row.losses))
        verdict = "no p: " + ("it takes two losses or more, not all the target" if finite else "a loss is not finite")
    else:
        verdict = f"p = {row.target_p:.2e}: " + ("below" if row.target_p < SIGNIFICANT else "NOT shown to be below")
        verdict += f" {target:g} at p < {SIGNIFICANT}"
    lines = [
        f"{row.name}:",
        f"  losses = [{', '.join(format(loss, '.4f') for loss in row.losses)}]",
        f"  times  = [{', '.join(format(time, '.4f') for time in row.times)}]",
        f"  (n = {row.n})",
        f"  {verdict}",
    ]
    if row is not baseline:
        time, loss = show(row.time_delta, "+.4f"), show(row.loss_delta, "+.5f")
        lines.append(f"  against {baseline.name}: time {time} s (Welch p = {show(row.time_p, '.2e')}), "
                     f"loss {loss} (Welch p = {show(row.loss_p, '.2e')})")
    return "\n".join(lines)


def report(groups: list[Group], baseline: Group, target: float, style: str) -> str:
    """The whole answer in one of the formats text, md, json."""
    rows = [compare(group, baseline, target) for group in groups]
    notes = notes_on(groups, baseline)
    if style == "json":
        return to_json(rows, baseline, target, notes)
    details = "\n\n".join(lists(row, rows[groups.index(baseline)], target) for row in rows)
    if style == "text":
        parts = [text_table(rows), details, "\n".join(f"note: {note}" for note in notes)]
    else:
        parts = [md_table(rows), f"```\n{details}\n```", "\n".join(f"- **Note:** {note}" for note in notes)]
    return "\n\n".join(filter(None, parts))


def to_json(rows: list[Row], baseline: Group, target: float, notes: list[str]) -> str:
    """Unrounded; a figure that does not exist is null."""

    def plain(value):
        return None if isinstance(value, float) and not math.isfinite(value) else value

    groups = [
        {key: plain(getattr(row, key)) for *_, key, _ in COLUMNS}
        | {"losses": list(map(plain, row.losses)), "times": row.times, "files": [run.path.name for run in row.runs]}
        for row in rows
    ]
    return json.dumps({"target": target, "baseline": baseline.name, "groups": groups, "notes": notes}, indent=2)


def parse_target(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(target := float(text)):
            return target
    raise argparse.ArgumentTypeError(f"the target must be a finite loss; got {text}; try 3.28")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP", help="a folder of logs, a quoted pattern, or log files")
    parser.add_argument("--baseline", metavar="GROUP", help="group to compare with (default: the first)")
    parser.add_argument("--target", type=parse_target, default=3.28, help="loss to stay below (default: 3.28)")
    parser.add_argument("--format", choices=("text", "md", "json"), default="text")
    args = parser.parse_args()
    groups, baseline = read_groups(args.groups, args.baseline)
    print(report(groups, baseline, args.target, args.format))


if __name__ == "__main__":
    run_command(main)
