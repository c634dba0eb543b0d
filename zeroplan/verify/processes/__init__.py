"""Runs ranks as processes: starts them, receives their messages, and ends all of them if one is lost."""
