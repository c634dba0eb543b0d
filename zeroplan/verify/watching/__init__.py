"""What a run takes, seen: every request for memory and every collective, what each was for, and what they come to."""
