"""What a scheduler knows (the ledger) and decides (placement, pool moves, batches), in model time and in real time."""
