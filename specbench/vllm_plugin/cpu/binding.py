"""Launch arguments of a Triton kernel, bound by name to the CPU twin that stands in for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Twin = Callable[..., None]


def bound_by_name(kernel: Callable[..., Any], twin: Twin) -> Callable[..., None]:
    """A stand-in that is launched like the kernel and passes on what the twin names.

    The rest of a launch describes pointers (strides, block sizes) or the launch itself
    (``num_warps``) and means nothing where tensors are indexed. A parameter the launch leaves
    out has the kernel's default.

    Args:
        kernel: the Triton kernel, or the plain function it is where there is no Triton.

    Raises:
        TypeError: the twin names a parameter that the kernel does not have.
    """
    # Triton's JIT functions and vLLM's wrappers of them keep the function they were made from.
    function = getattr(kernel, "fn", None) or getattr(kernel, "func", None) or kernel
    signature = inspect.signature(function)
    order = tuple(signature.parameters)
    wanted = tuple(inspect.signature(twin).parameters)
    if unknown := [name for name in wanted if name not in signature.parameters]:
        raise TypeError(
            f"CPU twin {twin.__module__}.{twin.__name__} names parameters that kernel "
            f"{function.__module__}.{function.__name__} does not have: {', '.join(unknown)}"
        )
    defaults = {
        name: signature.parameters[name].default
        for name in wanted
        if signature.parameters[name].default is not inspect.Parameter.empty
    }

    def launch(*args: Any, **kwargs: Any) -> None:
        given = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
        twin(**{name: given[name] for name in wanted})

    # vLLM looks at names and signature to decide how it forwards a launch.
    launch.__name__, launch.__module__ = twin.__name__, twin.__module__
    launch.__signature__ = signature  # type: ignore[attr-defined]
    return launch
