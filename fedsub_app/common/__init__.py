"""What every room uses: errors, seeds, tensors by name, files, the base of settings."""
