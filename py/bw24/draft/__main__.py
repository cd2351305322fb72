"""`python -m bw24.draft` is `bw24-draft`."""

import sys

from .cli import main

sys.exit(main())
