"""The simulators make millions of small objects that hold one another."""

import gc

import pytest


@pytest.fixture(scope="package", autouse=True)
def _what_is_loaded_is_not_collected() -> None:
    """Else each full collection goes through all modules that other tests have loaded, torch's among them: a tenth of what a seed costs."""
    gc.collect()
    gc.freeze()
