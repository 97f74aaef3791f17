"""hivemind's P2P and DHT, loaded without the rest of it.

The package's own __init__ loads its averaging, its optimizers and its mixture of experts, and with them scipy: three quarters of the time that
its import takes beside torch's, and 50 MB in each process, for what is used nowhere here.
"""

import logging
import sys
import warnings
from importlib.util import find_spec, module_from_spec


def load_hivemind() -> None:
    """Imports hivemind, which takes seconds where torch is not loaded yet, without its prints, log handler and warnings. Every use of it begins here;
    what is not of its network has to be imported by its own name (hivemind.averaging). Raises ImportError."""
    warnings.filterwarnings("ignore", module=r"hivemind(\.|$)")
    if "hivemind" not in sys.modules and (spec := find_spec("hivemind")) is not None:
        sys.modules["hivemind"] = module_from_spec(spec)  # it says where its parts are, and is not executed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")
    logging.getLogger("asyncio").addFilter(_is_news)
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)


def _is_news(record: logging.LogRecord) -> bool:
    """Of each search that is called off hivemind leaves tasks that wait for its end, which asyncio tells on the terminal when they are collected."""
    text = record.getMessage()
    return not (text.startswith("Task was destroyed but it is pending") and "Event.wait()" in text)
