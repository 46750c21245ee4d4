"""How are many ranges of bytes read, or digested, at once?"""
