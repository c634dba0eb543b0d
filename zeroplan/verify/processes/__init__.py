"""Ranks as processes: who starts them, what each does, who hears of them, and what happens when one is lost."""
