"""OpenAI's Responses API: what it reads, writes, and keeps for a while."""
