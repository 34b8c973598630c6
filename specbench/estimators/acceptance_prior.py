"""What is expected of a drafter's blocks before anything is known of a request."""

from __future__ import annotations

from dataclasses import dataclass

from specbench.errors import InputError


@dataclass(frozen=True)
class AcceptancePrior:
    """What is expected of a request's blocks, and how fast its own record overrules it.

    Attributes:
        conditional: [num_positions] mean acceptance given that the positions before held.
        weight: observations that the prior counts as.
        decay: factor on a request's counts for every step in which it emits.
        resolution: share of what the prediction leaves open that the drafter's confidences
            explain, 0 to 1; see ``recent_acceptance.resolution``.
    """

    conditional: tuple[float, ...]
    weight: float
    decay: float
    resolution: float


def validate_prior(prior: AcceptancePrior, source: str) -> None:
    """Raise InputError, naming ``source``, for values no fit can give."""
    if not prior.conditional:
        raise InputError(f"{source}: no acceptance for any position")
    shares = {f"conditional[{j}]": value for j, value in enumerate(prior.conditional)}
    shares |= {"decay": prior.decay, "resolution": prior.resolution}
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise InputError(f"{source}, {name}: {value} is not within 0 to 1")
    if not 0 < prior.weight < float("inf"):
        raise InputError(f"{source}, weight: {prior.weight} is not above 0 and finite")
