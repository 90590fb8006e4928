"""Reserved attention servers: ranks that hold no model and serve the others' core attention.

CAD ranks are the trainers 0 … T-1, which are their ranks in torch.distributed too, and then the servers T … T+S-1.
Trainers see a smaller world and gather lengths and make plans among themselves. A server takes part in exchanges only,
and learns of each from trainer 0, the leader: it never plans, and never guesses.
"""
