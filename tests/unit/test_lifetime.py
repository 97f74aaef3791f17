"""Ctrl-C before the event loop is there to hear it."""

import signal

import pytest

from dilocox_peer.cli.lifetime import interruptible


def load(made_of_an_interrupt: Exception | None) -> None:
    """An import in which Ctrl-C is pressed, and which does something else about it."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        if made_of_an_interrupt is not None:
            raise made_of_an_interrupt from None


@pytest.fixture(autouse=True)
def heeds_ctrl_c():
    """A background job of a shell begins without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("made_of_it", [RecursionError(), None], ids=["another error", "nothing"])
def test_an_interrupt_that_an_import_garbles_is_an_interrupt(made_of_it):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible():
        load(made_of_it)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_import_that_fails_by_itself_is_told_as_it_is():
    with pytest.raises(ImportError, match="torch"), interruptible():
        raise ImportError("torch")
