"""The errors a user can cause or meet, each with its exit code and a message saying what to do."""

from __future__ import annotations


class SpecbenchError(Exception):
    """Base of every expected failure: one line for the user, no traceback.

    Attributes:
        exit_code: process exit code of the command that meets it.
    """

    exit_code = 1


class UsageError(SpecbenchError):
    """The command was asked for something that does not exist or does not fit."""

    exit_code = 2


class InputError(SpecbenchError):
    """A file or value given by the user cannot be used; the message names file and line."""

    exit_code = 2


class EnvironmentProblem(SpecbenchError):
    """Something the machine must provide is missing: a package, disk space, a supported version."""

    exit_code = 3


class EngineFailure(SpecbenchError):
    """The engine did not start, died or hung; the message names its log file."""

    exit_code = 4


class Interrupted(SpecbenchError):
    """The user stopped the run; what was measured so far has been kept."""

    exit_code = 130
