"""Settings for every test; read before torch is imported."""

import os

# Torch's OpenMP threads spin while they wait and, where another process is busy, slow tiny models a hundredfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# No test may reach a model hub by accident.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
