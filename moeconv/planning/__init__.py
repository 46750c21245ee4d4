"""Who goes where? The whole decision, from headers and config, before a byte is moved."""
