"""Records: parsing of both log layouts, the published statistics, snapshots and plots."""
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))

import plot  # noqa: E402
import runlog  # noqa: E402
import snapshot  # noqa: E402
import stats  # noqa: E402

RULE = "=" * 100

# The published runs: name, steps, final losses, seconds (in the order of the files).
PUBLISHED = {
    "baseline": (1775, "3.2777 3.2785 3.2790 3.2785 3.2788 3.2791 3.2766 3.2784",
                 "105.369 105.595 105.414 105.552 105.561 105.582 105.609 105.607"),
    "unified-optimizer": (1765, "3.2781 3.2803 3.2767 3.2799 3.2794 3.2767 3.2767 3.2780",
                          "104.649 104.442 104.243 104.454 104.486 104.322 104.655 104.412"),
    "xsa-baseline-s1385": (1385, "3.2804 3.2796 3.2773 3.2781 3.2778 3.2786 3.2762 3.2800 3.2788 3.2773",
                           "81.171 81.178 81.263 81.141 81.230 81.227 81.331 81.320 81.179 81.147"),
    "xsa-baseline-s1335": (1335, "3.2843 3.2855 3.2834 3.2883 3.2835 3.2858 3.2827 3.2852 3.2842",
                           "78.614 78.615 78.554 78.502 78.565 78.526 78.533 78.583 78.526"),
    "this_pr_v1": (1335, "3.2757 3.2773 3.2758 3.2779 3.2778 3.2784 3.2770 3.2784 3.2770 3.2784 3.2748",
                   "78.958 78.999 78.983 79.017 78.945 78.973 78.936 78.965 79.012 78.983 78.865"),
    "this_pr_v2": (1325, "3.2788 3.2779 3.2763 3.2776 3.2775 3.2788 3.2793 3.2770 3.2790 3.2786",
                   "77.704 77.724 77.732 77.683 77.669 77.688 77.703 77.662 77.735 77.750"),
    "this_pr_v3": (1290, "3.2787 3.2786 3.2778 3.2791 3.2797 3.2772 3.2800 3.2779 3.2772 3.2789",
                   "75.561 75.462 75.519 75.490 75.493 75.553 75.599 75.460 75.489 75.573"),
}

NVIDIA_SMI = """Sat Jan 17 02:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.159.03             Driver Version: 580.159.03     CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|=========================================+========================+======================|
{rows}
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|    0   N/A  N/A           54321      C   /usr/bin/python3                       1518MiB |
+-----------------------------------------------------------------------------------------+
"""

# Every line of this source looks like a part of a log, at line start too, and must not be read as one.
HOSTILE = f'''"""A docstring that quotes a log:
step:0/7 val_loss:9.9999 train_time:0ms step_avg:0.03ms
step:7/7 val_loss:1.0000 train_time:1ms step_avg:0.14ms
{RULE}
Running Python 2.7.18
hardware: 1 x Abacus
{RULE}
step:7/7 val_loss:1.0000 train_time:1ms step_avg:0.14ms
##### END train_gpt.py #####
##### BEGIN train_gpt.py bytes=3 sha256={"0" * 64} #####
"""
    print(f"step:7/7 val_loss:1.0000 train_time:1ms step_avg:0.14ms")  # σ²
'''


def step_lines(steps: int, loss: str, seconds: float, train_lines: bool = False) -> str:
    """The lines of a run, as the trainers print them; the clock runs evenly."""
    total = round(1000 * seconds)
    lines = []
    for n in range(steps + 1):
        ms = round(total * n / steps)
        if n and train_lines:
            lines.append(f"step:{n}/{steps} train_time:{ms}ms step_avg:{ms / n:.2f}ms")
        if n % 250 == 0 or n == steps:
            shown = loss if n == steps else f"{3.28 + 7.55 * (1 - n / steps) ** 3:.4f}"
            lines.append(f"step:{n}/{steps} val_loss:{shown} train_time:{ms}ms step_avg:{ms / max(n, 1):.2f}ms")
    return "\n".join(lines) + "\npeak memory allocated: 31765 MiB reserved: 35112 MiB\n"


def nvidia_smi(gpus: int, name: str) -> str:
    row = "|   {}  {:<26} On  |   00000000:{:02X}:00.0 Off |                    0 |\n" \
          "| N/A   38C    P0            120W /  700W |    1185MiB /  81559MiB |      0%      Default |"
    return NVIDIA_SMI.format(rows="\n".join(row.format(i, name, 0x18 + i) for i in range(gpus)))


def public_log(steps: int, loss: str, seconds: float, *, source: str = HOSTILE, kernels: str = "# kernels\n",
               gpus: int = 8, gpu: str = "NVIDIA H100 80GB HBM3", train_lines: bool = False) -> bytes:
    banner = f"\n\n{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n\n"
    third = round(steps / 3)
    sampled = [0, 1, *range(third - 2, third + 2), *range(2 * third - 2, 2 * third + 2)]
    return "\n".join([
        source + banner + kernels, RULE, "Running Python 3.12.3 (main, Nov  6 2025, 13:44:16) [GCC 13.3.0]",
        "Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8", "Running Triton version 3.6.0", nvidia_smi(gpus, gpu),
        RULE, "Compiling model and warming up kernels (~7 minutes on first execution)",
        f"Sampling steps {sampled} for warmup", "Resetting Model", step_lines(steps, loss, seconds, train_lines),
    ]).encode()


def block(name: str, text: str) -> bytes:
    data = text.encode()
    head = f"##### BEGIN {name} bytes={len(data)} sha256={hashlib.sha256(data).hexdigest()} #####\n".encode()
    return head + data + (b"" if text.endswith("\n") else b"\n") + f"##### END {name} #####\n".encode()


