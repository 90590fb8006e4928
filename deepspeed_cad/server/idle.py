"""What to change where reserved servers or trainers are idle: one line, from shares of time that were measured."""

IDLE = 0.15
"""Share of their time that ranks may be idle before somebody should know. A choice: a server more or less among eight
changes its share by about as much."""
EVERY = 32
"""Micro-batches over which shares are taken. A choice: some seconds of training. The first ones are left out: kernels
compile, and linear layers are not known yet."""


def advise(
    servers_idle: float,
    trainers_idle: float,
    servers: int,
    trainers: int,
    where: str = f"trainer 0 for {{}} of {EVERY} micro-batches",
) -> str:
    """What idle ranks mean; empty where neither are idle for long. Shares of time in which servers did not attend, and
    trainer 0, or the mean trainer, waited for exchanges; `where` says which, with a place for the share.
    """
    shares = f"servers were idle for {servers_idle:.0%} and {where.format(f'{trainers_idle:.0%}')}"
    if servers_idle > IDLE and trainers_idle > IDLE:
        return (
            f"{shares}: they wait for each other. Look whether nano-batches alternate over the whole decoder "
            "(docs/interleave.md) and how fast links are; another number of servers does not help"
        )
    if servers_idle > IDLE:
        fewer = f"{servers - 1} servers" if servers > 1 else 'none ("servers": "all")'
        return f"{shares}: reserve fewer of them, {fewer}, so that more ranks train"
    if trainers_idle > IDLE and trainers > 1:
        return f"{shares}: reserve more servers, {servers + 1}, so that trainers get their attention sooner"
    if trainers_idle > IDLE:
        return f"{shares}: attention takes longer than all else. Add servers, or train in place"
    return ""
