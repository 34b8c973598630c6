"""The ``specbench`` command. Sub-commands are imported only when they run.

``specbench --help`` therefore answers at once and imports neither torch nor vLLM.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from specbench import __version__
from specbench.cli.failures import report_failure


@dataclass(frozen=True)
class LazyCommand:
    """A sub-command and where it lives.

    Attributes:
        target: ``module:attribute``; the attribute is a function or a Typer application.
        help: what ``specbench --help`` says about it.
    """

    target: str
    help: str


COMMANDS = {
    "run": LazyCommand("specbench.cli.run:run", "Run one policy on a workload and measure it."),
    "compare": LazyCommand(
        "specbench.cli.compare:compare",
        "Compare policies in one engine, interleaved in rounds.",
    ),
    "costs": LazyCommand(
        "specbench.cli.costs:app", "Profile, show, import and export step-cost tables."
    ),
    "drafter": LazyCommand(
        "specbench.cli.drafter:app",
        "Train a DSpark drafter for a target: generate, features, train, evaluate, export.",
    ),
    "calibrate": LazyCommand(
        "specbench.cli.calibrate:calibrate",
        "Fit how likely n-gram copies and the drafter's tokens are accepted.",
    ),
    "parity": LazyCommand(
        "specbench.cli.parity:parity",
        "Compare step times and outputs with vLLM as it comes, without the plugin.",
    ),
    "doctor": LazyCommand(
        "specbench.cli.doctor:doctor", "Show what is installed, what is missing, how to get it."
    ),
}


class _Stop(Exception):
    """Carries what ended a command past Typer, which would handle some of it itself."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class LazyGroup(typer.core.TyperGroup):
    """Lists sub-commands by their help texts and imports the one that was asked for."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for name, command in COMMANDS.items():
            # Stands in for the command in help, completion and "did you mean".
            self.add_command(typer.core.TyperCommand(name, help=command.help, callback=None), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the stand-in that the name resolves to by the imported command."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            try:
                command = load_command(name)
            except (Exception, KeyboardInterrupt) as error:
                raise _Stop(error) from error
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C and a closed pipe get past Typer's own handling."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, OSError) as error:
            raise _Stop(error) from error


def load_command(name: str) -> Any:
    """Import a sub-command and make it a command object."""
    module_name, _, attribute = COMMANDS[name].target.partition(":")
    found = getattr(importlib.import_module(module_name), attribute)
    # In an application of its own, which leaves out the shell-completion options.
    holder = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
        group: Any = typer.main.get_command(holder)
        return group.commands[name]
    holder.command(name)(found)
    return typer.main.get_command(holder)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"specbench {__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, no_args_is_help=True)


@app.callback()
def specbench(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Run and compare speculative decoding policies inside vLLM."""


def main() -> None:
    """Entry point of the ``specbench`` script.

    Exit codes: 0 success, 1 unexpected failure, 2 wrong usage or input, 3 something the
    machine lacks, 4 engine failure, 130 interrupted, 141 output closed.
    """
    try:
        typer.main.get_command(app).main(prog_name="specbench")
    except SystemExit as stop:
        # With a short output the closed pipe shows only now.
        sys.exit(_flush_stdout() or stop.code)
    except _Stop as stop:
        sys.exit(report_failure(stop.cause))
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(report_failure(error))


def _flush_stdout() -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        return report_failure(error)
    return 0


if __name__ == "__main__":
    main()
