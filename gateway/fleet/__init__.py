"""The live fleet: which node holds what, decided and changed while streams run."""
