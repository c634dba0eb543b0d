"""Derives a module's profile: traces its passes at a few shapes and fits polynomials to the counted bytes."""
