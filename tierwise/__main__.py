"""`python -m tierwise` is `tierwise`."""

import sys

from .cli import main

sys.exit(main())
