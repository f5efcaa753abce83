"""What a model's output means: content, reasoning, tool calls."""
