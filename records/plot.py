"""plot.py: draw groups of training logs.

python records/plot.py GROUP... [--target 3.28] [--stages 425,850,1275] [--out records]

Writes <out>.png and <out>.svg: loss against steps and against seconds (mean of the runs, with a band of two standard
deviations to both sides), step time by stage, and every run's final loss beside the target. A GROUP is what stats.py
takes. Stages are those that the logs' warm-up line tells, unless --stages gives the first step of each but the first.
"""
import argparse
import contextlib
from pathlib import Path

import numpy as np
from runlog import Group, Run, notes_on, read_groups, run_command
from stats import below_target_p, mean_sd, parse_target, show

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")  # Okabe-Ito: for all eyes
TARGET_LINE = dict(color="black", linestyle="--", linewidth=1)
BAND = 2  # standard deviations to each side of a mean


# === Figures of a group ===


def curve(group: Group) -> np.ndarray:
    """Rows of (step, mean seconds, mean loss, sd of loss) at the validations, after step 0, that all runs share."""
    runs = [{step: (ms / 1000, loss) for step, loss, ms in run.val if step} for run in group.runs]
    shared = sorted(set.intersection(*map(set, runs)))
    if not shared:
        raise ValueError(f"A group's runs must share a validation step, and those in {group.name} do not; split it.")
    points = np.array([[run[step] for run in runs] for step in shared]).reshape(len(shared), len(runs), 2)
    sd = points[..., 1].std(axis=1, ddof=1) if len(runs) > 1 else np.zeros(len(shared))
    return np.column_stack([shared, points.mean(axis=1), sd])


def stage_times(run: Run, starts: tuple[int, ...]) -> list[float]:
    """ms per step in each stage. Training lines run ahead of the GPU, by about as much at both ends of a stage."""
    points = [(0, 0), *(run.train or [(step, ms) for step, _, ms in run.val if step])]
    if points[-1][0] < run.steps:
        points.append((run.steps, run.val[-1][2]))
    edges = [start for start in starts if start < run.steps] + [run.steps]
    return list(np.diff(np.interp(edges, *zip(*points))) / np.diff(edges))


def around(values) -> tuple[float, float]:
    """Limits of an axis that holds the finite ones of `values`."""
    values = np.array(values)[np.isfinite(values)]
    margin = 0.06 * np.ptp(values) or 1e-3
    return values.min() - margin, values.max() + margin


# === Panels: each draws one axes ===


def draw_curves(ax, curves: list[np.ndarray], x: int, target: float, end_only: bool) -> None:
    """Mean loss and its band against column x of the curves, or a close-up of their last two validations."""
    for c, color in zip(curves, COLORS * len(curves)):
        at, mean, half = c[:, x], c[:, 2], BAND * c[:, 3]
        ax.plot(at, mean, color=color, marker="o", markersize=3, linewidth=1.5)
        ax.fill_between(at, mean - half, mean + half, color=color, alpha=0.2, linewidth=0)
    ax.axhline(target, **TARGET_LINE)
    ax.set(xlabel=("step", "training time (s)")[x], ylabel="validation loss")
    ax.grid(alpha=0.25)
    if end_only:  # groups differ by thousandths there, which the whole curve hides
        last = np.concatenate([c[-2:] for c in curves])
        low, high = (last[:, 2] + side * BAND * last[:, 3] for side in (-1, 1))
        ax.set(xlim=around(last[:, x]), ylim=around([target, *low, *high]))


def draw_stages(ax, groups: list[Group], stages: tuple[int, ...] | None) -> None:
    """Bars of the mean over runs, whiskers of one standard deviation."""
    width = 0.8 / len(groups)
    tallest, most, all_starts = 0.0, 0, set()
    for i, (group, color) in enumerate(zip(groups, COLORS * len(groups))):
        shortest = min(run.steps for run in group.runs)
        starts = tuple(start for start in stages or group.runs[0].stages if start < shortest)
        all_starts.add(starts)
        times = np.array([stage_times(run, starts) for run in group.runs])
        sd = times.std(axis=0, ddof=1) if len(times) > 1 else None
        at = np.arange(times.shape[1]) + (i - (len(groups) - 1) / 2) * width
        bars = ax.bar(at, times.mean(axis=0), width, color=color, yerr=sd, ecolor="0.2", error_kw={"elinewidth": 1})
        ax.bar_label(bars, fmt="%.1f", fontsize=8, padding=3, rotation=90 if len(groups) > 2 else 0)
        tallest, most = max(tallest, times.mean(axis=0).max()), max(most, times.shape[1])
    firsts = [f"\nfrom {start}" for start in all_starts.pop()] if len(all_starts) == 1 else [""] * most
    ax.set_xticks(range(most), [f"stage {i}{firsts[i]}" for i in range(most)])
    ax.set(ylabel="ms per step", ylim=(0, 1.25 * tallest))
    ax.grid(axis="y", alpha=0.25)
    ax.set_axisbelow(True)


