"""What must happen: the schedule language, its verifier, and one file per policy."""
