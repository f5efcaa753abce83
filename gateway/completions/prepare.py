"""A completion call made ready: its prompts, their generations, and fresh answers to write.

All that can be refused is refused here, before anything is generated or sent.
"""