def draw_finals(ax, groups: list[Group], target: float) -> None:
    """Every final loss, below them their mean with its 95 % interval, and p of the test against the target."""
    from scipy.stats import t

    labels = []
    for i, (group, color) in enumerate(zip(groups, COLORS * len(groups))):
        losses = [run.loss for run in group.runs]
        (mean, sd), n = mean_sd(losses), len(losses)
        ax.scatter(losses, i - 0.12 + np.linspace(-0.12, 0.12, n), s=18, color=color, alpha=0.8, linewidths=0)
        half = t.ppf(0.975, n - 1) * sd / n**0.5 if n > 1 else 0
        ax.errorbar([mean], [i + 0.2], xerr=[half], color=color, marker="D", markersize=5, capsize=3)
        p = show(below_target_p(losses, target), ".1e")
        labels.append(f"{group.name}\nn = {n}, mean {show(mean, '.5f')}\np = {p}")
    ax.axvline(target, **TARGET_LINE)
    ax.set_yticks(range(len(groups)), labels, fontsize=8)
    everything = [target, *(run.loss for group in groups for run in group.runs)]
    ax.set(xlim=around(everything), ylim=(len(groups) - 0.5, -0.5), xlabel="final validation loss")
    ax.grid(axis="x", alpha=0.25)


# === The figure ===


def draw(groups: list[Group], target: float, stages: tuple[int, ...] | None):
    from matplotlib.figure import Figure  # without pyplot: no window system is touched

    figure = Figure(figsize=(13, 13), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(2, 1))  # apart, as the group names below need a wide margin
    axes = np.concatenate([upper.subplots(2, 2).flat, lower.subplots(1, 2).flat])
    curves = [curve(group) for group in groups]
    for x in (0, 1):
        draw_curves(axes[x], curves, x, target, end_only=False)
        draw_curves(axes[2 + x], curves, x, target, end_only=True)
    draw_stages(axes[4], groups, stages)
    draw_finals(axes[5], groups, target)
    titles = (f"Loss against steps (mean, ±{BAND} sd)", f"Loss against seconds (mean, ±{BAND} sd)",
              "Close-up of the end, against steps", "Close-up of the end, against seconds",
              "Step time by stage (mean, ±1 sd)", "Final losses (mean, 95 % interval; p: against the target)")
    for ax, title in zip(axes, titles):
        ax.set_title(title, loc="left", fontweight="bold")
    colors = zip(COLORS * len(groups), groups)
    lines = [axes[0].plot([], [], color=color, linewidth=4, label=group.name)[0] for color, group in colors]
    lines.append(axes[0].plot([], [], label=f"target {target:g}", **TARGET_LINE)[0])
    figure.legend(handles=lines, loc="outside upper center", ncols=min(4, len(lines)), frameon=False)
    return figure


def parse_stages(text: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        starts = (0, *(int(start) for start in text.split(",")))
        if all(a < b for a, b in zip(starts, starts[1:])):
            return starts
    raise argparse.ArgumentTypeError(f"first steps of stages rise and are above 0; got {text}; try 425,850,1275")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", metavar="GROUP", help="a folder of logs, a quoted pattern, or log files")
    parser.add_argument("--target", type=parse_target, default=3.28, help="loss to stay below (default: 3.28)")
    parser.add_argument("--stages", type=parse_stages, help="first steps of all stages but the first, such as 425,850")
    parser.add_argument("--out", type=Path, default=Path("records"), help="files to write, without suffix")
    args = parser.parse_args()
    groups, baseline = read_groups(args.groups)
    figure = draw(groups, args.target, args.stages)
    name = args.out.name.removesuffix(".png").removesuffix(".svg")
    for suffix in (".png", ".svg"):
        path = args.out.with_name(name + suffix)
        figure.savefig(path, dpi=150)
        print(f"wrote {path}")
    for note in notes_on(groups, baseline):
        print(f"note: {note}")


if __name__ == "__main__":
    run_command(main)
