"""What every test needs before anything is imported."""

import os

# Spinning OpenMP threads of several test processes starve one another; see engine/__init__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
