"""`python -m graphspec` is the `graphspec` command."""

import sys

from graphspec.commands.main import main

sys.exit(main())
