"""stub"""
def close_session() -> None:
    return
