"""Headrace beside other servers: what `side_by_side.py` and `checkpoints.py` are made of."""
