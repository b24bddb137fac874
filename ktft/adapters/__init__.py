"""LoRA adapters on models with mapped experts: creating them, saving them, loading them.

Public: :func:`get_peft_model`, :func:`load_adapter`, :class:`KtftPeftModel`, :class:`AdapterError`. ``config`` says what a LoraConfig may
ask for and how it is written for stock PEFT, ``disk`` which tensor of a file is which, ``model`` ties both to PEFT.
"""

from ktft.adapters.config import AdapterError
from ktft.adapters.model import KtftPeftModel, get_peft_model, load_adapter

__all__ = ["AdapterError", "KtftPeftModel", "get_peft_model", "load_adapter"]
