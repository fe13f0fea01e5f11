"""Models: one configurable decoder family, the configs and name maps that fit checkpoints to it, and the loader."""

from headrace.models.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
