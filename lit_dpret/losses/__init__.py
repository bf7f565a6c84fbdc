"""What a retriever is trained to do: put the right passage above the others.

`softmax` holds losses of embeddings, one value per row. `pairs` holds losses of the table of all
similarities in a batch, which know what one record can do to their gradient.
"""

from lit_dpret.losses.softmax import InBatchSoftmaxLoss, PublicPoolSoftmaxLoss, false_negatives

__all__ = ["InBatchSoftmaxLoss", "PublicPoolSoftmaxLoss", "false_negatives"]
