"""``python -m lucid.amp`` is ``lucid-amp``. Knows nothing else."""

import sys

from lucid.amp.cli import main

if __name__ == "__main__":
    sys.exit(main())
