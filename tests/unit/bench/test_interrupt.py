"""Ctrl-C in a process of its own, as a terminal sends it."""

from __future__ import annotations

import signal
import subprocess
import sys

# A run that ignores the first request to stop, with a child like an engine's that would
# outlive it. The child's process id is printed once everything is up.
STUBBORN = """
import asyncio, subprocess, sys, time
from specbench.cli.interrupt import InterruptGuard

child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE, text=True)
child.stdout.readline()

async def main(guard):
    stop = asyncio.Event()
    guard.attach(stop)
    print(child.pid, flush=True)
    await stop.wait()
    print("asked to stop", flush=True)
    time.sleep(600)

with InterruptGuard() as guard:
    asyncio.run(main(guard))
"""

BEFORE_ATTACH = """
from specbench.cli.interrupt import InterruptGuard
import time
try:
    with InterruptGuard():
        print("up", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    print("ended")
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_second_ctrl_c_ends_the_process_and_its_children() -> None:
    import psutil

    process = start(STUBBORN)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked to stop\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "press Ctrl-C again" in errors
    gone, alive = psutil.wait_procs([child], timeout=60)
    assert (len(gone), alive) == (1, [])


def test_ctrl_c_before_anything_runs_ends_at_once() -> None:
    process = start(BEFORE_ATTACH)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output == "ended\n"
    assert process.returncode == 0
