"""What every test needs before anything is imported."""

import os

import hypothesis

# Spinning OpenMP threads of several test processes starve one another; see engine/__init__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A wall-clock limit for each example says more about the machine's other work than about the code.
hypothesis.settings.register_profile("baton", deadline=None)
hypothesis.settings.load_profile("baton")
