"""What a worker runs a step with: persistent batch, sampler, log probabilities. Executors use `ModelRunner`."""

from headrace.runner.model_runner import ModelRunner, ModelShape

__all__ = ["ModelRunner", "ModelShape"]
