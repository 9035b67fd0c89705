"""Analyses of a run's sub-networks from its checkpoints and client states."""
