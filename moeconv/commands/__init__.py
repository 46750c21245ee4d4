"""What does each verb do? One call of the library, then what the person sees of it."""
