"""A run: its methods and settings, its loop over rounds, its nodes, its directory and checkpoints."""
