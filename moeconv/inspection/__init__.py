"""What is this, and what can become of it? Looks at headers, and at a layout's own arithmetic."""
