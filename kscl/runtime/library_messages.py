"""What libraries say that is not the user's concern, silenced for every process that imports kscl.

Ranks and loader workers import it, too, or are forked from a process that has.
"""

from __future__ import annotations

import logging
import warnings

# The number of workers is a setting, and the run says how fast its images are read.
WORKER_COUNT = r"This DataLoader will create \d+ worker processes"
# Detectron2 asks whether it is traced; newer releases of torch log a warning about that question.
TRACING_LOGGER = "torch.fx._symbolic_trace"
TRACING = "is_fx_tracing will return true"


def silence_library_messages() -> None:
    """Add the filters; everything else is still shown."""
    warnings.filterwarnings("ignore", WORKER_COUNT, UserWarning)
    logging.getLogger(TRACING_LOGGER).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(TRACING)
