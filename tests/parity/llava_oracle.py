"""LLaVA of transformers."""

from io import BytesIO

import PIL.Image
import torch
from transformers import AutoImageProcessor, LlavaForConditionalGeneration

from tests.fakes.llava import ROWS
from tests.parity.vision import MAX_TOKENS, Prompt


class Oracle:
    """The transformers model in a folder. Its prompts repeat the image token once for each row of an image."""

    def __init__(self, folder, rows: int = ROWS) -> None:
        self.folder = folder
        self.rows = rows
        self.model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.token_id = self.model.config.image_token_id
        self.vocab_size = self.model.config.text_config.vocab_size

    @torch.inference_mode()
    def generate(self, prompt: Prompt, **options) -> list[int]:
        ids = [token for part in prompt for token in ([part] if isinstance(part, int) else [self.token_id] * self.rows)]
        pictures = [PIL.Image.open(BytesIO(part)) for part in prompt if isinstance(part, bytes)]
        pixels = self.processor(images=pictures, return_tensors="pt")["pixel_values"]
        tensor = torch.tensor([ids])
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False} | options
        tokens = self.model.generate(tensor, pixel_values=pixels, attention_mask=torch.ones_like(tensor), **options)
        return tokens[0, len(ids) :].tolist()
