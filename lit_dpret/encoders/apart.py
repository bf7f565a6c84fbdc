"""Embeddings in which no other text has a say, to the last bit.

What a row is compared with is decided by scores, and where two are nearly equal the last bit decides. Products of
matrices round in another way for another number of rows, another length, or another place among the rows. So here
every batch has one number of rows, and a text decides by itself how far its batch is padded and where in it it stands:
whatever else is embedded, the same numbers go through the same operations. What remains is that a product's row is
made of that row alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

#: Places for texts in a batch; beside them stands one short row, so that no batch is without padding (transformers
#: takes another way through attention where it sees none).
LANES = 7
#: A text is padded to the next multiple of so many tokens, or to all there are.
_STEP = 16


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
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    ends = (mask * places).amax(dim=1).clamp(min=1).add(_STEP - 1).div(_STEP, rounding_mode="floor").mul(_STEP).tolist()
    lanes: dict[int, list[list[int]]] = {}
    first: dict[bytes, int] = {}
    for row, (key, end) in enumerate(zip(keys, ends, strict=True)):
        if first.setdefault(key, row) == row:  # equal texts once
            lanes.setdefault(end, [[] for _ in range(LANES)])[zlib.crc32(key) % LANES].append(row)
    made: dict[int, Tensor] = {}
    with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
        for end in sorted(lanes, reverse=True):  # the longest first, so that what does not fit fails at once
            some, seen = ids[:, :end], mask[:, :end]
            for number in range(max(map(len, lanes[end]))):
                batch = {"input_ids": some.new_full((LANES + 1, some.shape[1]), filler)}
                batch["attention_mask"] = _one_token(seen)
                filled = {lane: rows[number] for lane, rows in enumerate(lanes[end]) if number < len(rows)}
                for lane, row in filled.items():
                    batch["input_ids"][lane], batch["attention_mask"][lane] = some[row], seen[row]
                found = embed(batch)
                made |= {row: found[lane] for lane, row in filled.items()}
    return torch.stack([made[first[key]] for key in keys])


def _one_token(mask: Tensor) -> Tensor:
    """A mask of rows with one token each."""
    found = mask.new_zeros(LANES + 1, mask.shape[1])
    found[:, 0] = 1
    return found
