"""Linear layers and the input embedding in the forms that a CPU multiplies fastest."""
