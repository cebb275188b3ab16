"""The uncertainty of each token, computed from logits, and the similarity of texts, computed from hidden states."""

from itertools import combinations

import numpy as np

from sluice import Client
from sluice.client import Tensor

TEXTS = ("for i in range(10):", "for item in items:", "import numpy as np")


def entropies(tensor: Tensor) -> np.ndarray:
    """The entropy of each row of logits, in nats: [rows]."""
    logits = tensor.array()
    logits = logits - logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -(np.exp(logprobs) * logprobs).sum(-1)


def embedding(client: Client, text: str) -> np.ndarray:
    """The hidden state of the text's last position, scaled to length 1: [hidden size]."""
    (tensor,) = client.generate(text, tensors=[{"name": "hidden_states"}], max_tokens=1).tensors
    hidden = tensor.array()[0]
    return hidden / np.linalg.norm(hidden)


with Client("127.0.0.1:50051", timeout=60) as client:
    for chunk in client.stream("def fibonacci(n):", generation_logits=True, token_ids=True, seed=1, max_tokens=16):
        if chunk.token_ids:
            print(chunk.token_offset, repr(chunk.text))
        if chunk.tensor is not None:
            for row, entropy in enumerate(entropies(chunk.tensor), chunk.tensor.start):
                print(f"token {row} was sampled from a distribution with an entropy of {entropy:.2f} nats")

    embeddings = {text: embedding(client, text) for text in TEXTS}
    for one, other in combinations(TEXTS, 2):
        print(f"{embeddings[one] @ embeddings[other]:.3f} {one!r}, {other!r}")
