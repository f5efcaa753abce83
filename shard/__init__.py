"""A node: a contiguous range of a model's decoder layers and a K/V cache for it."""
