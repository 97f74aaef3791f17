"""Settings of all tests: the same examples on every run, and no example fails for being slow on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "project", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")
