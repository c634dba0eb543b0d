"""A module's profile, derived: its passes taken apart at a few shapes, and polynomials through what was counted."""
