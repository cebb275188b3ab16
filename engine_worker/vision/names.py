"""Names of tensors in the files of a vision-language checkpoint. They depend on the version of transformers: newer
versions put `model.` before the parts of the model, older ones `vision_model.` within the tower."""

DECODER = ("language_model.model.", "model.language_model.")
HEADS = ("language_model.lm_head.", "lm_head.")
VISUAL = "visual."
"""Qwen2-VL's tower, which contains the projector."""
TOWER = ("vision_tower.", "multi_modal_projector.", VISUAL)


def decoder_name(name: str) -> str | None:
    """The tensor's name in the decoder; None if it belongs to the tower or the projector."""
    for prefix in DECODER:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    for prefix in HEADS:
        if name.startswith(prefix):
            return "lm_head." + name.removeprefix(prefix)
    return None if vision_name(name) is not None else name


def vision_name(name: str) -> str | None:
    """The tensor's name in the tower and projector; None if it belongs to the decoder."""
    short = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    return short if short.startswith(TOWER) else None
