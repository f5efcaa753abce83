"""The gateway: HTTP, tokens, text, sessions, routes, recovery. No torch here."""
