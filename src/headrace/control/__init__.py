"""The supervisor process, `headrace serve` itself: see `supervisor.py`."""
