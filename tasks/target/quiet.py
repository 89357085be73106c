"""Loading without the libraries' chatter: what people need is said by our own log lines."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars for a while; errors still raise, our log still speaks."""
    from transformers.utils import logging as chatter

    level = chatter.get_verbosity()
    bars = chatter.is_progress_bar_enabled()
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    try:
        # Some progress bars (GGUF conversion, saving) heed no setting and write to stderr.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()
