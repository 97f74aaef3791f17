"""What fails in a start-up names its step, and stays what it was."""

import pytest

from dilocox_peer.errors import ConfigError, DilocoxError
from dilocox_peer.peer.startup import StartUp, StartupStep


def test_what_fails_names_its_step_and_keeps_type_text_and_exit_code():
    startup = StartUp(StartupStep.NETWORK)
    startup.step = StartupStep.CLAIM
    with pytest.raises(ConfigError, match=r"^--stage 3: the run has two$") as caught, startup.named():
        raise ConfigError("--stage 3: the run has two")
    assert caught.value.line == "joining failed at claiming a stage: --stage 3: the run has two"
    assert caught.value.exit_code == 2


def test_an_error_elsewhere_has_no_step():
    assert DilocoxError("training failed").line == "training failed"


def test_a_fault_of_ours_keeps_its_traceback_and_gets_the_step_as_a_note():
    with pytest.raises(KeyError) as caught, StartUp(StartupStep.TRAINER).named():
        raise KeyError("x")
    assert caught.value.__notes__ == ["joining failed at starting the training"]
