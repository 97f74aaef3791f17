"""The files in deploy/ keep the rules that they state, and call commands and flags that exist.

Nothing is started here; `systemd-analyze` reads the units where it is installed.
"""

import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dilocox_peer.cli.main import app
from dilocox_peer.errors import ConfigError, RunRefused, RunUnreachable
from dilocox_peer.peer.control import ANSWER_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PROGRAM = "/opt/dilocox-peer/bin/dilocox-peer"
GUIDE = ROOT / "docs" / "deployment.md"


def directives(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def options_of(command: str) -> dict[str, object]:
    """flag -> parameter of a subcommand."""
    root: Any = typer.main.get_command(app)
    parameters = root.commands[command].params
    return {flag: parameter for parameter in parameters for flag in parameter.opts if flag.startswith("--")}


def assert_runs(arguments: list[str]) -> None:
    """The subcommand exists and has these flags."""
    command, *rest = arguments
    flags = {each.partition("=")[0] for each in rest if each.startswith("--")}
    assert flags <= options_of(command).keys(), (command, flags - options_of(command).keys())


def assert_is_variable(name: str) -> None:
    """DILOCOX_<COMMAND>_<FLAG> of a flag that exists, or DILOCOX_LINK."""
    if name == "DILOCOX_LINK":
        return
    command, _, flag = name.removeprefix("DILOCOX_").lower().partition("_")
    assert f"--{flag.replace('_', '-')}" in options_of(command), name


# -- systemd


def test_there_is_a_unit_for_each_role():
    assert [path.name for path in UNITS] == ["dilocox-bootstrap.service", "dilocox-peer@.service"]


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_calls_what_exists(path):
    (line,) = directives(path)["ExecStart"]
    program, *arguments = shlex.split(line)
    assert program == PROGRAM
    assert_runs(arguments)
    for name in re.findall(r"DILOCOX_[A-Z]+_[A-Z_]+", path.read_text()):
        assert_is_variable(name)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_gives_away_what_it_does_not_need(path):
    found = directives(path)
    yes = (
        "DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectClock",
        "ProtectControlGroups", "ProtectKernelModules", "ProtectKernelTunables", "ProtectKernelLogs",
        "LockPersonality", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    )  # fmt: skip
    assert all(found[name] == ["yes"] for name in yes)
    assert found["CapabilityBoundingSet"] == [""]
    assert found["ProtectSystem"] == ["strict"]
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert found["UMask"] == ["0077"]
    assert "ProcSubset" not in found, "doctor and torch read /proc/meminfo"
    assert "MemoryDenyWriteExecute" not in found, "torch could not write its kernels"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_writes_only_where_it_may_and_ends_in_order(path):
    found = directives(path)
    (line,) = found["ExecStart"]
    arguments = shlex.split(line)
    assert arguments[arguments.index("--home") + 1] == f"%S/{found['StateDirectory'][0]}"
    assert found["KillMode"] == ["mixed"], "SIGTERM to all would kill p2pd before the goodbye"
    assert int(found["TimeoutStopSec"][0]) >= 10
    assert found["Restart"] == ["on-failure"]
    never = {int(code) for code in found["RestartPreventExitStatus"][0].split()}
    assert never == {ConfigError.exit_code, RunRefused.exit_code}
    assert RunUnreachable.exit_code not in never


def installed_units(folder: Path) -> list[Path]:
    """The units as systemd would find them, with a program that is on this machine; the template as an instance."""
    program = Path(sys.executable).with_name("dilocox-peer")
    paths = []
    for unit in UNITS:
        path = folder / unit.name.replace("@.", "@a.")
        path.write_text(unit.read_text().replace(PROGRAM, str(program)))
        paths.append(path)
    return paths


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_reads_the_units_without_complaint(tmp_path):
    for path in installed_units(tmp_path):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True, timeout=60
        )
        complaints = [line for line in done.stderr.splitlines() if path.name in line]
        assert done.returncode == 0, done.stderr
        assert not complaints, complaints


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_the_units_hardened(tmp_path):
    for path in installed_units(tmp_path):
        done = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", "--threshold=25", path],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if "--offline" in done.stderr:
            pytest.skip("this systemd-analyze judges running units only")
        assert done.returncode == 0, done.stdout[-300:] + done.stderr


