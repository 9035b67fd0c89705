"""``python -m fedsub_app.cli``."""

import sys

from fedsub_app.cli.main import main

sys.exit(main())
