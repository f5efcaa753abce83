"""Embeddings: a chat model's hidden states, pooled into one vector for each text."""
