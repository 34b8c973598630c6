"""What the V2 runner can do on a GPU but not here: no twin exists, so it is refused by name.

Every sampling parameter has a twin. Two engine settings have none.
"""

from __future__ import annotations

# SamplingParams attribute -> why a request that sets it is refused.
REFUSED_SAMPLING: dict[str, str] = {}

# Path in VllmConfig -> why an engine with a true value there is refused.
REFUSED_CONFIG: dict[str, str] = {
    "watermark_config": (
        "watermarked sampling has no CPU twin; start the engine without a watermark configuration"
    ),
    "parallel_config.enable_batch_sharded_sampling": (
        "batch-sharded sampling has no CPU twin; leave enable_batch_sharded_sampling off"
    ),
}
