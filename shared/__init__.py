"""The protocol that gateways and nodes speak."""
