"""What the user says: frozen, strict descriptions without a formula."""
