"""Can I have my checkpoint back? The way from a converted directory to its source's bytes."""
