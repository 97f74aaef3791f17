"""Settings of all tests: the same examples on every run, no example fails for being slow on a busy machine, and no torch takes all cores."""

import os

from hypothesis import HealthCheck, settings

# Before torch is loaded, here and in the processes that tests start. Several tests run at once, each with a thread for every core torch
# would wait at every small product for threads that are not running: that is most of the time it then takes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")
