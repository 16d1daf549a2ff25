"""Real text that ships with Python, as bytes: what the trainer learns.

The text is the language reference behind ``help()`` (some 460 kB of English and
code), so that nothing has to be downloaded. Which windows of it a step sees depends
on the seed and the step alone, never on how many workers there are: that is what
lets a run go on at another world size. This room never draws from global randomness.
"""

from __future__ import annotations

import pydoc_data.topics

import torch

#: Size of the vocabulary: one token is one byte.
VOCABULARY = 256


def corpus() -> torch.Tensor:
    """The whole text: uint8 of shape (bytes,), the same in every process of one Python version."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode("utf-8")), dtype=torch.uint8)


def global_batch(text: torch.Tensor, *, seed: int, step: int, sequences: int, length: int) -> torch.Tensor:
    """The windows that all workers together see in `step`: int64 of shape (sequences, length + 1).

    One token more than `length`, because the target of a token is the one after it.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (sequences, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
