"""What crosses between processes, and how: messages and their encoding, sockets, status board, the parent's pipe."""
