"""``ktft bench``: what this machine can do at most, and how much of it the experts, a training step and a decode reach.

``machine`` measures the machine and describes it, ``layer`` makes the work (weights in a file, routings), ``memory``
watches resident memory, ``experts`` (with ``overheads``, on request), ``train`` (with ``train_side``, one side in a
process of its own) and ``decode`` are the three benchmarks, ``report`` prints. Nothing is imported here: each command
loads what it needs.
"""
