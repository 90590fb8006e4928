"""Reserved attention servers: ranks that hold no model and serve the others' core attention.

CAD ranks are the trainers 0 … T-1, which are their ranks in torch.distributed too, and then the servers T … T+S-1.
Trainers see a smaller world and gather lengths and make plans among themselves. A server takes part in exchanges only,
and learns of each from trainer 0, the leader: it never plans, and never guesses.

    split       config and environment of a process -> its role and numbers
    launch      what `-m deepspeed_cad.run` does before it runs the script
    rendezvous  the trainers' store -> every rank knows every other, or one error on all of them
    join        how they come together from there: the board, the sockets, the group
    handshake   how a trainer and a server come to a socket between them
    wire        frames of plain data on a socket
    orders      the leader's side: what servers are told of a micro-batch and of each exchange
    link        a trainer's side: its sockets to the servers, and who of them died
    servers     what a trainer's session holds of them: nobody, or servers that stay
    surviving   servers that die or come later while training goes on
    trainers    a server's side: its sockets from the trainers, and why it should end
    process     a server's process from its start to its exit code
    loop        a server: orders in, exchanges and attention out
    serving     one pass of a call there
    idle        what to change where servers or trainers are idle
"""
