"""Qwen2-VL and Qwen2.5-VL of transformers."""

from io import BytesIO

import PIL.Image
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.parity.vision import MAX_TOKENS, Prompt


class Oracle:
    """The transformers model in a folder. Its prompts repeat the image token once for each row of an image."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.start, self.end = self.model.config.vision_start_token_id, self.model.config.vision_end_token_id
        self.token_id = self.model.config.image_token_id
        self.vocab_size = self.model.config.text_config.vocab_size

    @torch.inference_mode()
    def generate(self, prompt: Prompt, **options) -> list[int]:
        pictures = [PIL.Image.open(BytesIO(part)) for part in prompt if isinstance(part, bytes)]
        inputs, counts = {}, iter(())
        if pictures:
            inputs = dict(self.processor(images=pictures, return_tensors="pt"))
            counts = iter((inputs["image_grid_thw"].prod(-1) // 4).tolist())
        ids: list[int] = []
        for part in prompt:
            ids += [part] if isinstance(part, int) else [self.start, *[self.token_id] * next(counts), self.end]
        tensor = torch.tensor([ids])
        if pictures:
            inputs["mm_token_type_ids"] = (tensor == self.token_id).int()
        # Otherwise the model would reuse those of the previous call.
        self.model.model.rope_deltas = None
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False} | inputs | options
        tokens = self.model.generate(tensor, attention_mask=torch.ones_like(tensor), **options)
        return tokens[0, len(ids) :].tolist()
