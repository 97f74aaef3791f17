"""`evaluate FOLDER --tasks`: benchmarks of lm-evaluation-harness on an exported or published model, through the library itself.

Nothing of a task is known here: the library reads its files, fetches its questions from the hub and scores. No code of a model's folder is run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from dilocox_peer.cli.flags import EvaluateFlags
from dilocox_peer.errors import ConfigError
from dilocox_peer.extras import pip_install


def run_tasks(folder: Path, flags: EvaluateFlags) -> None:
    """Prints a line a figure. Raises ConfigError."""
    from dilocox_peer.model.weights import open_folder
    from dilocox_peer.peer.device import AUTO, chosen_device

    opened = open_folder(folder)
    harness, known = _library(flags)
    if unknown := [task for task in flags.tasks if not known.match_tasks([task])]:
        raise ConfigError(
            f"--tasks {unknown[0]}: lm-evaluation-harness knows none of that name: `lm-eval ls tasks` lists them, --task-files "
            "names a folder with more"
        )
    model: dict[str, Any] = {"pretrained": str(folder), "dtype": opened.precision, "trust_remote_code": False}
    if flags.context is not None:
        model["max_length"] = flags.context
    try:
        found = harness.simple_evaluate(
            model="hf", model_args=model, device=chosen_device(AUTO), tasks=list(flags.tasks), task_manager=known, limit=flags.limit,
            log_samples=False,
        )  # fmt: skip
    except Exception as error:  # of whichever task, model class or download
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"evaluate {folder} --tasks {','.join(flags.tasks)}: {reason}") from None
    results: Mapping[str, Mapping[str, Any]] = found["results"]
    if flags.log.is_json:
        typer.echo(json.dumps(results, default=str))
        return
    for task, figures in results.items():
        for name, value in figures.items():
            metric, _, filtered = name.partition(",")
            if isinstance(value, int | float) and filtered and not metric.endswith("_stderr"):
                deviation = figures.get(f"{metric}_stderr,{filtered}")
                spread = f" ± {deviation:.4f}" if isinstance(deviation, float) else ""
                typer.echo(f"{task} {metric}: {value:.4f}{spread}")


def _library(flags: EvaluateFlags) -> tuple[Any, Any]:
    """lm_eval, and what it knows of tasks. Raises ConfigError where it is not installed."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"--tasks needs lm-evaluation-harness ({error}): `{pip_install('harness')}`") from None
    if flags.task_files is not None and not flags.task_files.is_dir():
        raise ConfigError(f"--task-files {flags.task_files}: no such folder")
    include = None if flags.task_files is None else str(flags.task_files)
    return lm_eval, TaskManager(include_path=include)
