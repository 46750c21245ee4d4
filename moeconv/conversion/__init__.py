"""The line: read, lay out, write, record, seal; in bounded memory, over shards side by side."""
