"""Reserved servers that may be lost, or come later, while training goes on (`"on_server_failure": "continue"`)."""
