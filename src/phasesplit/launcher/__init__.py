"""The live cluster put together: worker processes, the gateway's process, and what keeps them alive."""
