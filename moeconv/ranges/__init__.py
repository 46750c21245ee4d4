"""Ranges of bytes, of files and of memory: read and digested many at once."""
