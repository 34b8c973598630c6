"""Engine settings of the V2 runner that need a kernel without a CPU twin: refused by name.

Every sampling parameter has a twin.
"""

from __future__ import annotations

# Path in VllmConfig -> why an engine with a true value there is refused.
REFUSED_CONFIG: dict[str, str] = {
    "watermark_config": (
        "watermarked sampling has no CPU twin; start the engine without a watermark configuration"
    ),
    "parallel_config.enable_batch_sharded_sampling": (
        "batch-sharded sampling has no CPU twin; leave enable_batch_sharded_sampling off"
    ),
}
