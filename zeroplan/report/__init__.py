"""Results to text, Markdown and JSON; prints nothing."""
