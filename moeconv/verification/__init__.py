"""Is it still true? Structure, digests, and the source, on a disk and on the Hub."""
