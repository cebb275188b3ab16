"""transformers models whose prompts contain virtual tokens."""

import torch

from sluice.wire.params import SamplingParams, StopParams

GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 12
STOPPING = StopParams(MAX_TOKENS)


class Oracle:
    """A transformers model whose prompts are embeddings."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.embeddings = model.get_input_embeddings()
        self.vocab_size, self.hidden_size = self.model.config.vocab_size, self.model.config.hidden_size

    def rows(self, count: int, seed: int) -> torch.Tensor:
        """Random rows [count, hidden] of the magnitude of token embeddings."""
        random = torch.Generator().manual_seed(seed)
        scale = self.embeddings(torch.arange(50)).float().std()
        return torch.randn(count, self.hidden_size, generator=random) * scale

    def embed(self, prompt: list[int], rows: torch.Tensor) -> torch.Tensor:
        """Embeddings [1, T, hidden] of a prompt with virtual tokens."""
        ids = torch.tensor(prompt)
        virtual = ids >= self.vocab_size
        embeddings = self.embeddings(ids.masked_fill(virtual, 0)).clone()
        embeddings[virtual] = rows.float()[ids[virtual] - self.vocab_size]
        return embeddings[None]

    @torch.inference_mode()
    def generate(self, prompt: list[int], rows: torch.Tensor, **options) -> list[int]:
        embeds = self.embed(prompt, rows)
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False} | options
        return self.model.generate(inputs_embeds=embeds, attention_mask=mask, **options)[0].tolist()
