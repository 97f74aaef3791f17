"""The steps of a peer's start-up: told as they pass, and what fails in one says which it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from dilocox_peer.errors import DilocoxError
from dilocox_peer.events import Listener
from dilocox_peer.events_of_reach import Starting


class StartupStep(StrEnum):
    """In their order; the words are for a volunteer."""

    MACHINE = "checking this machine"
    LOADING = "loading torch and hivemind"
    NETWORK = "reaching the run"
    DIRECTORY = "entering the directory"
    SETTINGS = "fetching the run's settings"
    ADMISSION = "asking to be let in"
    CLAIM = "claiming a stage"
    TEXT = "reading the training text"
    DEVICE = "opening the device"
    DISK = "reading the state on disk"
    RESTORE = "looking for the stage's state"
    TRAINER = "starting the training"
    LINKD = "starting linkd"
    ROUNDS = "entering the rounds"


SHORT = {
    StartupStep.DIRECTORY,
    StartupStep.ADMISSION,
    StartupStep.DEVICE,
    StartupStep.DISK,
    StartupStep.TRAINER,
    StartupStep.LINKD,
}


class StartUp:
    """Where a start-up stands."""

    def __init__(self, step: StartupStep, listener: Listener = lambda event: None) -> None:
        self._listener = listener
        self.step = step

    @property
    def step(self) -> StartupStep:
        return self._step

    @step.setter
    def step(self, step: StartupStep) -> None:
        self._step = step
        self._listener(Starting(step.value, step in SHORT))

    @contextmanager
    def named(self) -> Iterator[None]:
        """What is raised within says which step it ended: its type, text and exit code stay as they are."""
        try:
            yield
        except DilocoxError as error:
            error.during = f"joining failed at {self.step}"
            raise
        except Exception as error:  # a fault of ours: its traceback is shown, with this line below
            error.add_note(f"joining failed at {self.step}")
            raise
