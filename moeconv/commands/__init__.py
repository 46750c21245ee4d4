"""What does each command do? One call of the library, then what the person sees of it."""
