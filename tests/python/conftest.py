"""Before anything imports JAX: its CPU backend has as many devices as it is told when it starts."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
