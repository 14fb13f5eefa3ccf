"""`python -m tests.simulation [SEED | --seeds N]`: live one history again, or many."""

import sys

from .lives import main

sys.exit(main())
