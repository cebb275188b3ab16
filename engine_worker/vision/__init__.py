"""Computes the embedding rows of images, with the vision tower and projector of transformers."""
