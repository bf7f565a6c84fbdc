"""Images: augmentations, encoders and k-NN evaluation.

Nothing here knows a privacy mode. The properties that privacy needs are documented where they are guaranteed: one
image's views, and one image's embedding, depend on no other image of the batch.
"""

from lit_dpret.encoders.vision.augment import Augmentation, AugmentedViews, as_input
from lit_dpret.encoders.vision.knn import ClassificationScores, KnnResult, confusion_matrix, evaluate_knn
from lit_dpret.encoders.vision.nets import EmbeddingNet, ResNet18, UnitLength, embed

__all__ = [
    "Augmentation",
    "AugmentedViews",
    "ClassificationScores",
    "EmbeddingNet",
    "KnnResult",
    "ResNet18",
    "UnitLength",
    "as_input",
    "confusion_matrix",
    "embed",
    "evaluate_knn",
]
