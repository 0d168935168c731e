"""The project's files as texts: tables of contents, functions that fit a screen or two; and every launch of a step."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_tools import needs_triton

import checkpoints
import dc_triton_kernels
import exchange
import preflight
import train_gpt
import triton_kernels


def test_the_table_of_contents_is_the_banners_in_order():
    contents = re.findall(r"^  (\S.*?)  ", triton_kernels.__doc__, re.M)
    assert contents == re.findall(r"^# === (.+) ===$", inspect.getsource(triton_kernels), re.M)
    assert len(contents) > 1


@pytest.mark.parametrize("module", [train_gpt, triton_kernels, dc_triton_kernels, checkpoints, exchange, preflight])
def test_no_function_passes_90_lines(module):
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)]
    assert functions and max(node.end_lineno - node.lineno + 1 for node in functions) <= 90


def test_the_trainer_stays_one_readable_file():
    assert len(inspect.getsource(train_gpt).splitlines()) <= 2200


@needs_triton
def test_every_launch_of_a_step_compiles():
    """With its absent arguments and settings, for sm_90: forward, backward, optimizer and validation."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    worker = [sys.executable, Path(__file__).with_name("launch_worker.py")]
    done = subprocess.run(worker, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told["failed"] and len(told["launched"]) > 30
