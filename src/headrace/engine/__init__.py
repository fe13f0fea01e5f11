"""The engine: request state machine, scheduler, KV accounting. `core.py` is its heart, `loop.py` runs it."""
