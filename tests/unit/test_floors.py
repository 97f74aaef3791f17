"""The architecture, enforced: imports go down only, and the heavy libraries have one door each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "dilocox_peer"
ROOMS = {"state": 4, "links": 4, "training": 3, "rounds": 2, "planning": 1}  # the folders of peer
TOP = 5  # its own modules
FLOOR = {
    "cli": 5,
    "web": 4,
    "peer": 3,
    "store": 2,
    "pipeline": 1,
    "model": 1,
    "data": 1,
    "compression": 1,
    "dht": 1,
    "network": 1,
}  # everything at the top level, and wire: 0
WIRE = {"types", "errors", "scan", "signing", "wire"}  # what wire, the lowest room, imports of us


def _modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def _package(name: str) -> str | None:
    """The floor that a dotted module of ours stands on: '' for the ground floor, None for others' modules."""
    parts = name.split(".")
    if parts[0] != "dilocox_peer":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else ""


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path: Path):
    parts = path.relative_to(ROOT).parts
    here = parts[0] if parts[0] in FLOOR else "cli" if path.name == "__main__.py" else ""
    for name in _imports(path):
        there = _package(name)
        if there is None or there in {here, ""}:
            continue
        assert here, f"{path.name} is on the ground floor and imports {name}"
        assert FLOOR[there] < FLOOR[here], f"{path.name} imports {name}, which is not below it"


def test_wire_stands_below_all_other_rooms():
    for path in (ROOT / "wire").glob("*.py"):
        ours = {name.split(".")[1] for name in _imports(path) if name.startswith("dilocox_peer.")}
        assert ours <= WIRE, f"{path.name} imports {ours - WIRE}"


@pytest.mark.parametrize("path", [path for path in _modules() if path.relative_to(ROOT).parts[0] == "peer"], ids=str)
def test_the_folders_of_a_peer_import_downwards_too(path: Path):
    room = path.relative_to(ROOT / "peer").parts[0]
    for name in _imports(path):
        if name.startswith("dilocox_peer.peer."):
            there = name.split(".")[2]
            assert ROOMS.get(there, TOP) <= ROOMS.get(room, TOP), f"{path.name} imports {name}, which is not below it"


@pytest.mark.parametrize(
    ("library", "doors"),
    [
        ("hivemind", {"dht/directory.py", "network/daemon.py", "network/hivemind_parts.py"}),
        ("libp2p", {"network/link_host.py", "network/whisper.py"}),
    ],
)
def test_heavy_libraries_have_their_doors_only(library: str, doors: set[str]):
    importers = {
        str(path.relative_to(ROOT))
        for path in _modules()
        if any(name == library or name.startswith(library + ".") for name in _imports(path))
    }
    assert importers <= doors


def test_the_pipeline_is_a_protocol_and_nothing_else():
    """Neither parameters nor sockets, threads or event loops: the simulator runs it whole."""
    for path in (ROOT / "pipeline").glob("*.py"):
        libraries = {name.partition(".")[0] for name in _imports(path)}
        assert not libraries & {"asyncio", "numpy", "socket", "threading", "torch", "trio"}, path.name


def test_nothing_unpickles():
    for path in _modules():
        names = _imports(path)
        assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & names, path
        assert "torch.load" not in path.read_text(), path


def run_alone(script: str) -> None:
    """In a process that has loaded nothing else."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_loads_neither_torch_nor_hivemind():
    script = (
        "import sys\n"
        "from dilocox_peer.cli.main import main\n"
        "sys.argv = ['dilocox-peer', 'join', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'hivemind', 'numpy', 'libp2p', 'trio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run_alone(script)


def test_of_hivemind_its_network_alone_is_loaded():
    """Its averaging and optimizers bring scipy: more than half a second of processor and 50 MB in each process."""
    script = (
        "import sys\n"
        "from dilocox_peer.network.hivemind_parts import load_hivemind\n"
        "load_hivemind()\n"
        "from hivemind.dht import DHTNode\n"
        "from hivemind.p2p import P2P\n"
        "unused = {'scipy', 'hivemind.averaging', 'hivemind.moe', 'hivemind.optim'} & set(sys.modules)\n"
        "assert not unused, unused\n"
    )
    run_alone(script)


@pytest.mark.parametrize(
    ("arguments", "done", "code"),
    [
        (("init", "new.toml", "--home", "."), "next:", 0),
        (("init", "new.toml", "--stages", "2", "--slices", "--home", "."), "next:", 0),
        (("sign", "run.toml", "--home", "."), "signed with", 0),
        (("plan", "run.toml", "--peers", "4", "--up", "20", "--tokens-per-s", "1000"), "for 4 equal peers", 0),
        (("status", "--home", "."), "no peer is running", 3),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_what_only_reckons_loads_no_torch(tmp_path: Path, arguments: tuple[str, ...], done: str, code: int):
    script = (
        "import sys\n"
        "from dilocox_peer.__main__ import main\n"
        "code = 0\n"
        "for command in (['init', 'run.toml', '--home', '.'], sys.argv[1:]):\n"
        "    sys.argv = ['dilocox-peer', *command]\n"
        "    try: main()\n"
        "    except SystemExit as end: code = end.code or 0\n"
        "print('ended with', code)\n"
        "heavy = {'torch', 'hivemind', 'transformers', 'libp2p', 'trio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    assert done in ran.stdout + ran.stderr
    assert ran.stdout.endswith(f"ended with {code}\n"), "of the second command"
