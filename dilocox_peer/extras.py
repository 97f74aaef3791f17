"""What `pyproject.toml` names as optional, and how it is installed. By its own name: `dilocox-peer` itself is in no public index, and whoever registers it
there would be what `pip install 'dilocox-peer[data]'` brings."""

from collections.abc import Mapping

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "models": ("transformers>=5.23,<6", "tokenizers>=0.20"),
    "data": ("tokenizers>=0.20", "pyarrow>=17", "zstandard>=0.22", "jinja2>=3.1"),
    "tensorboard": ("tensorboardX>=2.6",),
    "quantized": ("bitsandbytes>=0.48",),
    "harness": ("lm-eval[hf]>=0.4.9",),
}


def pip_install(extra: str, *names: str) -> str:
    """The command for a shell. names: of the extra's packages, those alone; all where there are none."""
    wanted = [each for each in EXTRAS[extra] if not names or each.startswith(names)]
    return " ".join(["pip install", *(f"'{each}'" for each in wanted)])
