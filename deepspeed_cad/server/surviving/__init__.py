"""Reserved servers that may be lost, or come later, while training goes on (`"on_server_failure": "continue"`).

members     who is there, from one change to the next; what may be used where servers change
board       what servers that came later read on the error board
link        a trainer's sockets to servers that come and go
change      how all trainers agree on who is there, and go on
regroup     how those that are there open another group
"""
