"""Where this peer computes: the device that its volunteer named, or the best one that torch finds here."""

from pathlib import Path

import torch

from dilocox_peer.errors import ConfigError, LackedForNow
from dilocox_peer.peer.settings import cards, check_device

AUTO = "auto"


def chosen_devices(wanted: str, precision: str = "float32", *, stages: int = 1) -> tuple[str, ...]:
    """`chosen_device` of each where several are named, with commas between. stages: of the run. Raises ConfigError as well for one
    named twice, and for several at a stage of several; LackedForNow."""
    named = tuple(each.strip() for each in wanted.split(","))
    if len(named) > 1 and stages > 1:
        raise ConfigError(
            f"--device {wanted}: a stage computes on one device: join once for each, with --name and --device"
        )
    if twice := {each for each in named if named.count(each) > 1 and each != "cpu"}:
        raise ConfigError(f"--device {wanted} names {min(twice)} twice: name each device once")
    return tuple(chosen_device(each, precision) for each in named)


def chosen_cards(gpus: str) -> str:
    """The same of cards that are here. Raises ConfigError, LackedForNow."""
    device = cards(gpus)
    try:
        chosen_devices(device)
    except (ConfigError, LackedForNow) as error:
        raise type(error)(f"--gpus {gpus}: {str(error).removeprefix('--device ')}") from None
    return device


def chosen_device(wanted: str, precision: str = "float32") -> str:
    """The device for `--device`; auto: cuda, xpu, mps or cpu, the first there is. Raises ConfigError when torch cannot
    compute there, in this precision; LackedForNow where it may later."""
    check_device(wanted)
    device = _usable(wanted)
    if precision == "float32":
        return device
    try:
        half = torch.ones(2, 2, device=device, dtype=getattr(torch, precision))
        (half @ half).sum().item()
        is_emulated = precision == "bfloat16" and device.startswith("cuda")
        is_known = not is_emulated or torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, TypeError):
        is_known = False
    if not is_known:
        raise ConfigError(f"--precision {precision}: {device} does not compute in it: use --precision float32")
    return device


def why_not_compiled(device: str) -> str:
    """What is wrong with torch.compile here, tried on something small; empty where it works. What it fails at later then runs as it is.
    Blocking, for seconds. Raises ConfigError as chosen_device."""
    where = chosen_device(first_of(device))
    try:
        doubled = torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=where))
        assert float(doubled.sum()) == 24.0, "it computes something else"
    except Exception as error:  # of whichever compiler there is, or is not
        return " ".join(str(error).split())[:200]
    from torch import _dynamo

    _dynamo.config.suppress_errors = True
    return ""


def first_of(wanted: str) -> str:
    """Of several devices the one that holds what there is once."""
    return wanted.partition(",")[0].strip()


def _usable(wanted: str) -> str:
    if wanted == AUTO:
        return _best()
    try:
        torch.zeros(1, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        kind = LackedForNow if _may_come(wanted, error) else ConfigError
        raise kind(f"--device {wanted} cannot be used here ({reason}): use --device cpu") from None
    return wanted


def _may_come(wanted: str, error: Exception) -> bool:
    """Whether what failed there may pass by itself: others have all of the card, or its driver is not loaded yet."""
    if isinstance(error, torch.OutOfMemoryError) or "busy" in str(error):
        return True
    is_unseen = bool(torch.version.cuda or torch.version.hip) and not torch.cuda.device_count()
    return wanted.startswith("cuda") and is_unseen and has_card()


def has_card(root: Path = Path("/")) -> bool:
    """Whether the machine has a display or compute card that torch calls cuda, whatever drives it (Linux)."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if maker in ("0x10de", "0x1002") and kind.startswith(("0x03", "0x12")):
            return True
    return False


def is_in_machine_memory(device: str) -> bool:
    """Whether what is computed there lies in the machine's own memory: cpu, and mps, which shares it."""
    return not device.startswith(("cuda", "xpu"))


def free_on(device: str) -> int:
    """Bytes free in the memory of an accelerator."""
    module = torch.xpu if device.startswith("xpu") else torch.cuda
    return int(module.mem_get_info(torch.device(device))[0])


def whole_of(device: str) -> int:
    """All bytes of it, whoever has them."""
    module = torch.xpu if device.startswith("xpu") else torch.cuda
    return int(module.mem_get_info(torch.device(device))[1])


def taken_on(device: str) -> int:
    """Bytes of an accelerator's memory that this process has for its tensors, free ones among them."""
    module = torch.xpu if device.startswith("xpu") else torch.cuda
    return int(module.memory_reserved(torch.device(device)))


def name_of(device: str) -> str:
    """What the maker calls an accelerator, as far as torch knows."""
    kind = torch.device(device).type
    return str(getattr(torch, kind).get_device_name(device)) if kind in ("cuda", "xpu") else kind


def _best() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"