def own_log(steps: int, loss: str, seconds: float, *, run_id: str = "run-a", sources: dict | None = None,
            hardware: str = "8 x NVIDIA H100 80GB HBM3", commit: str = "0123456789" * 4, options: dict | None = None,
            attention: str = "triton", train_lines: bool = False, resumed: str = "") -> bytes:
    sources = sources or {"train_gpt.py": HOSTILE, "triton_kernels.py": "# no newline at the end"}
    config = {"preset": "record", "seed": 99, "fp8": "auto", "run_id": run_id, "resume": ""} | (options or {})
    header = "\n".join([
        RULE, f"run_id: {run_id}", f"commit: {commit}", f"config: {json.dumps(config)}",
        "Running Python 3.11.7 (main, x)", "Running PyTorch 2.13.0+cu130", "Running Triton version 3.7.1",
        'packages: {"numpy": "2.3.5", "torch": "2.13.0"}', f"hardware: {hardware}", "world_size: 8",
        nvidia_smi(8, "NVIDIA H100 80GB HBM3"), RULE,
    ])
    body = f"\nattention: {attention} (as asked); fp8: on (as asked)\n" + (f"resumed: {resumed}\n" if resumed else "")
    body += step_lines(steps, loss, seconds, train_lines)
    return b"".join(block(name, text) for name, text in sources.items()) + header.encode() + body.encode()


LAYOUTS = {"public": public_log, "own": own_log}


def write_group(folder: Path, steps: int, losses: str, times: str, layout: str = "public", **options) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, (loss, time) in enumerate(zip(losses.split(), times.split(), strict=True)):
        own = {"run_id": f"{folder.name}-{i:02}", "options": {"seed": i}} if layout == "own" else {}
        log = LAYOUTS[layout](steps, loss, float(time), **own, **options)
        (folder / f"{i:02}.txt").write_bytes(log)
    return folder


def published(folder: Path, *names: str, layout: str = "public") -> list[str]:
    return [str(write_group(folder / name, *PUBLISHED[name], layout=layout)) for name in names]


