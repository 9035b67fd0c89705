"""Tools of all packages: errors, seeds, tensors by name, files, tasks, the base of settings."""
