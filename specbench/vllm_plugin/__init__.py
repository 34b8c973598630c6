"""Everything that runs inside vLLM. :func:`register` is the ``vllm.general_plugins`` entry point.

vLLM calls it in the front end, in the engine process and in every worker. It imports
nothing heavy and leaves vLLM's behaviour on a GPU as it is.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

# Set by the engine's launcher. A terminal sends Ctrl-C to the whole process group; the
# engine must survive it until the bench has fetched what was measured.
OWN_GROUP_VARIABLE = "SPECBENCH_ENGINE_OWN_GROUP"

_registered = False


def register() -> None:
    """Make vLLM's V2 model runner usable on the CPU build; does nothing elsewhere."""
    global _registered
    if _registered:
        return
    _registered = True
    if os.environ.get(OWN_GROUP_VARIABLE) and multiprocessing.parent_process() is not None:
        os.setpgrp()
    if "vllm.v1.engine.core" in sys.modules:
        # Only the front end and the engine's own process have it; workers need not.
        from specbench.vllm_plugin.engine_core import add_engine_calls

        add_engine_calls()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from specbench.vllm_plugin.cpu.install import prepare_process

    prepare_process()
