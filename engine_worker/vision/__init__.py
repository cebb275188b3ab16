"""Images: their rows of embeddings, by transformers' vision tower and projector."""
