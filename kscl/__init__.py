"""K-shot contrastive learning: pretraining, and the records every evaluation of it writes."""

from kscl.errors import KsclError

__version__ = "0.1.0"

__all__ = ["KsclError", "__version__"]
