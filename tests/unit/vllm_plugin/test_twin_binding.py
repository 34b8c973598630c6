"""A twin gets the launch arguments it names, and cannot name what its kernel does not have."""

from __future__ import annotations

import inspect

import pytest

from specbench.vllm_plugin.cpu.binding import bound_by_name
from specbench.vllm_plugin.cpu.install import collect_overrides


def scale_kernel(out_ptr, out_stride, in_ptr, factor, BLOCK: int, NUM_NEW: int = 1):
    raise AssertionError("the kernel itself must not run")


@pytest.fixture
def recorded():
    calls = []

    def twin(factor, out_ptr, NUM_NEW):
        calls.append((factor, out_ptr, NUM_NEW))

    return bound_by_name(scale_kernel, twin), calls


def test_a_launch_by_position_by_name_and_mixed_is_the_same(recorded):
    launch, calls = recorded
    launch("out", 8, "in", 2.5, 64, 3)
    launch(out_ptr="out", out_stride=8, in_ptr="in", factor=2.5, BLOCK=64, NUM_NEW=3)
    launch("out", 8, "in", 2.5, BLOCK=64, NUM_NEW=3)
    assert calls == [(2.5, "out", 3)] * 3


def test_what_a_launch_leaves_out_has_the_kernels_default(recorded):
    launch, calls = recorded
    launch("out", 8, "in", 2.5, BLOCK=64)
    assert calls == [(2.5, "out", 1)]


def test_options_of_the_launch_itself_do_not_reach_the_twin(recorded):
    launch, calls = recorded
    launch("out", 8, "in", 2.5, BLOCK=64, num_warps=4)
    assert calls == [(2.5, "out", 1)]


def test_the_launch_shows_the_kernels_signature(recorded):
    assert inspect.signature(recorded[0]) == inspect.signature(scale_kernel)


def test_a_parameter_that_the_kernel_lacks_fails_when_it_is_bound():
    def twin(out_ptr, exponent):
        pass

    with pytest.raises(TypeError, match=r"twin .*scale_kernel does not have: exponent"):
        bound_by_name(scale_kernel, twin)


def test_every_twin_names_only_what_its_kernel_has():
    pytest.importorskip("vllm", reason="holds the kernels, and is not installed")
    import vllm.v1.worker.cpu.shm  # noqa: F401  (must precede vllm.v1.worker.gpu)
    from vllm.triton_utils import dispatcher

    twins = collect_overrides()
    assert len(twins) > 30
    for name, twin in twins.items():
        host, attribute = dispatcher._resolve_kernel(name)
        kernel = getattr(host, attribute)
        assert inspect.signature(bound_by_name(kernel, twin)).parameters, name
