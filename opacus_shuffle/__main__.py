"""``python -m opacus_shuffle`` is ``opacus-shuffle``."""

from __future__ import annotations

import sys

from opacus_shuffle.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