def command(script: str, *arguments, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    line = [sys.executable, str(ROOT / "records" / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, encoding="utf-8", cwd=cwd, env=env)


def one_sentence(result: subprocess.CompletedProcess) -> str:
    """The refusal, after checking that it is one line on stderr with exit code 2 and nothing on stdout."""
    assert (result.returncode, result.stdout) == (2, ""), result
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    return result.stderr.strip()


def text_report(*groups, baseline=None, target=3.28, style="text") -> str:
    return stats.report(*runlog.read_groups(list(map(str, groups)), baseline and str(baseline)), target, style)


def row_of(report: str, name: str) -> list[str]:
    [line] = [line for line in report.split("\n") if re.match(rf"\|? ?{re.escape(name)} ", line)]
    return [cell for cell in re.split(r"[| ]+", line) if cell]


# === The published figures ===


@pytest.mark.parametrize("layout", LAYOUTS)
def test_record_61_table_in_text(tmp_path, layout):
    report = text_report(*published(tmp_path, "baseline", "unified-optimizer", layout=layout))
    heading = report.split("\n")[0].split("  ")
    assert [h.strip() for h in heading if h.strip()] == [
        "Runs", "Steps", "Time μ", "Time σ", "Time +/-", "Welch p", "Loss μ", "Loss σ", "Loss +/-", "Welch p", "p"]
    assert row_of(report, "baseline") == [
        "baseline", "8", "1775", "105.5361", "0.0923", "0.0000", "-", "3.27833", "0.00082", "0.00000", "-", "0.0003"]
    assert row_of(report, "unified-optimizer") == [
        "unified-optimizer", "8", "1765", "104.4579", "0.1430", "-1.0782", "0.0000", "3.27822", "0.00149", "-0.00010",
        "0.8710", "0.0060"]
    assert "  losses = [3.2777, 3.2785, 3.2790, 3.2785, 3.2788, 3.2791, 3.2766, 3.2784]\n" \
           "  times  = [105.3690, 105.5950, 105.4140, 105.5520, 105.5610, 105.5820, 105.6090, 105.6070]\n" \
           "  (n = 8)\n  p = 3.41e-04: below 3.28 at p < 0.01\n" in report
    assert "  p = 5.96e-03: below 3.28 at p < 0.01\n  against baseline: time -1.0782 s (Welch p = 5.21e-10)" in report
    assert "note:" not in report


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muddgated_tables_in_markdown(tmp_path, layout):
    names = ["xsa-baseline-s1385", "xsa-baseline-s1335", "this_pr_v1", "this_pr_v2", "this_pr_v3"]
    report = text_report(*published(tmp_path, *names, layout=layout), style="md")
    want = {  # runs, steps, time mean, sd, delta; loss mean, sd; loss p
        "xsa-baseline-s1385": ["10", "1385", "81.2187", "0.0681", "0.0000", "3.27841", "0.00133", "2.17e-03"],
        "xsa-baseline-s1335": ["9", "1335", "78.5576", "0.0401", "-2.6611", "3.28477", "0.00168", "1.00e+00"],
        "this_pr_v1": ["11", "1335", "78.9669", "0.0425", "-2.2518", "3.27714", "0.00123", "8.15e-06"],
        "this_pr_v2": ["10", "1325", "77.7050", "0.0297", "-3.5137", "3.27808", "0.00098", "7.76e-05"],
        "this_pr_v3": ["10", "1290", "75.5199", "0.0487", "-5.6988", "3.27851", "0.00097", "4.53e-04"],
    }
    for name, cells in want.items():
        row = row_of(report, name)
        assert row[1:6] + row[7:9] + row[11:] == cells
    assert "p = 1.00e+00: NOT shown to be below 3.28 at p < 0.01" in report


@pytest.mark.parametrize("group, baseline, delta, p", [
    ("this_pr_v1", "xsa-baseline-s1335", "-0.00763", 1.4388e-08),
    ("this_pr_v2", "this_pr_v1", "0.00094", 0.06590),
    ("this_pr_v3", "this_pr_v2", "0.00043", 0.33649),
    ("unified-optimizer", "baseline", "-0.00010", 0.870971),
])
def test_welch_on_losses(tmp_path, group, baseline, delta, p):
    folders = published(tmp_path, group, baseline)
    report = json.loads(text_report(folders[0], baseline=folders[1], style="json"))
    row = {row["name"]: row for row in report["groups"]}[group]
    digits = len(f"{p:g}".split("e")[0].replace(".", "").lstrip("0"))
    assert format(row["loss_p"], f".{digits}g") == format(p, f".{digits}g")
    assert format(row["loss_delta"], ".5f") == delta
    assert report["baseline"] == baseline and report["notes"] == []


def test_readme_shows_the_published_records(tmp_path):
    report = text_report(*published(tmp_path, *PUBLISHED), style="md")
    readme = (ROOT / "records" / "README.md").read_text(encoding="utf-8")
    for name in PUBLISHED:
        row = row_of(report, name)
        assert f"| {' | '.join(row[1:5] + row[7:9] + row[11:])} |" in readme, name


def test_the_last_digit_does_not_hang_on_the_order_of_the_files(tmp_path):
    steps, losses, times = PUBLISHED["baseline"]
    backwards = [" ".join(reversed(values.split())) for values in (losses, times)]
    a, b = write_group(tmp_path / "a", steps, losses, times), write_group(tmp_path / "b", steps, *backwards)
    (first, second), _ = runlog.read_groups([str(a), str(b)])
    assert stats.mean_sd([r.loss for r in first.runs]) == stats.mean_sd([r.loss for r in second.runs])
    assert stats.mean_sd([r.seconds for r in first.runs]) == stats.mean_sd([r.seconds for r in second.runs])


def test_target_moves_the_verdict(tmp_path):
    [v3] = published(tmp_path, "this_pr_v3")
    assert "NOT shown to be below 3.27 at" in text_report(v3, target=3.27)
    assert "below 3.3 at p < 0.01" in text_report(v3, target=3.3)


# === Parsing ===


def read(data: bytes, tmp_path: Path) -> runlog.Run:
    path = tmp_path / "log.txt"
    path.write_bytes(data)
    return runlog.parse_log(path)


def refusal(data: bytes, tmp_path: Path) -> str:
    with pytest.raises(runlog.LogError) as error:
        read(data, tmp_path)
    return str(error.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_source_that_looks_like_a_log_is_not_read(tmp_path, layout):
    run = read(LAYOUTS[layout](1290, "3.2787", 75.561, train_lines=True), tmp_path)
    assert (run.steps, run.loss, run.seconds) == (1290, 3.2787, 75.561)
    assert [step for step, *_ in run.val] == [0, 250, 500, 750, 1000, 1250, 1290]
    assert [step for step, _ in run.train] == list(range(1, 1291))
    assert run.info["hardware"] == "8 x NVIDIA H100 80GB HBM3" and run.info["driver"] == "580.159.03"
    assert HOSTILE.strip() in run.sources["train_gpt.py"] and len(run.sources) == 2


def test_public_log_gives_source_versions_and_stages(tmp_path):
    run = read(public_log(1290, "3.2787", 75.561, gpus=2, gpu="NVIDIA H200"), tmp_path)
    assert run.sources == {"train_gpt.py": HOSTILE, "triton_kernels.py": "# kernels\n"}
    assert run.versions == "Python 3.12.3, PyTorch 2.10.0+cu128, Triton 3.6.0"
    assert (run.run_id, run.stages, run.info["hardware"]) == ("log", (0, 430, 860), "2 x NVIDIA H200")


@given(text=st.text(st.characters(blacklist_categories=["Cs"])), end=st.sampled_from(["", "\n", "\r\n", "\n\n"]))
def test_sources_round_trip_byte_for_byte(text, end):
    sources = {"train_gpt.py": text + end, "data/fineweb.py": HOSTILE, "empty.py": ""}
    assert runlog.extract_sources(own_log(10, "3.2787", 1.0, sources=sources)) == sources


def test_sources_can_be_read_from_a_path(tmp_path):
    (tmp_path / "log.txt").write_bytes(own_log(10, "3.2787", 1.0, sources={"train_gpt.py": "x = 1\n"}))
    assert runlog.extract_sources(tmp_path / "log.txt") == {"train_gpt.py": "x = 1\n"}
    assert runlog.extract_sources(str(tmp_path / "log.txt")) == {"train_gpt.py": "x = 1\n"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_line_ends_change_nothing(tmp_path, layout):
    data = LAYOUTS[layout](1290, "3.2787", 75.561, train_lines=True)
    unix, windows = read(data, tmp_path), read(data.replace(b"\n", b"\r\n"), tmp_path)
    assert windows == unix
    with_mark = read(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"), tmp_path)
    assert (with_mark.val, with_mark.sources) == (unix.val, unix.sources)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_cut_is_either_incomplete_or_right(tmp_path, layout):
    data = LAYOUTS[layout](4, "3.2787", 0.5, train_lines=True)
    final = data.index(b"step:4/4 val_loss")
    final = data.index(b"ms", data.index(b"step_avg", final)) + 2  # where the last validation line is whole
    # The public layout has no marks: one cut inside a source that quotes a whole log would pass for that log.
    first = 0 if layout == "own" else data.rindex(b"Running Python") + 20
    for cut in [*range(first, final - 200, 13), *range(final - 200, len(data))]:
        if cut < final:
            assert refusal(data[:cut], tmp_path)
        else:
            run = read(data[:cut], tmp_path)
            assert (run.loss, run.seconds) == (3.2787, 0.5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_run_says_how_far_it_came(tmp_path, layout):
    data = LAYOUTS[layout](1290, "3.2787", 75.561, train_lines=True)
    cut = data[: data.index(b"step:801/1290")]
    assert refusal(cut, tmp_path) == "incomplete: it reached step 800 of 1290, without the final validation"


@pytest.mark.parametrize("data, reason", [
    (b"", "the file is empty"),
    (b" \n\n", "the file is empty"),
    (b"\x00\x01\x02" * 50, "it is not a training log"),
    (b"\xff\xfe\x80" * 50, "it is not UTF-8 text"),
    (own_log(4, "3.2787", 0.5).decode().encode("utf-16"), "it is not UTF-8 text"),
    (b"torch==2.13.0\n", "it is not a training log"),
    (HOSTILE.replace(RULE, "").encode(), "it is not a training log"),
    (public_log(4, "3.2787", 0.5).replace(b"step:", b" step:"), "incomplete: it holds no step line"),
    (public_log(4, "3.2787", 0.5) + step_lines(4, "3.2780", 0.5).encode(), "two runs in one file?"),
    (public_log(4, "3.2787", 0.5) + step_lines(5, "3.2780", 0.5).encode(), "two runs in one file?"),
    (own_log(4, "3.2787", 0.5).replace(b'config: {"', b"config: {"), "its config line is not JSON"),
    (own_log(4, "3.2787", 0.5).replace(b"A docstring", b"a docstring"), "does not have the sha256"),
    (own_log(4, "3.2787", 0.5).replace(b"##### END triton", b"##### END tritom"), "is not followed by its END line"),
    (block("a.py", "") + own_log(4, "3.2787", 0.5, sources={"a.py": "1"}), "two sources named a.py"),
    (block("a.py", "x = 1\n")[:-5], "is not followed by its END line"),
    (block("a.py", "x = 1\n" * 9)[:130], "incomplete: it ends inside the source of a.py"),
    (block("a.py", "x = 1\n"), "incomplete: it ends before its header"),
    (block("a.py", "x = 1\n") + f"{RULE}\nrun_id: x\n".encode(), "incomplete: it ends inside its header"),
])
def test_what_is_no_run_is_told_apart(tmp_path, data, reason):
    assert reason in refusal(data, tmp_path)


def test_the_trainers_own_log_parses(tmp_path):
    train_gpt = pytest.importorskip("train_gpt")
    cfg = train_gpt.parse_options(["seed=3", "run_id=mine"])
    log = train_gpt.RunLog(tmp_path / "mine.txt")
    runtime = train_gpt.Runtime(rank=0, world_size=1, device=train_gpt.torch.device("cpu"))
    train_gpt.log_header(log, cfg, runtime, {"train_gpt.py": HOSTILE, "odd.py": "# no newline"})
    log.say(f"Sampling steps {train_gpt.warmup_steps(cfg)} for warmup")
    log.say(step_lines(cfg.total_steps, "3.2787", 75.561))
    log.file.close()
    run = runlog.parse_log(log.path)
    assert (run.run_id, run.config["seed"], run.info["world_size"]) == ("mine", 3, "1")
    assert run.stages == (0, *train_gpt.stage_ends(cfg)[:-1]) and run.loss == 3.2787
    assert run.sources == {"train_gpt.py": HOSTILE, "odd.py": "# no newline"}
    assert run.info["hardware"].startswith("cpu") and train_gpt.torch.__version__ in run.versions


# === Groups ===


def test_left_out_files_are_named_and_do_not_count(tmp_path):
    [folder] = published(tmp_path, "this_pr_v3")
    good = (Path(folder) / "00.txt").read_bytes()
    bad = {"cut.txt": good[:-200], "empty.txt": b"", "photo.txt": b"\x89PNG\0", "copy.txt": good,
           "windows.txt": good.replace(b"\n", b"\r\n"), "note.txt": b"run 3 was fast\n"}
    for name, data in bad.items():
        (Path(folder) / name).write_bytes(data)
    (Path(folder) / "inner.txt").mkdir()
    (Path(folder) / "README.md").write_text("not looked at")
    report = text_report(folder)
    notes = [line for line in report.split("\n") if line.startswith("note:")]
    assert sorted(re.findall(r"left out (\S+):", "\n".join(notes))) == sorted(bad) and len(notes) == len(bad)
    assert row_of(report, "this_pr_v3")[1:4] == ["10", "1290", "75.5199"]


def test_a_run_id_counts_once(tmp_path):
    (tmp_path / "a.txt").write_bytes(own_log(10, "3.2787", 1.0, run_id="x")[:-150])  # incomplete: takes no id away
    (tmp_path / "b.txt").write_bytes(own_log(10, "3.2787", 1.0, run_id="x"))
    (tmp_path / "c.txt").write_bytes(own_log(10, "3.2700", 1.0, run_id="x"))
    (tmp_path / "d.txt").write_bytes(own_log(10, "3.2700", 1.0, run_id="y"))
    [group], _ = runlog.read_groups([str(tmp_path)])
    assert [run.path.name for run in group.runs] == ["b.txt", "d.txt"]
    assert [(path.name, reason.split(":")[0]) for path, reason in group.left_out] == [
        ("a.txt", "incomplete"), ("c.txt", "a duplicate")]


def test_one_run_has_no_p(tmp_path):
    base = write_group(tmp_path / "base", 1290, "3.2787 3.2786", "75.5 75.6")
    one = write_group(tmp_path / "one", 1290, "3.2778", "75.519")
    report = text_report(base, one)
    assert row_of(report, "one") == [
        "one", "1", "1290", "75.5190", "-", "-0.0310", "-", "3.27780", "-", "-0.00085", "-", "-"]
    assert "no p: it takes two losses or more, not all the target" in report
    assert "time -0.0310 s (Welch p = -), loss -0.00085 (Welch p = -)" in report
    row = json.loads(text_report(base, one, style="json"))["groups"][1]
    assert row["target_p"] is row["time_p"] is row["loss_sd"] is None and row["losses"] == [3.2778]


def test_equal_values_give_no_warning(tmp_path, recwarn):
    same = write_group(tmp_path / "same", 10, "3.2700 3.2700 3.2700", "1.5 1.5 1.5", layout="own")
    assert row_of(text_report(same), "same")[2:5] == ["10", "1.5000", "0.0000"]
    assert not recwarn.list


def test_a_diverged_run_counts_and_is_said_aloud(tmp_path):
    folder = write_group(tmp_path / "g", 10, "3.2700 nan 3.2701", "1.5 1.6 1.7")
    report = text_report(folder)
    assert "note: g: 01.txt ended with a loss of nan; it counts." in report
    assert row_of(report, "g")[1:] == ["3", "10", "1.6000", "0.1000", "0.0000", "-", "-", "-", "-", "-", "-"]
    json.loads(text_report(folder, style="json"), parse_constant=pytest.fail)  # strict JSON: no NaN


def test_a_resumed_run_counts_and_is_said_aloud(tmp_path):
    folder = write_group(tmp_path / "g", 10, "3.2700 3.2701", "1.5 1.6", layout="own")
    state = "logs/a/state_step000005.pt (step 5, clock 800ms, world size 8)"
    (folder / "02.txt").write_bytes(own_log(10, "3.2702", 1.7, resumed=state))
    [group], _ = runlog.read_groups([str(folder)])
    assert [run.info.get("resumed") for run in group.runs] == [None, None, state]
    report = text_report(folder)
    assert f"note: g: 02.txt went on from {state}: another log holds its beginning, and its time is no rec" in report
    assert row_of(report, "g")[1:4] == ["3", "10", "1.6000"] and report.count("note:") == 1


@pytest.mark.parametrize("change, said", [
    (dict(steps=11), "g mixes step counts: 10 (2), 11 (1: odd.txt)."),
    (dict(hardware="8 x NVIDIA H200"),
     "g mixes hardware: 8 x NVIDIA H100 80GB HBM3 (2), 8 x NVIDIA H200 (1: odd.txt)."),
    (dict(sources={"train_gpt.py": "x = 2\n"}), "g mixes embedded sources: "),
    (dict(options={"fp8": "off"}), "g mixes option fp8: auto (2), off (1: odd.txt)."),
    (dict(attention="torch"), "g mixes attention: triton (2), torch (1: odd.txt)."),
    (dict(options={"seed": 7}), None),
    (dict(options={"seed": 1}), "g: 2 runs share seed=1, so they are not independent"),
])
def test_mixtures_are_said_aloud(tmp_path, change, said):
    folder = write_group(tmp_path / "g", 10, "3.2700 3.2701", "1.5 1.6", layout="own")
    options = {"steps": 10, "loss": "3.2702", "seconds": 1.7, "run_id": "odd"} | change
    (folder / "odd.txt").write_bytes(own_log(**options))
    notes = [line for line in text_report(folder).split("\n") if line.startswith("note:")]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]
    assert row_of(text_report(folder), "g")[1:3] == ["3", "10+11" if "steps" in change else "10"]


def test_other_hardware_than_the_baselines_is_said_aloud(tmp_path):
    base = write_group(tmp_path / "base", 10, "3.2700 3.2701", "1.5 1.6")
    other = write_group(tmp_path / "other", 10, "3.2700 3.2701", "1.2 1.3", gpu="NVIDIA H200")
    said = "note: other and base differ in hardware (8 x NVIDIA H200; 8 x NVIDIA H100 80GB HBM3)"
    assert said in text_report(base, other)
    (other / "00.txt").write_bytes((base / "00.txt").read_bytes())
    assert "note: other and base share 00.txt." in text_report(base, other)


def test_groups_are_folders_patterns_or_files(tmp_path):
    folder = write_group(tmp_path / "g", 10, "3.27 3.28 3.29", "1.5 1.6 1.7")
    files = sorted(map(str, folder.glob("*.txt")))
    other = str(write_group(tmp_path / "h", 10, "3.27", "1.5") / "00.txt")
    for arguments, names, sizes in (
        ([str(folder)], ["g"], [3]),
        (files, ["g"], [3]),
        (files[:1], ["00"], [1]),
        ([str(folder / "0[12].txt")], ["0[12]"], [2]),
        ([str(folder), files[0], files[1]], [str(folder), f"files in {folder}"], [3, 2]),
        ([files[0], files[1], other], ["g", "00"], [2, 1]),
    ):
        groups, baseline = runlog.read_groups(arguments)
        assert [group.name for group in groups] == names and [len(group.runs) for group in groups] == sizes
        assert baseline is groups[0]


def test_baseline_may_be_listed_or_not(tmp_path):
    a, b, c = (str(write_group(tmp_path / name, 10, "3.27 3.28", "1.5 1.6")) for name in "abc")
    for arguments, named, names, chosen in (
        ([a, b], None, ["a", "b"], "a"),
        ([a, b], b, ["a", "b"], "b"),
        ([a, b], b + "/", ["a", "b"], "b"),
        ([a, b], c, ["c", "a", "b"], "c"),
        ([a + "/00.txt"], a + "/01.txt", ["01", "00"], "01"),
    ):
        groups, baseline = runlog.read_groups(arguments, named)
        assert ([group.name for group in groups], baseline.name) == (names, chosen)


# === The commands' refusals ===


def test_bad_input_ends_in_one_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    nested = write_group(tmp_path / "nested" / "inner", 10, "3.27", "1.5").parent
    junk = tmp_path / "junk"
    junk.mkdir()
    (junk / "a.txt").write_bytes(b"")
    (junk / "b.txt").write_bytes(b"hello\n")
    for argument, words in (
        (tmp_path / "missing", ["there is no", "missing"]),
        (tmp_path / "empty", ["holds no .txt file"]),
        (nested, ["holds no .txt file", f"name its folders one by one: {nested / 'inner'}"]),
        (junk, ["at least one complete log", "a.txt: the file is empty", "b.txt: it is not a training log"]),
    ):
        sentence = one_sentence(command("stats", argument))
        assert all(word in sentence for word in words), sentence
    for script in (["plot"], ["snapshot", "--name", "x"]):
        assert "there is no" in one_sentence(command(*script, tmp_path / "missing"))


def test_stats_command(tmp_path, monkeypatch):
    folders = published(tmp_path, "baseline", "unified-optimizer")
    result = command("stats", folders[1], "--baseline", folders[0], "--format", "md")
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout == text_report(folders[1], baseline=folders[0], style="md") + "\n"
    assert command("stats", folders[0], "--target", "nan").returncode == 2
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # a terminal without sigma
    plain = command("stats", *folders)
    assert plain.returncode == 0 and "Time ?" in plain.stdout


@pytest.mark.parametrize("package, module, script", [
    ("scipy", "scipy.stats", stats), ("matplotlib", "matplotlib.figure", plot)])
def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys, package, module, script):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", ["x", *published(tmp_path, "baseline")])
    with pytest.raises(SystemExit) as ended:
        runlog.run_command(script.main)
    assert ended.value.code == 2
    told = f"error: {package} is missing; install it with: pip install -r requirements-dev.txt\n"
    assert capsys.readouterr().err == told


# === Snapshots ===


@pytest.fixture
def records(tmp_path, monkeypatch) -> Path:
    """An empty records folder in a project whose train_gpt.py differs from the logged one by a line."""
    folder = tmp_path / "project" / "records"
    folder.mkdir(parents=True)
    (folder.parent / "train_gpt.py").write_text("x = 1\ny = 2\n")
    monkeypatch.setattr(snapshot, "HERE", folder)
    return folder


SOURCES = {"train_gpt.py": "x = 1\ny = 3\nz = 4\n", "data/fineweb.py": "# no newline at the end, σ"}


def snap(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["snapshot.py", "--date", "2026-11-30", *map(str, arguments)])
    snapshot.main()


@pytest.mark.parametrize("windows", [False, True])
def test_snapshot_holds_logs_verified_source_and_readme(tmp_path, records, monkeypatch, capsys, windows):
    base = write_group(tmp_path / "old", *PUBLISHED["this_pr_v2"])
    logs = write_group(tmp_path / "logs", *PUBLISHED["this_pr_v3"], layout="own", sources=SOURCES)
    for log in logs.glob("*.txt") if windows else ():
        log.write_bytes(log.read_bytes().replace(b"\n", b"\r\n"))
    snap(monkeypatch, "--name", "MuddGatedAndDC", logs, "--baseline", base, "--to", records)
    record = records / "2026-11-30_MuddGatedAndDC"
    assert sorted(path.name for path in records.iterdir()) == [record.name]
    for source, copy in ((logs, record), (base, record / "baseline")):
        assert sorted(p.name for p in source.iterdir()) == sorted(p.name for p in copy.glob("*.txt"))
        assert all(p.read_bytes() == (copy / p.name).read_bytes() for p in source.iterdir())
    assert {name: (record / "source" / name).read_bytes().decode() for name in SOURCES} == SOURCES
    readme = (record / "README.md").read_text(encoding="utf-8")
    row = row_of(readme, "MuddGatedAndDC")
    assert row[1:6] == ["10", "1290", "75.5199", "0.0487", "-2.1851"] and float(row[6]) < 1e-20
    assert row[7:] == ["3.27851", "0.00097", "0.00043", "3.36e-01", "4.53e-04"]
    for line in ("Each file has the sha256 that the logs state.", "| Hardware | 8 x NVIDIA H100 80GB HBM3 |",
                 f"`{hashlib.sha256(SOURCES['train_gpt.py'].encode()).hexdigest()}`",
                 "| `train_gpt.py` | +2 | -1 |", "| `data/fineweb.py` | +1 | -0 |",
                 f"git checkout {'0123456789' * 4} -- . ':!records'",
                 "cp -r records/2026-11-30_MuddGatedAndDC/source/. .",
                 "NPROC=8 ./run.sh preset=record fp8=auto\n", "all runs: seed = 0, 1, 2, "):
        assert line in readme, line
    assert (record / "changes.diff").read_text(encoding="utf-8") == (
        "--- /dev/null\n+++ b/data/fineweb.py\n@@ -0,0 +1 @@\n+# no newline at the end, σ\n"
        "\\ No newline at end of file\n"
        "--- a/train_gpt.py\n+++ b/train_gpt.py\n@@ -1,2 +1,3 @@\n x = 1\n-y = 2\n+y = 3\n+z = 4\n")
    assert "Made" in capsys.readouterr().out
    # The command that the README names prints the README's table.
    [line] = re.findall(r"`python records/stats.py (.*)`", readme)
    arguments = [str(records.parent / word) if word.startswith("records/") else word for word in line.split()]
    again = command("stats", *arguments, "--format", "md").stdout
    assert row_of(again, record.name)[1:] == row_of(readme, "MuddGatedAndDC")[1:]


def test_snapshot_of_public_logs_against_another_record(tmp_path, records, monkeypatch):
    old = write_group(tmp_path / "old", 10, "3.27", "1.5", source="x = 1\n")
    new = write_group(tmp_path / "new", 10, "3.27 3.28", "1.5 1.6", source="x = 2\n")
    for against, told in ((old, "From old to this record"), (new / "00.txt", "No line differs from 00.txt.")):
        snap(monkeypatch, "--name", told.split()[0], new, "--against", against, "--to", records)
        readme = (records / f"2026-11-30_{told.split()[0]}" / "README.md").read_text(encoding="utf-8")
        assert told in readme and "states no sha256" in readme and "\n./run.sh\n" in readme
        assert ("| `train_gpt.py` | +1 | -1 |" in readme) == (against == old)
        assert (records / f"2026-11-30_{told.split()[0]}" / "changes.diff").exists() == (against == old)


def test_snapshot_tells_options_that_vary_and_quotes_those_that_do_not(tmp_path, records, monkeypatch):
    for seed in (1, 2):
        options = {"seed": seed, "train_files": "my data/*.bin", "checkpoint_every": 0}
        log = own_log(10, "3.27", 1.5 + seed, run_id=f"s{seed}", options=options, commit="unknown")
        (tmp_path / f"s{seed}.txt").write_bytes(log)
    (tmp_path / "more").mkdir()
    (tmp_path / "s2.txt").rename(tmp_path / "more" / "s2.txt")
    snap(monkeypatch, "--name", "Seeds", tmp_path / "s1.txt", tmp_path / "more", "--to", records)
    readme = (records / "2026-11-30_Seeds" / "README.md").read_text(encoding="utf-8")
    assert "NPROC=8 ./run.sh preset=record fp8=auto 'train_files=my data/*.bin' checkpoint_every=0\n" in readme
    assert "Not the same in all runs: seed = 1, 2." in readme and "git checkout" not in readme


def test_snapshot_refuses_and_leaves_nothing_behind(tmp_path, records, monkeypatch):
    good = write_group(tmp_path / "good", 10, "3.27 3.28", "1.5 1.6", layout="own", sources=SOURCES)
    mixed = write_group(tmp_path / "mixed", 10, "3.27", "1.5", layout="own", sources=SOURCES)
    (mixed / "odd.txt").write_bytes(own_log(10, "3.27", 1.5, sources=SOURCES | {"train_gpt.py": "x = 0\n"}))
    evil = write_group(tmp_path / "evil", 10, "3.27", "1.5", layout="own", sources={"../evil.py": "x = 1\n"})
    bare = write_group(tmp_path / "bare", 10, "3.27", "1.5")
    (bare / "00.txt").write_bytes((bare / "00.txt").read_bytes().rpartition(f"{RULE}\nRunning".encode())[2])
    (bare / "00.txt").write_bytes(f"{RULE}\nRunning".encode() + (bare / "00.txt").read_bytes())
    (tmp_path / "00.txt").write_bytes(own_log(10, "3.27", 1.7, run_id="z", sources=SOURCES))
    late = dict(layout="own", sources=SOURCES, resumed="a.pt (step 5)")
    resumed = write_group(tmp_path / "resumed", 10, "3.27", "1.5", **late)
    for arguments, words in (
        (["--name", "a/b", good], "letters, digits"),
        (["--name", "Mixed", mixed], "00.txt and odd.txt differ in train_gpt.py"),
        (["--name", "Evil", evil], "inside the project"),
        (["--name", "Bare", bare], "embeds none"),
        (["--name", "Resumed", resumed], "must be unbroken, and 00.txt went on from a.pt (step 5); run it anew."),
        (["--name", "Against", good, "--baseline", resumed], "must be unbroken, and 00.txt went on from a.pt (step 5)"),
        (["--name", "Same", good / "00.txt", tmp_path / "00.txt"], "two are 00.txt"),
        (["--name", "Against", good, "--against", records], "holds no .txt file"),
        (["--name", "Against", good, "--against", tmp_path / "project/train_gpt.py"], "it is not a training log"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            snap(monkeypatch, *arguments, "--to", records)
        assert list(records.iterdir()) == []
    snap(monkeypatch, "--name", "Once", good, "--to", records)
    before = {path: path.read_bytes() for path in records.rglob("*") if path.is_file()}
    sentence = one_sentence(command("snapshot", "--name", "Once", "--date", "2026-11-30", good, "--to", records))
    assert "never overwritten" in sentence
    assert before == {path: path.read_bytes() for path in records.rglob("*") if path.is_file()}


def test_a_log_that_changes_while_it_is_copied_is_found(tmp_path, records, monkeypatch):
    good = write_group(tmp_path / "good", 10, "3.27", "1.5", layout="own", sources=SOURCES)

    def copy_another(runs, folder):
        folder.mkdir(parents=True)
        (folder / "00.txt").write_bytes(own_log(10, "3.27", 1.5, sources=SOURCES | {"train_gpt.py": "x = 9\n"}))

    monkeypatch.setattr(snapshot, "copy_logs", copy_another)
    with pytest.raises(ValueError, match="source/train_gpt.py must equal what 00.txt embeds"):
        snap(monkeypatch, "--name", "Good", good, "--to", records)
    assert list(records.iterdir()) == []


def test_a_source_damaged_on_disk_is_found(tmp_path):
    folder = write_group(tmp_path / "g", 10, "3.27", "1.5", layout="own", sources={"a.py": "x = 1\n"})
    (folder / "source").mkdir()
    (folder / "source" / "a.py").write_bytes(b"x = 1\n")
    snapshot.check_sources(folder)
    (folder / "source" / "a.py").write_bytes(b"x = 2\n")
    with pytest.raises(ValueError, match="must equal what 00.txt embeds"):
        snapshot.check_sources(folder)


# === Plots ===


@pytest.mark.parametrize("sampled, starts", [
    ([0, 1, 423, 424, 425, 426, 848, 849, 850, 851, 1273, 1274, 1275, 1276], (0, 425, 850, 1275)),
    ([0, 1, 8, 9, 10, 11, 12, 13, 14, 15], (0, 10, 14)),
    ([0, 1, 8, 9, 10], (0, 10)),  # an extension of one step
    ([0, 1, 2, 3], (0,)),  # too short a schedule to tell
    ([0, 1, 7, 50, 99, 200], (0,)),  # another rule of sampling
    ([0, 1], (0,)),
])
def test_stages_come_from_the_warm_up_line(sampled, starts):
    assert runlog.stage_starts(f"Compiling\nSampling steps {sampled} for warmup\nResetting Model\n") == starts
    assert runlog.stage_starts("no warm-up\n") == (0,)


def test_step_time_by_stage_gives_the_published_costs(tmp_path):
    run = read(public_log(1290, "3.2787", 75.561), tmp_path)
    run = dataclasses.replace(run, train=((425, 13812), (850, 38501), (1275, 74192), (1290, 75469)))
    costs = plot.stage_times(run, (0, 425, 850, 1275))
    assert [format(cost, ".1f") for cost in costs] == ["32.5", "58.1", "84.0", "85.1"]
    assert plot.stage_times(run, (0, 425, 5000)) == plot.stage_times(run, (0, 425))
    sparse = dataclasses.replace(run, train=())  # then the validations tell
    assert plot.stage_times(sparse, (0,)) == pytest.approx([75561 / 1290])


def test_curve_is_mean_and_spread_at_the_shared_validations(tmp_path):
    folder = write_group(tmp_path / "g", 1290, "3.27 3.29", "75.0 77.0")
    [group], _ = runlog.read_groups([str(folder)])
    rows = plot.curve(group)
    assert list(rows[:, 0]) == [250, 500, 750, 1000, 1250, 1290]
    assert rows[-1] == pytest.approx([1290, 76.0, 3.28, 0.02 / 2**0.5])
    write_group(folder, 7, "3.27", "1.0")
    with pytest.raises(ValueError, match="share a validation step"):
        plot.curve(runlog.read_groups([str(folder)])[0][0])


def test_figure_shows_every_run_beside_the_target(tmp_path):
    groups, _ = runlog.read_groups(published(tmp_path, "this_pr_v2", "this_pr_v3"))
    *_, stages, finals = (ax for sub in plot.draw(groups, 3.28, None).subfigs for ax in sub.axes)
    dots = [collection.get_offsets()[:, 0] for collection in finals.collections if len(collection.get_offsets()) == 10]
    for name, drawn in zip(("this_pr_v2", "this_pr_v3"), dots, strict=True):
        assert list(drawn) == [float(loss) for loss in PUBLISHED[name][1].split()]
    assert [3.28, 3.28] in [list(line.get_xdata()) for line in finals.lines]
    assert "this_pr_v3\nn = 10, mean 3.27851\np = 4.5e-04" in [label.get_text() for label in finals.get_yticklabels()]
    assert len(stages.patches) == 6 and {round(bar.get_height(), 1) for bar in stages.patches[3:]} == {58.5}


def test_runs_of_different_length_are_drawn_together(tmp_path):
    folder = write_group(tmp_path / "g", 1290, "3.27", "75.0")
    (folder / "short.txt").write_bytes(public_log(600, "3.3", 36.0))
    groups, _ = runlog.read_groups([str(folder)])
    *_, stages, finals = (ax for sub in plot.draw(groups, 3.28, None).subfigs for ax in sub.axes)
    assert [label.get_text() for label in stages.get_xticklabels()] == ["stage 0\nfrom 0", "stage 1\nfrom 430"]
    assert {round(bar.get_height(), 1) for bar in stages.patches} == {round((75000 / 1290 + 60) / 2, 1)}


def test_plot_command_writes_png_and_svg(tmp_path):
    folders = published(tmp_path, "baseline", "unified-optimizer")
    odd = write_group(tmp_path / "one", 1290, "nan", "75.5")
    result = command("plot", *folders, odd, "--out", tmp_path / "fig.png", "--stages", "500,1000")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "fig.png").read_bytes().startswith(b"\x89PNG") and b"<svg" in (tmp_path / "fig.svg").read_bytes()
    assert "note: one: 00.txt ended with a loss of nan; it counts." in result.stdout
    told = one_sentence(command("plot", odd, "--out", tmp_path / "missing" / "x"))
    assert "missing/x.png cannot be used (No such file or directory): check that its folder exists" in told
    assert command("plot", odd, "--stages", "9,3").returncode == 2
