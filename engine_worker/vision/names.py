"""Names of tensors in the files of a vision-language checkpoint. They differ between versions of transformers: newer
ones put `model.` before the parts of the model, older ones `vision_model.` within the tower."""

DECODER = ("language_model.model.", "model.language_model.")
HEADS = ("language_model.lm_head.", "lm_head.")
VISUAL = "visual."
"""Qwen2-VL's tower, which has a projector within."""
TOWER = ("vision_tower.", "multi_modal_projector.", VISUAL)


def decoder_name(name: str) -> str | None:
    """In the decoder; None: of the tower or the projector."""
    for prefix in DECODER:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    for prefix in HEADS:
        if name.startswith(prefix):
            return "lm_head." + name.removeprefix(prefix)
    return None if vision_name(name) is not None else name


def vision_name(name: str) -> str | None:
    """Within the tower or the projector; None: of the decoder."""
    short = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    return short if short.startswith(TOWER) else None
