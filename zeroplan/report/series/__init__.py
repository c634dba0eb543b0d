"""What a picture shows, as plain numbers: drawn on paper, in a terminal or on a page from the same figures."""
