"""``python -m ckptd`` is the command ``ckptd``."""

import sys

from ckptd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
