"""``python -m bench``: how fast fedsub is on this machine, in ratios to the best that the machine itself can do."""
