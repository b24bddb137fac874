"""LoRA adapters on models with mapped experts: creating them, saving them, loading them.

Public: :func:`get_peft_model`, :func:`load_adapter`, :class:`KtftPeftModel`, :class:`AdapterError`.

``values`` and ``config`` say what a LoraConfig may ask for and how it is written for stock PEFT, ``base`` what the base
model must still be, ``layout`` which tensor of a file is which, ``checks`` what must hold before it is used; ``disk``
reads and writes, ``model`` ties all of it to PEFT.
"""

from ktft.adapters.config import AdapterError
from ktft.adapters.model import KtftPeftModel, get_peft_model, load_adapter

__all__ = ["AdapterError", "KtftPeftModel", "get_peft_model", "load_adapter"]
