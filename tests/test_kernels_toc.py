"""The kernels' file as a text: its table of contents, and functions that fit a screen or two."""

import ast
import inspect
import re

import pytest

import dc_triton_kernels
import triton_kernels


def test_the_table_of_contents_is_the_banners_in_order():
    contents = re.findall(r"^  (\S.*?)  ", triton_kernels.__doc__, re.M)
    assert contents == re.findall(r"^# === (.+) ===$", inspect.getsource(triton_kernels), re.M)
    assert len(contents) > 1


@pytest.mark.parametrize("module", [triton_kernels, dc_triton_kernels])
def test_no_function_passes_90_lines(module):
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)]
    assert functions and max(node.end_lineno - node.lineno + 1 for node in functions) <= 90
