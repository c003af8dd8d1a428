"""The tile registers of AMX are asked for, and done without where the system says no."""

import json
import os
import subprocess
import sys

import pytest

from penstock.core.native import cpu_levels

SMALL_STACK = """
import ctypes, json


class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


memory = ctypes.create_string_buffer(4096)  # the registers alone are 8 KiB of a signal's frame
stack = Stack(ctypes.cast(memory, ctypes.c_void_p), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

from penstock.core.native import Context, cpu_levels

with Context(1) as context:
    print(json.dumps([context.cpu_level, dict(cpu_levels())]))
"""


@pytest.mark.skipif(not dict(cpu_levels()).get("amx"), reason="no tile registers here")
def test_a_small_signal_stack_falls_back_from_amx() -> None:
    command = [sys.executable, "-c", SMALL_STACK]
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_CPU"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    used, levels = json.loads(done.stdout)
    assert not levels["amx"]
    assert levels["avx512"]
    assert used == "avx512"
