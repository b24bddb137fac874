"""Chat data: reading it, rendering it, masking what is not to be learned, batching it.

``files`` reads records and checks them, ``masks`` turns one chat into token ids and labels, ``dataset`` puts both
together with truncation and counts, and collates.
"""

from ktft.data.dataset import ChatDataset, DatasetReport, collate, encode_chats, split_held_out
from ktft.data.files import Chat, DataError, read_chats
from ktft.data.masks import IGNORE, EncodedChat, TemplateError, encode_chat, end_of_turn_ids, stop_ids

__all__ = [
    "IGNORE",
    "Chat",
    "ChatDataset",
    "DataError",
    "DatasetReport",
    "EncodedChat",
    "TemplateError",
    "collate",
    "encode_chat",
    "encode_chats",
    "end_of_turn_ids",
    "read_chats",
    "split_held_out",
    "stop_ids",
]
