"""The machine: model, paged KV, batches, sampling. Knows no Ray, no gRPC, no HTTP, no text."""

import os

# OpenMP reads this when torch is loaded. Waiting threads must sleep, not spin: a spinning one takes the core
# that a descheduled peer needs to reach the barrier, and two processes on two cores then run twenty times
# slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
