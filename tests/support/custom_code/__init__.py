"""A model of its own kind, as a checkpoint brings it beside its weights: `save_custom_model` writes such a folder."""
