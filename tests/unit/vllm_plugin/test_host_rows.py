"""What the host sees of rows that live on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specbench.vllm_plugin.host_rows import HostRows

FILL = torch.tensor([0.5, 0.25])
SLOTS = np.array([0, 2])


def rows(staleness: int) -> HostRows:
    return HostRows(FILL, 3, torch.device("cpu"), staleness)


def published(value: float) -> torch.Tensor:
    return torch.full((3, 2), value)


def first_column(found: np.ndarray) -> list[float]:
    assert found.dtype == np.float64
    assert found.shape == (2, 2)
    return found[:, 0].tolist()


@pytest.mark.parametrize("staleness", [0, 1])
def test_before_anything_is_published_every_row_is_a_new_requests(staleness):
    np.testing.assert_allclose(rows(staleness).read(SLOTS), [[0.5, 0.25]] * 2)


def test_without_staleness_the_last_rows_are_read():
    host = rows(0)
    host.publish(published(0.1))
    host.publish(published(0.2))
    assert first_column(host.read(SLOTS)) == pytest.approx([0.2, 0.2])


def test_with_staleness_the_rows_before_are_read():
    host = rows(1)
    host.publish(published(0.1))
    assert first_column(host.read(SLOTS)) == [0.5, 0.5]
    host.publish(published(0.2))
    assert first_column(host.read(SLOTS)) == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_new_request_is_never_given_the_last_ones_rows(staleness):
    host = rows(staleness)
    for value in (0.1, 0.2):
        host.publish(published(value))
    host.forget(2)
    # Copies that were on their way are the last request's; those published since are not.
    for value in (0.3, 0.4)[:staleness]:
        assert first_column(host.read(SLOTS))[1] == 0.5
        host.publish(published(value))
    assert first_column(host.read(SLOTS))[1] == 0.5
    host.publish(published(0.6))
    assert first_column(host.read(SLOTS)) != [0.5, 0.5]
    assert first_column(host.read(SLOTS))[1] != 0.5


def test_what_was_published_may_be_overwritten_afterwards():
    host = rows(0)
    source = published(0.1)
    host.publish(source)
    source.fill_(0.9)
    assert first_column(host.read(SLOTS)) == pytest.approx([0.1, 0.1])
