"""`service install LINK`: a peer that starts with its user's session and again after a crash, without root: a unit of systemd's user manager, a launchd
agent on macOS. What stands in the file is made here, purely; system-wide units are in deploy/."""

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from dilocox_peer.cli.flags import ServiceFlags
from dilocox_peer.cli.home import chosen_home, config_home, config_variables
from dilocox_peer.errors import ConfigError
from dilocox_peer.files import replace_file
from dilocox_peer.invitation import parse_invitation
from dilocox_peer.paths import expanded

LABEL = "org.dilocox.peer"
ASK_S = 20.0
RESTART_S = 15


def run_service(flags: ServiceFlags) -> None:
    """Raises ConfigError."""
    is_mac = sys.platform == "darwin"
    name = flags.peer_home.folder.name
    path = agent_path(name) if is_mac else unit_path(name)
    match flags.what:
        case "install":
            _install(flags, path, is_mac=is_mac)
        case "uninstall":
            if not path.exists():
                raise ConfigError(f"{path} does not exist: no service of {name!r} is installed")
            reason = _tell(commands := stop_commands(path, name, is_mac=is_mac))
            path.unlink()
            typer.echo(f"{path} is removed; key and state stay")
            if reason:
                typer.echo(
                    f"note: it may still run, as it could not be stopped ({reason}): {' && '.join(' '.join(each) for each in commands)}, or "
                    f"`dilocox-peer leave{_peer_flags(flags)}`",
                    err=True,
                )
        case "show":
            if not path.exists():
                raise ConfigError(f"{path} does not exist: `dilocox-peer service install LINK` writes it")
            typer.echo(f"# {path}\n{path.read_text()}")
        case _:
            raise ConfigError(f"service {flags.what}: use install, uninstall or show")


def _install(flags: ServiceFlags, path: Path, *, is_mac: bool) -> None:
    name = flags.peer_home.folder.name
    if flags.link is None:
        raise ConfigError("service install: give the link that the peer joins")
    link = parse_invitation(flags.link).link  # not as it was typed: one that a mail has wrapped is two lines
    arguments = [*program(), "join", "--name", name, "--plain", "--no-detach"]
    # Its manager's environment is not this shell's.
    if (home := chosen_home(flags.home)) is not None:
        arguments += ["--home", str(home)]
    # The link, which may be an invitation, not among the arguments: whoever uses the machine sees those.
    variables = {"DILOCOX_LINK": link, **config_variables()}
    content = plist(name, arguments, variables) if is_mac else unit(name, arguments, variables).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [content], mode=0o600)  # an invitation is in it
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    typer.echo(f"{path} is written; flags stand in config.toml, which `join` reads (docs/deployment.md)")
    commands = start_commands(path, name, is_mac=is_mac)
    if not flags.start:
        typer.echo("start it with: " + " && ".join(" ".join(each) for each in commands))
        return
    if reason := _tell(commands):
        raise ConfigError(
            f"it is written, and not started ({reason}): {' && '.join(' '.join(each) for each in commands)}"
        )
    typer.echo(f"started; `dilocox-peer status{_peer_flags(flags)}` says how it does")
    if not is_mac:
        typer.echo("`loginctl enable-linger` has it go on when you log out")


def _peer_flags(flags: ServiceFlags) -> str:
    """What a command to the peer has to say, from whichever shell."""
    home = chosen_home(flags.home)
    return flags.peer_home.name_flag + ("" if home is None else f" --home {shlex.quote(str(home))}")


def _tell(commands: Sequence[Sequence[str]]) -> str:
    """Runs them in turn; why one of them failed, empty if none did."""
    for command in commands:
        if shutil.which(command[0]) is None:
            return f"{command[0]} is not here"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
        except subprocess.TimeoutExpired:
            return f"{command[0]} does not answer"
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            return f"{command[0]} says: {said[0][:200] if said else f'exit code {done.returncode}'}"
    return ""


# ---- pure ---------------------------------------------------------------------------------------------------------------


def start_commands(path: Path, name: str, *, is_mac: bool) -> list[list[str]]:
    if is_mac:
        return [["launchctl", "bootstrap", f"gui/{os.getuid()}", str(path)]]
    systemctl = ["systemctl", "--user"]
    # restart: of one that runs with another link, enable --now changes nothing.
    return [[*systemctl, "daemon-reload"], [*systemctl, "enable", path.name], [*systemctl, "restart", path.name]]


def stop_commands(path: Path, name: str, *, is_mac: bool) -> list[list[str]]:
    if is_mac:
        return [["launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}.{name}"]]
    return [["systemctl", "--user", "disable", "--now", path.name]]


def unit_path(name: str) -> Path:
    return config_home() / "systemd" / "user" / f"dilocox-peer-{name}.service"


def agent_path(name: str) -> Path:
    return expanded("~/Library/LaunchAgents") / f"{LABEL}.{name}.plist"


def program() -> list[str]:
    """How this program is started, by absolute paths."""
    typed = shutil.which(sys.argv[0]) if sys.argv else None
    if typed is not None and Path(typed).name == "dilocox-peer":
        return [str(Path(typed).absolute())]
    return [sys.executable, "-m", "dilocox_peer"]


def unit(name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Of systemd's user manager; each argument and variable quoted as it reads them. Raises ConfigError."""
    environment = "".join(f"Environment={_in_quotes(f'{key}={value}')}\n" for key, value in variables.items())
    return f"""# Written by `dilocox-peer service install`; `dilocox-peer service uninstall` takes it away.
[Unit]
Description=dilocox-peer {name}
# Never gives up: a machine may be without network for a day.
StartLimitIntervalSec=0

[Service]
Type=exec
{environment}ExecStart={" ".join(map(quoted, arguments))}
Restart=on-failure
RestartSec={RESTART_S}
# 2: wrong settings, 4: refused by the run. Trying again would not help, as it does where something is lacking for now (1, 3, 5).
RestartPreventExitStatus=2 4
# SIGTERM to the main process alone, which ends its helpers in order; what is left after that is killed.
KillMode=mixed
TimeoutStopSec=20
# Whoever uses the machine goes first.
Nice=10
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def quoted(argument: str) -> str:
    """As systemd reads a word of ExecStart: in double quotes, with what it would replace doubled. Raises ConfigError."""
    return _in_quotes(argument).replace("$", "$$")


def _in_quotes(word: str) -> str:
    """As it reads one of Environment, where $ stands for itself."""
    plain = writable(word).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{plain}"'


def writable(argument: str) -> str:
    """It, if a file of lines can hold it: raises ConfigError for a line's end or another control character, and for what is no text."""
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in argument):
        raise ConfigError(f"service install: {argument!a} has a character in it that no service's file can hold")
    return argument


def plist(name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> bytes:
    """Of launchd: starts at login, and again when it did not end well. Exit codes cannot be told apart there. Raises ConfigError."""
    return plistlib.dumps(
        {
            "Label": f"{LABEL}.{name}",
            "ProgramArguments": list(map(writable, arguments)),
            "EnvironmentVariables": {key: writable(value) for key, value in variables.items()},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ProcessType": "Background",
            "Umask": 0o077,
        }
    )
