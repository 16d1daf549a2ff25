"""ckptd: a checkpoint daemon for PyTorch training. This package never imports torch."""

__version__ = "0.1.0"
