"""What a user reads: lines of a session, statistics, keys that do nothing."""
