"""Runs one vLLM function twice: with the Triton kernels themselves and with their CPU twins.

Two long-lived subprocesses answer calls (see oracle_worker.py). The *reference* imports vLLM
with Triton's interpreter, so that the original kernels run on CPU tensors; the *twin* imports
vLLM without Triton and with every twin registered. Both get the same pickled arguments and send
back the return value and the arguments as the call left them:

    reference, twin = pair.call("vllm.v1.worker.gpu.sample.min_p:apply_min_p", logits, rows, min_p)
    assert_same(reference.args[0], twin.args[0])

A kernel without a convenient host function is launched directly; the twin drops the grid:

    reference, twin = pair.launch("vllm.v1.worker.gpu.sample.min_p._min_p_kernel", (3,), ...)

A function of a helper module beside the tests can be named as well ("my_helpers:run"): it runs
inside both workers, for cases that must first build an object of vLLM.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORKER = Path(__file__).with_name("oracle_worker.py")
# Enough of the worker's stderr to show the end of a traceback.
STDERR_TAIL_CHARS = 4000


@dataclass(frozen=True)
class Outcome:
    """What one worker made of a call.

    Attributes:
        value: the return value.
        args: the positional arguments after the call (mutations visible).
        kwargs: the keyword arguments after the call.
    """

    value: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OracleError(AssertionError):
    """A worker raised or died; the message holds its traceback."""


class _Worker:
    """One subprocess and its pipe of pickled frames."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        if mode == "reference":
            env["TRITON_INTERPRET"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
        )

    def send(self, request: tuple[Any, ...]) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise OracleError(self._death()) from error

    def receive(self) -> tuple[bool, Any]:
        assert self._process.stdout is not None
        try:
            ok, payload = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            raise OracleError(self._death()) from error
        return ok, payload

    def _death(self) -> str:
        self._process.wait(timeout=10)
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace")[-STDERR_TAIL_CHARS:]
        return f"{self.mode} worker ended with code {self._process.returncode}:\n{tail}"

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()


class OraclePair:
    """The reference worker and the twin worker, called together."""

    def __init__(self) -> None:
        self._workers = (_Worker("reference"), _Worker("twin"))

    def call(self, target: str, *args: Any, **kwargs: Any) -> tuple[Outcome, Outcome]:
        """Call "module:function" (attribute paths allowed) in both workers."""
        return self._both(("call", target, args, kwargs))

    def launch(
        self, kernel: str, grid: tuple[int, ...], *args: Any, **kwargs: Any
    ) -> tuple[Outcome, Outcome]:
        """Launch the kernel with this fully qualified name in both workers."""
        return self._both(("launch", kernel, grid, args, kwargs))

    def _both(self, request: tuple[Any, ...]) -> tuple[Outcome, Outcome]:
        for worker in self._workers:
            worker.send(request)
        # Read both answers before judging either, or the next call would read a stale one.
        answers = [(worker.mode, *worker.receive()) for worker in self._workers]
        failures = [f"{mode} worker:\n{payload}" for mode, ok, payload in answers if not ok]
        if failures:
            raise OracleError("\n".join(failures))
        reference, twin = (Outcome(*payload) for _, _, payload in answers)
        return reference, twin

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def assert_same(
    reference: Any, twin: Any, *, rtol: float = 0.0, atol: float = 0.0, where: str = "result"
) -> None:
    """Compare two results structurally; tensors bit for bit unless a tolerance is given.

    NaN equals NaN. Shapes and dtypes must agree.
    """
    assert type(reference) is type(twin), f"{where}: {type(reference)} against {type(twin)}"
    if isinstance(reference, torch.Tensor):
        torch.testing.assert_close(
            twin, reference, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
    elif isinstance(reference, np.ndarray):
        np.testing.assert_allclose(twin, reference, rtol=rtol, atol=atol, err_msg=where)
    elif isinstance(reference, dict):
        assert reference.keys() == twin.keys(), where
        for key in reference:
            assert_same(reference[key], twin[key], rtol=rtol, atol=atol, where=f"{where}[{key!r}]")
    elif isinstance(reference, (tuple, list)):
        assert len(reference) == len(twin), where
        for i, (left, right) in enumerate(zip(reference, twin, strict=True)):
            assert_same(left, right, rtol=rtol, atol=atol, where=f"{where}[{i}]")
    else:
        assert reference == twin, f"{where}: {reference!r} against {twin!r}"
