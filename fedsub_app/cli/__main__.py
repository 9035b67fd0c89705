"""``python -m fedsub_app.cli``."""

from fedsub_app.cli.main import process

process()
