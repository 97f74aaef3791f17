"""What the command line has to know of a field of a frozen dataclass, beside its name, type and default.

    stage: Annotated[int | None, Flag("Insist on this stage.", shown=False, least=0)] = None

is the option `--stage`, its variable DILOCOX_<COMMAND>_STAGE, and the setting that the command reads. cli/command.py makes the
one out of the other; here is the mark alone, for rooms that know of no command line.
"""

from dataclasses import dataclass

from dilocox_peer.errors import ConfigError

MAX_THREADS = 1024  # more than any machine has cores; torch does not begin with any number


@dataclass(frozen=True, slots=True)
class Flag:
    """An option. name: where the field cannot be called like the option. shown: in place of the default, in the help; False:
    nothing. A value under `least` or over `most` is refused."""

    help: str | None = None
    name: str = ""
    shown: str | bool = True
    least: float | None = None
    most: float | None = None
    has_opposite: bool = False  # `--no-NAME` as well
    hidden: bool = False
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class Positional:
    """An argument that is told from others by its place. variable: of the environment, that says it where it is not typed."""

    help: str
    shown: str | bool = True
    metavar: str | None = None
    variable: str | None = None


def num_threads(what: str, *, shown: str | bool = True) -> Flag:
    """A number of torch's threads. what: they do."""
    return Flag(what, shown=shown, least=1, most=MAX_THREADS)


def check_base_bits(bits: int) -> None:
    """Raises ConfigError. Whether the run holds weights that may be held so is not known before its settings are."""
    if bits not in (0, 8, 4):
        raise ConfigError(f"--base-bits {bits}: 8 or 4; leave it out to hold the weights as they are")
