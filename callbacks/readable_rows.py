"""Rows that a module of this package cannot read are refused before anything is spent on them.

A private row at which the computation fails ends the run with an error, and the ledger then says so for good. Whether
texts meet a net for images, and whether an image has the size that a net is built for, is known without any row.
"""

from __future__ import annotations

from typing import Any

from lit_dpret.errors import ConfigurationError, DataError, first_line


def refuse_unread_rows(module: Any, data: Any) -> None:
    """Refuse texts for a module of images, images for one of texts, and images of a size that its net does not take.

    ``data`` must be set up. Modules and data of your own that do not say what they read and give are not looked at.
    """
    reads, name = getattr(module, "reads", None), type(module).__name__
    shape = getattr(data, "image_shape", None)
    if reads == "texts" and shape is not None:
        raise ConfigurationError(
            f"{type(data).__name__} gives images, and {name} reads texts. Choose model=embedding_trainer with a "
            "model.net for images, or a datamodule of texts."
        )
    if reads == "images" and shape is None and hasattr(type(data), "collection"):
        raise ConfigurationError(
            f"{type(data).__name__} gives texts, and model.net={type(module.net).__name__} with these model.views "
            "reads images. Set model.net=null, model.views=null and model.encoder, or choose a datamodule of images."
        )
    blank = getattr(data, "blank_row", None)
    if blank is None or not hasattr(module, "try_rows") or any(weight.is_meta for weight in module.parameters()):
        return
    channels, height, width = data.image_shape
    try:
        module.try_rows([blank(), blank()])
    except (RuntimeError, ValueError, DataError) as error:
        raise ConfigurationError(
            f"model.net={type(module.net).__name__} cannot read images of {channels} x {height} x {width} (channels, "
            f"height, width): {first_line(error)}. Let a vision_folder resize them by datamodule.image_size=PIXELS, or "
            f"build the net for them (EmbeddingNet: +model.net.image_size={height} +model.net.in_channels={channels})."
        ) from error