def link_of(arguments: list[str]) -> object:
    """What `join` takes for its link of these arguments, with DILOCOX_LINK set to a link."""
    root: Any = typer.main.get_command(app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DILOCOX_LINK", "dilocox://x")
        return root.commands["join"].make_context("join", arguments).params["link"]


def test_an_invitation_is_in_no_argument_of_a_unit():
    """`ps` shows those to everybody; the environment is for the user that it runs as."""
    (line,) = directives(DEPLOY / "systemd" / "dilocox-peer@.service")["ExecStart"]
    assert "DILOCOX_LINK" not in line
    assert link_of(shlex.split(line)[2:]) == "dilocox://x"
    assert "EnvironmentFile" in directives(DEPLOY / "systemd" / "dilocox-peer@.service")
    command, *arguments = services()["peer"]["command"]
    assert command == "join"
    assert link_of(arguments) == "dilocox://x"
    assert services()["peer"]["environment"]["DILOCOX_LINK"] == "${DILOCOX_LINK:-}"


def test_the_guide_writes_invitations_into_files_of_root_alone(tmp_path):
    [line] = re.findall(r"^echo .*DILOCOX_LINK=.*$", GUIDE.read_text(), flags=re.MULTILINE)
    path = tmp_path / "a.env"
    subprocess.run(
        ["sh", "-c", f"umask 022; {line.replace('/etc/dilocox-peer/a.env', str(path))}"], check=True, timeout=60
    )
    assert path.read_text() == "DILOCOX_LINK=dilocox://...\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# -- Docker


def docker_stages() -> list[list[tuple[str, str]]]:
    """(instruction, rest) of each stage, first to last."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = []
    for line in filter(str.strip, text.splitlines()):
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            stages.append([])
        if stages:
            stages[-1].append((instruction, rest.strip()))
    return stages


def test_the_compiler_stays_in_the_build_stage():
    build, final = docker_stages()
    built, shipped = (" ".join(rest for _, rest in stage) for stage in (build, final))
    for package in ("gcc", "libgmp-dev"):
        assert package in built
        assert package not in shipped
    assert "libgmp10" in shipped, "fastecdsa is linked with it"
    assert ("COPY", "--from=build /opt/dilocox-peer /opt/dilocox-peer") in final


def test_the_image_runs_as_nobody_in_particular():
    final = docker_stages()[-1]
    users = [rest for instruction, rest in final if instruction == "USER"]
    assert users == ["10001:10001"]
    names = [instruction for instruction, _ in final]
    assert "RUN" not in names[names.index("USER") :]
    assert ("ENTRYPOINT", '["dilocox-peer"]') in final, "not through a shell, which would keep SIGTERM to itself"
    assert ("VOLUME", "/data") in final


def test_the_image_is_built_from_what_is_named():
    for stage in docker_stages():
        for instruction, rest in stage:
            assert instruction != "ADD"
            if instruction == "RUN" and "apt-get install" in rest:
                assert "--no-install-recommends" in rest
                assert "rm -rf /var/lib/apt/lists/*" in rest
            if instruction == "COPY" and "--from" not in rest:
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists(), source
                    assert f"!{source}" in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_images_steps_make_a_peer_that_starts(tmp_path):
    """The build stage's COPY and RUN in a scratch root, but for apt's (this machine has a compiler), then the command that
    the image would run, in an empty environment."""
    source, prefix = tmp_path / "src", tmp_path / "opt" / "dilocox-peer"
    source.mkdir()
    prefix.parent.mkdir()
    for instruction, rest in docker_stages()[0]:
        if instruction == "COPY":
            *names, target = rest.split()
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, source / target)
        elif instruction == "RUN" and "apt-get" not in rest:
            command = rest.replace("/opt/dilocox-peer", str(prefix)).replace(
                "python -m venv", f"{sys.executable} -m venv"
            )
            subprocess.run(["sh", "-c", command], cwd=source, check=True, capture_output=True, timeout=800)
    installed = list((prefix / "lib").glob("python*/site-packages/dilocox_peer/cli/main.py"))
    assert len(installed) == 1, "a copy, not a link to the sources"
    shutil.rmtree(source)
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    environment = {"PATH": f"{prefix / 'bin'}:/usr/bin:/bin", "XDG_DATA_HOME": str(data)}
    run_file = data / "run.toml"
    for arguments in (["--help"], ["init", str(run_file)], ["sign", str(run_file)], ["bootstrap", "--help"]):
        done = subprocess.run(
            [str(prefix / "bin" / "dilocox-peer"), *arguments],
            env=environment, cwd=data, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (data / "dilocox-peer" / "owner.key").exists()


def services() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", ["bootstrap", "peer"])
def test_a_service_gives_away_what_it_does_not_need(name):
    service = services()[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "10001:10001"
    assert service["init"] is True
    assert "privileged" not in service
    assert "network_mode" not in service
    assert int(service["stop_grace_period"].removesuffix("s")) >= 10
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


@pytest.mark.parametrize("name", ["bootstrap", "peer"])
def test_a_service_calls_what_exists(name):
    service = services()[name]
    assert_runs([str(argument) for argument in service["command"]])
    for variable in service["environment"]:
        assert_is_variable(variable)


def test_the_bootstraps_container_asks_for_its_health():
    check = services()["bootstrap"]["healthcheck"]
    program, *arguments = check["test"][1:]
    assert (check["test"][0], program, arguments) == ("CMD", "dilocox-peer", ["bootstrap", "--health"])
    assert_runs(arguments)
    assert float(check["timeout"].removesuffix("s")) > ANSWER_S, "or a bootstrap that hangs would be told as a timeout"


def test_an_empty_variable_counts_as_not_given(monkeypatch):
    """compose.yaml sets the variables of flags that nobody gave to nothing."""
    for name in ("DILOCOX_JOIN_THREADS", "DILOCOX_JOIN_DEVICE", "DILOCOX_BOOTSTRAP_ANNOUNCE_MADDRS"):
        monkeypatch.setenv(name, "")
    root: Any = typer.main.get_command(app)
    for command, arguments in (("join", ["dilocox://x"]), ("bootstrap", ["run.toml"])):
        sub = root.commands[command]
        context = sub.make_context(command, arguments, auto_envvar_prefix=f"DILOCOX_{command.upper()}")
        assert context.params.get("threads", 1) == 1
        assert context.params.get("device", "cpu") in ("cpu", "auto")
        assert not context.params["announce_maddrs"]


# -- the guide


def test_the_guides_commands_exist():
    lines = re.findall(r"^(?:/\S+/)?dilocox-peer (.+?)(?:\s+#.*)?$", GUIDE.read_text(), flags=re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        assert_runs(shlex.split(line))
    for name in re.findall(r"DILOCOX_(?:JOIN|BOOTSTRAP)_[A-Z_]+", GUIDE.read_text()):
        assert_is_variable(name)
    for path in re.findall(r"deploy/[\w./@-]+\w", GUIDE.read_text()):
        assert (ROOT / path).exists(), path
