"""The channel's client side: `base.py` is the interface, `inproc.py` and `zmq.py` are the two clients."""
