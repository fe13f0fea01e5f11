"""The control plane of an engine: operations with names, one at a time, on the weights, the memory and the requests.

`plane.py` runs them between steps; `operations.py` lists them; `state.py` is what they change; `refresh.py` brings new
weights in, from the `sources.py` that there are.
"""

from headrace.engine.control.plane import ControlPlane

__all__ = ["ControlPlane"]
