"""``ktft convert``: a checkpoint whose routed experts are stored in fewer bits, in layouts that other tools read too.

- ``source``: a checkpoint directory as matrices of experts, and everything else.
- ``plan``: what becomes of each tensor, and of the config; whatever cannot be is refused here, before anything is
  written.
- ``write``: the new directory, shard by shard, resumable, there as a whole or not at all.
- ``verify``: whether one directory holds what another does, to within half a step of its formats.
"""

from __future__ import annotations

from ktft.convert.verify import verify
from ktft.convert.write import convert

__all__ = ["convert", "verify"]
