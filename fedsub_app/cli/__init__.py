"""The ``fedsub`` command, a module for each group of its commands."""
