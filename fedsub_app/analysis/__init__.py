"""What a run's checkpoints and client states tell of its sub-networks."""
