"""One parse of a GGUF file where transformers makes one each for configuration, tokenizer and weights.

A parse walks every token of the vocabulary in Python: about four seconds for 49,152 of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def gguf_parsed_once() -> Iterator[None]:
    """Inside the block `gguf.GGUFReader` gives one reader for one path. The files must not change meanwhile."""
    import gguf

    original: Any = gguf.GGUFReader
    once: Callable[..., Any] = functools.cache(lambda path: original(path))
    gguf.GGUFReader = lambda path, mode="r": once(str(path)) if mode == "r" else original(path, mode)
    try:
        yield
    finally:
        gguf.GGUFReader = original
