"""Random training loops against each document alone (fuzz.py), and long ones whose memory must stay flat (soak.py)."""
