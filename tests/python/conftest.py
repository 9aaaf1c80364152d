"""Before anything imports JAX: its CPU backend has as many devices as it is told when it starts."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# On GPUs: memory is left for others, and virtual ranks of one GPU have a queue each.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
