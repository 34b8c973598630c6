"""Run a step in a process of its own, so that the engine's memory is free again afterwards."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from specbench.environment import missing_package
from specbench.errors import EngineFailure, SpecbenchError

Result = TypeVar("Result")
OnProgress = Callable[[float, float], None]

# Progress is for people.
TELL_EVERY_S = 0.5
# An engine that has answered closes within seconds.
CLOSING_S = 60.0


def call_in_child(
    function: Callable[..., Result], arguments: dict[str, Any], on_progress: OnProgress
) -> Result:
    """Call ``function(**arguments, on_progress=...)`` in a new process.

    Args:
        function: importable by name; its result and arguments can be pickled.
        on_progress: called here with what the function reports there, twice a second.

    Raises:
        SpecbenchError: what the function raised.
        EngineFailure: the process died, or failed in an unforeseen way.
        KeyboardInterrupt: after the child has stopped, which it was asked to.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, function, arguments))
    with _ignoring_interrupts():
        process.start()
    # With the child's end open here too, its death would not be noticed.
    sender.close()
    try:
        result: Result = _receive(receiver, on_progress)
        return result
    except EOFError:
        process.join()
        raise EngineFailure(
            f"the process of this step died (exit code {process.exitcode}); often for lack of "
            "memory: lower --batch-size, then run the same command again to go on"
        ) from None
    except KeyboardInterrupt:
        process.terminate()
        # It still writes what it has.
        process.join()
        raise
    finally:
        process.join(CLOSING_S)
        if process.is_alive():
            process.kill()
        receiver.close()


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """What starts now begins with Ctrl-C ignored, as a child inherits that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _receive(receiver: Connection, on_progress: OnProgress) -> Any:
    while True:
        kind, value = receiver.recv()
        if kind == "progress":
            on_progress(*value)
        elif kind == "error":
            raise value
        else:
            return value


def _run(sender: Connection, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Body of the child: Ctrl-C reaches it through its parent only, as a request to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sender.send(("result", function(**arguments, on_progress=_Teller(sender))))
    except KeyboardInterrupt:
        return
    except SpecbenchError as error:
        sender.send(("error", error))
    except ModuleNotFoundError as error:
        sender.send(("error", missing_package(error) or EngineFailure(str(error))))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        failure = EngineFailure(f"{type(error).__name__}: {reason}".rstrip(": "))
        sender.send(("error", failure))


def _interrupt(signum: int, frame: Any) -> None:
    # Once: a second request must not stop what the first one saves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Teller:
    def __init__(self, sender: Connection) -> None:
        self._sender = sender
        self._next_s = 0.0

    def __call__(self, done: float, total: float) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or done >= total:
            self._next_s = now_s + TELL_EVERY_S
            self._sender.send(("progress", (done, total)))
