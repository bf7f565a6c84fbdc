"""Images: augmentations, encoders, k-NN evaluation and a second task on frozen embeddings.

Nothing here knows a privacy mode. What privacy needs of these parts is stated where it is kept: one
image's views, and one image's embedding, depend on no other image of the batch.
"""

from lit_dpret.encoders.vision.augment import Augmentation, AugmentedViews, as_input
from lit_dpret.encoders.vision.knn import ClassificationScores, KnnResult, confusion_matrix, evaluate_knn
from lit_dpret.encoders.vision.nets import EmbeddingNet, ResNet18, UnitLength, embed
from lit_dpret.encoders.vision.second_task import SecondTaskResult, train_second_task

__all__ = [
    "Augmentation",
    "AugmentedViews",
    "ClassificationScores",
    "EmbeddingNet",
    "KnnResult",
    "ResNet18",
    "SecondTaskResult",
    "UnitLength",
    "as_input",
    "confusion_matrix",
    "embed",
    "evaluate_knn",
    "train_second_task",
]
