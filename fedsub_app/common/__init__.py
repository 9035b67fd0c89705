"""Tools of all packages: errors, seeds, tensors by name, files, the base of settings."""
