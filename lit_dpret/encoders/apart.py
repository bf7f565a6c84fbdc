"""Embeddings in which no other text has a say, to the last bit.

What a row is compared with is decided by scores, and where two are nearly equal the last bit decides. Products of
matrices round in another way for another number of rows, another length, or another place among the rows. So here
every batch has one shape, and a text decides by itself where in it it stands: whatever else is embedded, the same
numbers go through the same operations. What remains is that a product's row is made of that row alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Places for texts in a batch; beside them stands one short row, so that no batch is without padding (transformers
#: takes another way through attention where it sees none).
LANES = 7


def embed_apart(embed: Callable[[dict[str, Tensor]], Tensor], features: Mapping[str, Tensor], filler: int) -> Tensor:
    """Embed tokenised texts, without gradient and in no lower precision than the weights have.

    Guarantees:
        - A row of the result is a function of that row of ``features`` and of the weights, if in ``embed`` a row is
          made of that row alone for inputs of one shape.

    Args:
        embed: From tokens to embeddings, ``(rows, dim)``; in evaluation mode.
        features: ``input_ids`` and ``attention_mask``, ``(rows, tokens)``, of a number of tokens that follows from no
            text (`TextEncoder.at_full_length`).
        filler: The id of the padding token.

    Returns:
        Shape ``(rows, dim)``.
    """
    ids, mask = features["input_ids"], features["attention_mask"]
    keys = [row.tobytes() for row in torch.cat([ids, mask], dim=1).cpu().numpy()]
    lanes: list[list[int]] = [[] for _ in range(LANES)]
    first: dict[bytes, int] = {}
    for row, key in enumerate(keys):
        if first.setdefault(key, row) == row:  # equal texts once
            lanes[zlib.crc32(key) % LANES].append(row)
    made: dict[int, Tensor] = {}
    with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
        for number in range(max(map(len, lanes))):
            batch = {"input_ids": ids.new_full((LANES + 1, ids.shape[1]), filler), "attention_mask": _one_token(mask)}
            filled = {lane: rows[number] for lane, rows in enumerate(lanes) if number < len(rows)}
            for lane, row in filled.items():
                batch["input_ids"][lane], batch["attention_mask"][lane] = ids[row], mask[row]
            found = embed(batch)
            made |= {row: found[lane] for lane, row in filled.items()}
    return torch.stack([made[first[key]] for key in keys])


def _one_token(mask: Tensor) -> Tensor:
    """A mask of rows with one token each."""
    found = mask.new_zeros(LANES + 1, mask.shape[1])
    found[:, 0] = 1
    return found
