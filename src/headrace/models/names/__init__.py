"""Checkpoint name maps, one per source."""
