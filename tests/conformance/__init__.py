"""What other people's clients make of this server, and every fault that was reported of servers like it."""
